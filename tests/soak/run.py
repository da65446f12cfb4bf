"""One soak: the server, its traffic, samples of what it holds, and the verdict."""

from __future__ import annotations

import os
import random
import re
import signal
import statistics
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import anyio
import httpx

from tests.e2e.server import Server, Spec, spec, wait_until
from tests.soak.traffic import MODEL, Traffic

KEEP_ALIVE_SECONDS = 10
"""For so long hypercorn keeps a connection that its client has closed while idle."""

SETTINGS = {
    "CHORUS_ENGINE": "fake",  # whatever it is: echo_app puts its own in place
    "CHORUS_SERVED_MODEL_NAME": MODEL,
    "CHORUS_MAX_NUM_SEQS": 8,
    "CHORUS_MAX_QUEUED_SEQS": 160,
    "CHORUS_MAX_NUM_BATCHED_TOKENS": 64,
    "CHORUS_KEEP_ALIVE_SECONDS": KEEP_ALIVE_SECONDS,
}
GROWTH_BYTES = 24 * 2**20
"""What memory may grow by between the first and the last quarter: allocators settle, a leak goes on."""


@dataclass(frozen=True)
class EchoSpec(Spec):
    def command(self, port: int) -> list[str]:
        return [sys.executable, "-m", "tests.soak.echo_app"]


@dataclass(frozen=True)
class Sample:
    seconds: float
    resident_bytes: int
    num_files: int
    num_running: float
    pages_held: float


@dataclass
class Report:
    """The idle_* pairs: before the traffic and after it, both without any request."""

    samples: list[Sample] = field(default_factory=list)
    outcomes: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    idle_files: tuple[int, int] = (0, 0)
    idle_coroutines: tuple[int, int] = (0, 0)
    log_errors: list[str] = field(default_factory=list)

    def failures(self) -> list[str]:
        found = [f"wrong: {line}" for line in self.wrong[:20]] + [f"logged: {line}" for line in self.log_errors[:5]]
        first, last = self._quarters([float(sample.resident_bytes) for sample in self.samples])
        if last > first + GROWTH_BYTES:
            found.append(f"memory grew from {first / 2**20:.1f} to {last / 2**20:.1f} MiB")
        for what, (before, after) in (("files", self.idle_files), ("coroutines", self.idle_coroutines)):
            if after > before + SLACK:
                found.append(f"{what} grew from {before} to {after}")
        return found

    def text(self) -> str:
        first, last = self._quarters([float(sample.resident_bytes) for sample in self.samples])
        outcomes = ", ".join(f"{name} {count}" for name, count in sorted(self.outcomes.items()))
        lines = [
            f"requests: {sum(self.outcomes.values())} ({outcomes})",
            f"memory, median of the first and the last quarter: {first / 2**20:.1f} and {last / 2**20:.1f} MiB",
            f"idle before and after: files {self.idle_files}, coroutines {self.idle_coroutines}",
            *(self.failures() or ["nothing grew, and every answer was right"]),
        ]
        return "\n".join(lines)

    @staticmethod
    def _quarters(values: Sequence[float]) -> tuple[float, float]:
        """Medians; the first tenth, in which everything is used for the first time, is left out."""
        values = values[len(values) // 10 :] or [0.0]
        size = max(1, len(values) // 4)
        return statistics.median(values[:size]), statistics.median(values[-size:])


SLACK = 3
"""Files or coroutines that may be there for other reasons than traffic."""


def soak(*, seconds: float, worker: str, num_clients: int, seed: int) -> Report:
    report = Report()
    with Server.start(EchoSpec(worker=worker, settings=spec("service", worker, SETTINGS).settings)) as server:
        server.wait_ready()
        _warm_up(server)
        files, coroutines = _num_files(server), _num_coroutines(server)
        anyio.run(_run, server, report, seconds, num_clients, seed)
        server.wait_idle()
        wait_until(lambda: _num_files(server) <= files, "connections are closed", KEEP_ALIVE_SECONDS + 30)
        report.idle_coroutines = coroutines, _settled_coroutines(server, coroutines + SLACK)
        report.idle_files = files, _num_files(server)
        lines = server.output().splitlines()
        report.log_errors = [line for line in lines if '"level":"error"' in line or "Traceback" in line]
    return report


def _settled_coroutines(server: Server, most: int) -> int:
    """Their number once it is no more than `most`; those of a connection that has just ended take a moment to go."""
    seen: list[int] = []

    def settled() -> bool:
        seen.append(_num_coroutines(server))
        return seen[-1] <= most

    wait_until(settled, lambda: f"at most {most} coroutines are left; there were {seen[-5:]}")
    return seen[-1]


async def _run(server: Server, report: Report, seconds: float, num_clients: int, seed: int) -> None:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=num_clients)
    async with httpx.AsyncClient(base_url=server.url, timeout=120, limits=limits) as client:
        traffic = Traffic(client, random.Random(seed))
        async with anyio.create_task_group() as group:
            for _ in range(num_clients):
                group.start_soon(traffic.worker)
            started = time.monotonic()
            while (elapsed := time.monotonic() - started) < seconds:
                await anyio.sleep(min(1.0, seconds / 8))
                report.samples.append(await _sample(server, client, elapsed))
            group.cancel_scope.cancel()
        report.outcomes, report.wrong = traffic.outcomes, traffic.wrong


async def _sample(server: Server, client: httpx.AsyncClient, elapsed: float) -> Sample:
    text = (await client.get("/metrics")).text
    lines = (line.rpartition(" ") for line in text.splitlines() if not line.startswith("#"))
    values = {name: float(value) for name, _, value in lines}
    return Sample(
        elapsed,
        server.resident_bytes(),
        _num_files(server),
        values["chorus_sequences_running"],
        values['chorus_kv_pages{state="held"}'],
    )


def _warm_up(server: Server) -> None:
    for _ in range(3):
        server.post("/v1/completions", {"model": MODEL, "prompt": "<abcdefgh>", "n": 4, "max_tokens": 9})
    server.wait_idle()


def _num_files(server: Server) -> int:
    return len(os.listdir(f"/proc/{server.process.pid}/fd"))


def _num_coroutines(server: Server) -> int:
    pattern = re.compile(r"coroutines: (\d+)")
    before = len(pattern.findall(server.output()))
    server.signal(signal.SIGUSR1)
    wait_until(lambda: len(pattern.findall(server.output())) > before, "it counts its coroutines")
    return int(pattern.findall(server.output())[-1])


def plot(report: Report, path: Path) -> None:
    """Needs matplotlib (the extra `bench`)."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    seconds = [sample.seconds for sample in report.samples]
    series = {
        "resident MiB": [sample.resident_bytes / 2**20 for sample in report.samples],
        "open files": [sample.num_files for sample in report.samples],
        "choices running": [sample.num_running for sample in report.samples],
        "KV pages held": [sample.pages_held for sample in report.samples],
    }
    figure, axes = pyplot.subplots(len(series), sharex=True, figsize=(9, 8))
    for axis, (name, values) in zip(axes, series.items(), strict=True):
        axis.plot(seconds, values, linewidth=0.8)
        axis.set_ylabel(name)
        axis.set_ylim(bottom=0)
    axes[-1].set_xlabel("seconds")
    figure.suptitle(f"{sum(report.outcomes.values())} requests at saturation")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
