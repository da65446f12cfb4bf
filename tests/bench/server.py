"""Starts the project's own server for a benchmark, as a user would: default settings, one process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@contextmanager
def own_server(port: int, start_limit: float = 300.0, settings: Mapping[str, str] = {}) -> Iterator[tuple[str, float]]:
    """Yields the URL and the seconds from start to ready; ends the server on leaving. settings: CHORUS_* variables."""
    url = f"http://127.0.0.1:{port}"
    started = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-m", "service"],
        cwd=ROOT,
        env={**os.environ, "CHORUS_PORT": str(port), "CHORUS_LOG_LEVEL": "warning", **settings},
    )
    try:
        while not _is_ready(url):
            if process.poll() is not None:
                raise RuntimeError(f"the server ended with status {process.returncode}")
            if time.perf_counter() - started > start_limit:
                raise RuntimeError(f"the server is not ready after {start_limit:.0f} s")
            time.sleep(0.05)
        yield url, time.perf_counter() - started
    finally:
        process.terminate()
        process.wait(60)


def rss_bytes(port: int) -> int:
    """Resident memory of the process that listens on `port`; 0 where /proc cannot tell."""
    folder = _process_folder(port)
    lines = [] if folder is None else (folder / "status").read_text().splitlines()
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS")), 0)


def cpu_seconds(port: int) -> float:
    """Processor time that it has taken so far; 0 where /proc cannot tell."""
    folder = _process_folder(port)
    if folder is None:
        return 0.0
    fields = (folder / "stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _process_folder(port: int) -> Path | None:
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command = (folder / "cmdline").read_bytes().split(b"\0")
            environment = (folder / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if b"service" in command and f"CHORUS_PORT={port}".encode() in environment:
            return folder
    return None


def first_model(url: str) -> str:
    with urllib.request.urlopen(f"{url}/v1/models", timeout=10) as response:
        return str(json.load(response)["data"][0]["id"])


def _is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health/ready", timeout=5) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False
