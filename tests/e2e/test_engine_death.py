"""An engine that dies leaves nobody waiting and no health check green; a choice that fails ends its request alone."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.answers import ask, check_envelope, check_error, letters
from tests.e2e.fixtures import ENDLESS, MODEL, SLOTS, SMALL_STEPS, TINY, TINY_ENDLESS, fake_spec
from tests.e2e.scripts import FAIL_SEED
from tests.e2e.server import Launcher, Server, Servers, Spec, spec
from tests.e2e.wire import Wire

PATH = "/v1/completions"
BODY: dict[str, Any] = {"model": MODEL, "prompt": "abc", "seed": 4, "max_tokens": 30, "ignore_eos": True}

WAYS: list[tuple[str, Launcher, str]] = [
    ("fake", "faulty-service", "asyncio"),
    ("fake", "faulty-service", "trio"),
    ("fake", "faulty-hypercorn", "asyncio"),
    ("fake", "faulty-hypercorn", "trio"),
    ("tiny", "faulty-service", "asyncio"),
    ("tiny", "faulty-hypercorn", "trio"),
]


def _spec(engine: str, launcher: Launcher, worker: str, folder: Path, kill: Path | None = None) -> Spec:
    faults = {} if kill is None else {"FAULTY_KILL": kill}
    if engine == "fake":
        return fake_spec(launcher, worker, **faults)
    return spec(launcher, worker, {**TINY, **SMALL_STEPS, "CHORUS_MODEL": folder, **faults})


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("engine", "launcher", "worker"), WAYS, ids=["-".join(way) for way in WAYS])
def test_death_ends_every_request_with_an_error_and_liveness_with_503(
    engine: str, launcher: Launcher, worker: str, tiny_folder: Path, tmp_path: Path
) -> None:
    kill = tmp_path / "kill"
    endless = BODY | {"max_tokens": ENDLESS // 2 if engine == "fake" else TINY_ENDLESS}
    with ExitStack() as stack:
        server = stack.enter_context(Server.start(_spec(engine, launcher, worker, tiny_folder, kill)).wait_ready())
        running, running_stream, queued, queued_stream = (stack.enter_context(Wire(server)) for _ in range(4))
        running.post(PATH, endless | {"n": SLOTS - 1})
        running_stream.post("/v1/chat/completions", _chat(endless))
        server.wait_metric("chorus_sequences_running", lambda value: value == SLOTS)
        queued.post(PATH, endless)
        queued_stream.post(PATH, endless | {"stream": True})
        server.wait_metric("chorus_sequences_waiting", lambda value: value == 2)
        # health is asked behind a request that is open, so that it is answered right after the death
        for path in ("/health/live", "/health/ready", "/health"):
            running.get(path)
        running.post(PATH, BODY)
        kill.touch()

        for _ in range(5):
            error = check_error(running.read(), 503, code="engine_dead")
            assert error["type"] == "server_error"
        for wire in (queued, queued_stream):  # nothing of it was sent yet
            check_error(wire.read(), 503, code="engine_dead")
        assert running_stream.read_head().status == 200
        *before, last = running_stream.events()
        check_envelope(json.loads(last), code="engine_dead")
        assert not any('"finish_reason":"' in event for event in before)
        status = server.wait()
        assert launcher == "faulty-hypercorn" or status == 1
        assert server.output().count('"level":"critical"') == 1


@pytest.fixture(params=["fake-asyncio", "fake-trio", "tiny-trio"])
def faulty(request: pytest.FixtureRequest, servers: Servers, tiny_folder: Path) -> Server:
    engine, worker = request.param.split("-")
    return servers.get(_spec(engine, "faulty-service", worker, tiny_folder))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("choice", [0, 2])
def test_choice_that_fails_ends_its_request_and_no_other(faulty: Server, choice: int) -> None:
    failing = BODY | {"seed": FAIL_SEED - choice, "n": 3, "max_tokens": 5000}
    neighbour = BODY | {"seed": 50, "n": 1}
    alone = ask(faulty, neighbour).choices
    with Wire(faulty) as beside, Wire(faulty) as whole, Wire(faulty) as streamed:
        beside.post(PATH, neighbour | {"max_tokens": 60})
        whole.post(PATH, failing)
        check_error(whole.read(), 500, code="choice_failed")
        streamed.post(PATH, failing | {"stream": True})
        assert streamed.read_head().status == 200
        *before, last = streamed.events()
        check_envelope(json.loads(last), code="choice_failed")
        assert "[DONE]" not in before
        assert not any('"finish_reason":"' in event for event in before)
        assert beside.read().status == 200
    faulty.wait_idle()
    assert ask(faulty, neighbour).choices == alone
    assert faulty.get("/health/live").status_code == 200


def test_connection_serves_again_after_a_stream_that_failed(scripted: Server) -> None:
    with Wire(scripted) as wire:
        for _ in range(2):
            wire.post(PATH, BODY | {"seed": FAIL_SEED, "stream": True})
            assert wire.read_head().status == 200
            check_envelope(json.loads(wire.events()[-1]), code="choice_failed")
            wire.post(PATH, BODY)
            assert wire.read().json()["choices"][0]["text"] == letters(4, 3, 30)


def _chat(body: dict[str, Any]) -> dict[str, Any]:
    rest = {name: value for name, value in body.items() if name != "prompt"}
    return {**rest, "messages": [{"role": "user", "content": "abc"}], "stream": True}
