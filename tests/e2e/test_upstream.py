"""One Chorus in front of three others, in processes of their own."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Thread
from typing import Any

import httpx
import pytest

from tests.e2e.fixtures import ENDLESS, MODEL, WORKERS, fake_spec
from tests.e2e.server import SETTLE_SECONDS, Server, spec, wait_until

UPSTREAM = "CHORUS_UPSTREAM_URLS"


@contextmanager
def started(*servers: Server) -> Iterator[None]:
    try:
        for server in servers:
            server.wait_ready()
        yield
    finally:
        for server in servers:
            server.close()


def front_of(backs: list[Server], worker: str, **more: object) -> Server:
    """A server that passes requests on to `backs`, which listen already."""
    urls = ",".join(f"{server.url}/v1" for server in backs)
    settings = {"CHORUS_ENGINE": "upstream", UPSTREAM: urls, "CHORUS_UPSTREAM_POLL_SECONDS": "0.1", **more}
    return Server.start(spec("service", worker, settings))


class Reader(Thread):
    """Streams one answer. ended_at: when its last byte came. last: its last event."""

    def __init__(self, front: Server, prompt: str) -> None:
        super().__init__(daemon=True)
        self._front, self._prompt = front, prompt
        self.num_events = 0
        self.last: Any = None
        self.ended_at: float | None = None
        self.stop = False

    def run(self) -> None:
        body = {"model": MODEL, "prompt": self._prompt, "max_tokens": ENDLESS, "stream": True}
        with (
            httpx.Client(base_url=self._front.url, timeout=SETTLE_SECONDS) as client,
            client.stream("POST", "/v1/completions", json=body) as response,
        ):
            for line in response.iter_lines():
                if line.startswith("data: "):
                    self.num_events += 1
                    self.last = json.loads(line.removeprefix("data: "))
                if self.stop:
                    return
        self.ended_at = time.monotonic()


@pytest.mark.parametrize("worker", WORKERS)
def test_a_killed_upstream_takes_its_own_requests_along_and_no_others(worker: str) -> None:
    paced = fake_spec("faulty-service", FAULTY_STEP_SECONDS="0.005", CHORUS_MAX_NUM_SEQS=16)
    backs = [Server.start(paced) for _ in range(3)]
    with started(*backs):
        front = front_of(backs, worker)
        with started(front):
            readers = [Reader(front, f"prompt {number}") for number in range(9)]
            for reader in readers:
                reader.start()
            wait_until(lambda: all(reader.num_events > 3 for reader in readers), "all are streaming")
            loads = [int(back.load()[0]) for back in backs]
            assert sum(loads) == 9
            victim = max(range(3), key=loads.__getitem__)
            killed_at = time.monotonic()
            backs[victim].signal(signal.SIGKILL)
            wait_until(lambda: sum(reader.ended_at is not None for reader in readers) >= loads[victim], "they fail")
            ended = [reader for reader in readers if reader.ended_at is not None]
            assert len(ended) == loads[victim]
            assert max(reader.ended_at or 0 for reader in ended) - killed_at < 1.0
            for reader in ended:
                assert reader.last["error"]["code"] == "choice_failed", reader.last
            # new ones go elsewhere, whatever way their prompts went before
            for number in range(9):
                answer = front.post("/v1/completions", {"model": MODEL, "prompt": f"prompt {number}", "max_tokens": 3})
                assert answer.status_code == 200, answer.text
            survivors = [reader for reader in readers if reader not in ended]
            before = [reader.num_events for reader in survivors]
            wait_until(lambda: all(r.num_events > n for r, n in zip(survivors, before, strict=True)), "the rest go on")
            for reader in survivors:
                reader.stop = True
            for reader in readers:
                reader.join(SETTLE_SECONDS)
            for index, back in enumerate(backs):
                if index != victim:
                    back.wait_idle()
            assert front.get("/health/ready").status_code == 200


def test_it_is_ready_while_an_upstream_is_and_says_why_it_is_not() -> None:
    back = Server.start(fake_spec())
    with started(back):
        front = front_of([back], "asyncio")
        with started(front):
            assert front.model == MODEL
            back.signal(signal.SIGKILL)
            wait_until(lambda: front.get("/health/ready").status_code == 503, "it is not ready")
            reason = front.get("/health/ready").json()["error"]["message"]
            assert f"127.0.0.1:{back.port}" in reason
            assert front.get("/health/live").status_code == 200
            answer = front.post("/v1/completions", {"model": MODEL, "prompt": "hi"})
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_not_ready")
            assert answer.headers["retry-after"]
            again = Server.start(fake_spec(CHORUS_PORT=back.port))
            with started(again):
                wait_until(lambda: front.get("/health/ready").status_code == 200, "it is ready again")
