"""Real servers in processes of their own, and what a test asks them from outside."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import httpx

ROOT = Path(__file__).parents[2]
START_SECONDS = 240.0
"""Bound on start-up: the first start of all converts the default model."""

SETTLE_SECONDS = 60.0
"""Bound on anything that must happen soon. No test's result depends on how soon."""

Launcher = Literal["service", "hypercorn", "faulty-service", "faulty-hypercorn"]
_COMMANDS: dict[Launcher, list[str]] = {
    "service": [sys.executable, "-m", "service"],
    "hypercorn": [sys.executable, "-m", "hypercorn", "service.app:app"],
    "faulty-service": [sys.executable, "-m", "tests.e2e.faulty_app"],
    "faulty-hypercorn": [sys.executable, "-m", "hypercorn", "tests.e2e.faulty_app:app"],
}
_ADDRESS = re.compile(r"(?:listening|Running)\b.{1,12}http://127\.0\.0\.1:(\d+)")


@dataclass(frozen=True)
class Spec:
    """What to start. settings: environment variables, with their CHORUS_ (or, of the faulty app, FAULTY_) prefix."""

    launcher: Launcher = "service"
    worker: str = "asyncio"
    settings: tuple[tuple[str, str], ...] = ()

    @property
    def name(self) -> str:
        return f"{self.launcher}-{self.worker}"

    def command(self, port: int) -> list[str]:
        command = _COMMANDS[self.launcher]
        if "hypercorn" in self.launcher:
            return [*command, "-k", self.worker, "-b", f"127.0.0.1:{port}"]
        return command

    def environment(self, port: int) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("CHORUS_")}
        own = {"CHORUS_PORT": str(port), "CHORUS_WORKER": self.worker, "CHORUS_KV_CACHE_BYTES": "256MiB"}
        return kept | own | dict(self.settings)


def spec(launcher: Launcher, worker: str, settings: Mapping[str, object]) -> Spec:
    return Spec(launcher, worker, tuple(sorted((name, str(value)) for name, value in settings.items())))


_LIBC = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1


def _end_with_parent() -> None:
    """In the child: SIGTERM when the tests are killed, so that no server outlives them (Linux)."""
    if sys.platform == "linux":
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


class StartError(AssertionError):
    """The server ended, or did not answer, before it was ready."""


@dataclass
class Server:
    """A started process; its output goes to `log`."""

    spec: Spec
    process: subprocess.Popen[bytes]
    log: Path
    port: int = 0
    http: httpx.Client = field(init=False)

    @classmethod
    def start(cls, wanted: Spec, *, port: int = 0) -> Server:
        """Does not wait for anything."""
        handle, name = tempfile.mkstemp(prefix="chorus-", suffix=".log")
        with os.fdopen(handle, "wb") as log:
            process = subprocess.Popen(
                wanted.command(port),
                cwd=ROOT,
                env=wanted.environment(port),
                stdout=log,
                stderr=log,
                process_group=0,
                preexec_fn=_end_with_parent,
            )
        return cls(wanted, process, Path(name))

    def __enter__(self) -> Server:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    # -- life

    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def lines(self) -> list[str]:
        """What is for people: the output without the structured log."""
        return [line for line in self.output().splitlines() if line and not line.startswith("{")]

    def wait_listening(self) -> Server:
        def listening() -> bool:
            if (match := _ADDRESS.search(self.output())) is not None:
                self.port = int(match[1])
                return True
            self._fail_if_ended()
            return False

        if hasattr(self, "http"):
            return self
        wait_until(listening, "the server listens", START_SECONDS)
        self.http = httpx.Client(base_url=self.url, timeout=SETTLE_SECONDS)
        return self

    def wait_ready(self) -> Server:
        self.wait_listening()

        def ready() -> bool:
            self._fail_if_ended()
            return self.http.get("/health/ready").status_code == 200

        wait_until(ready, "the server is ready", START_SECONDS)
        return self

    def signal(self, number: signal.Signals = signal.SIGTERM) -> None:
        self.process.send_signal(number)

    def wait(self) -> int:
        """The exit status."""
        try:
            return self.process.wait(SETTLE_SECONDS)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the server did not end:\n{self.output()}") from None

    def close(self) -> None:
        """End it however it is, by SIGTERM if that does; no process of it stays."""
        if hasattr(self, "http"):
            self.http.close()
        if self.process.poll() is None:
            self.signal()
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait()
        self.log.unlink(missing_ok=True)

    def _fail_if_ended(self) -> None:
        if self.process.poll() is not None:
            raise StartError(f"ended with {self.process.returncode}:\n{self.output()}")

    # -- requests

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def model(self) -> str:
        return str(self.http.get("/v1/models").json()["data"][0]["id"])

    def get(self, path: str) -> httpx.Response:
        return self.http.get(path)

    def post(self, path: str, body: Mapping[str, Any]) -> httpx.Response:
        return self.http.post(path, json=body)

    def metrics(self) -> dict[str, float]:
        """Sample name with its labels to value."""
        lines = (line for line in self.get("/metrics").text.splitlines() if not line.startswith("#"))
        return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}

    def metric(self, name: str) -> float:
        return self.metrics()[name]

    def wait_metric(self, name: str, condition: Callable[[float], bool]) -> float:
        values: list[float] = []

        def holds() -> bool:
            values.append(self.metric(name))
            return condition(values[-1])

        wait_until(holds, f"{name} is as expected")
        return values[-1]

    def wait_stalled(self) -> None:
        """Until the engine has begun, and then makes nothing, since nobody reads."""
        made = [0.0]

        def stalled() -> bool:
            made.append(self.metric("chorus_generation_tokens_total"))
            return made[-1] == made[-2] > 0

        wait_until(stalled, "the engine waits for its readers")

    def load(self) -> tuple[float, float, float]:
        """(running, waiting, held pages)"""
        metrics = self.metrics()
        names = ("chorus_sequences_running", "chorus_sequences_waiting", 'chorus_kv_pages{state="held"}')
        return tuple(metrics[name] for name in names)  # type: ignore[return-value]

    def wait_idle(self) -> None:
        """Fails unless all that ran has been let go of."""
        seen: list[tuple[float, float, float]] = []

        def idle() -> bool:
            seen[:] = [self.load()]
            return seen[0] == (0, 0, 0)

        wait_until(idle, lambda: f"nothing runs, waits or is held; (running, waiting, held) is {seen[0]}")

    def resident_bytes(self) -> int:
        fields = Path(f"/proc/{self.process.pid}/statm").read_text().split()
        return int(fields[1]) * os.sysconf("SC_PAGE_SIZE")


def wait_until(condition: Callable[[], bool], what: str | Callable[[], str], seconds: float = SETTLE_SECONDS) -> None:
    """Poll for what nothing announces. Fails when it has not come within a generous bound."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {seconds:g} s: {what if isinstance(what, str) else what()}")
        time.sleep(0.01)


class Servers:
    """Those that tests share: each is started when it is first asked for and ends with the session."""

    def __init__(self) -> None:
        self._running: dict[Spec, Server] = {}

    def get(self, wanted: Spec) -> Server:
        server = self._running.get(wanted)
        if server is not None and server.process.poll() is not None:
            del self._running[wanted]
            raise AssertionError(f"{wanted.name} has ended with {server.process.returncode}:\n{server.output()}")
        if server is None:
            server = Server.start(wanted)
            self._running[wanted] = server
            server.wait_ready()
        return server

    def close(self) -> None:
        for server in self._running.values():
            server.signal()
        for server in self._running.values():
            server.close()
