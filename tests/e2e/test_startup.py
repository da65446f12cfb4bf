"""What a start promises: one clear line and a status when it fails, an open port and a reason while it loads."""

from __future__ import annotations

import signal
import socket
from pathlib import Path

import pytest

from tests.e2e.answers import check_error
from tests.e2e.fixtures import MODEL, WORKERS, fake_spec
from tests.e2e.server import Server, spec, wait_until

BODY = {"model": MODEL, "prompt": "x", "max_tokens": 2}


def _failed_start(server: Server) -> tuple[int, list[str]]:
    with server:
        return server.wait(), server.lines()


@pytest.mark.parametrize("worker", [*WORKERS, "uvloop"])
def test_every_worker_serves_and_ends_with_0_at_sigterm(worker: str) -> None:
    with Server.start(fake_spec("service", worker)).wait_ready() as server:
        assert server.post("/v1/completions", BODY).status_code == 200
        port = server.port
        server.signal()
        assert server.wait() == 0
        assert "Traceback" not in server.output()
        with socket.create_server(("127.0.0.1", port)):
            pass


def test_port_that_is_taken_gives_one_line_and_fails(one_fake: Server) -> None:
    status, lines = _failed_start(Server.start(fake_spec(), port=one_fake.port))
    assert status not in (0, -signal.SIGTERM)
    assert len(lines) == 1
    assert f"127.0.0.1:{one_fake.port}" in lines[0]


@pytest.mark.parametrize(("worker", "model"), [("asyncio", "no/such-model"), ("trio", "nowhere"), ("trio", "")])
def test_model_that_does_not_exist_gives_one_line_and_fails(worker: str, model: str, tmp_path: Path) -> None:
    """A hub id, a folder that is not there, and one that is empty."""
    model = model if "/" in model else str(tmp_path / model)
    with Server.start(spec("service", worker, {"CHORUS_MODEL": model, "HF_HUB_OFFLINE": "1"})) as server:
        status = server.wait()
        told = [line for line in server.output().splitlines() if '"level":"critical"' in line]
    assert status == 1
    assert len(told) == 1
    assert Path(model).name in told[0]
    assert "Traceback" not in told[0]


def test_model_that_does_not_exist_is_no_success_under_plain_hypercorn(tmp_path: Path) -> None:
    """It would start its child again for ever, or end with 0, if the child did not tell what happened."""
    with Server.start(spec("hypercorn", "asyncio", {"CHORUS_MODEL": tmp_path / "nowhere"})) as server:
        wait_until(lambda: "nowhere" in server.output() and '"critical"' in server.output(), "the reason is told")
        server.wait()
        assert server.output().count('"critical"') == 1


@pytest.mark.parametrize("launcher", ["service", "hypercorn"])
@pytest.mark.parametrize(
    ("name", "value"),
    [("CHORUS_MAX_NUM_SEQS", "many"), ("CHORUS_ENGINE", "llama"), ("CHORUS_DTYPE", "int3"), ("CHORUS_MAX_N", "0")],
)
def test_bad_setting_gives_one_line_with_its_name(launcher: str, name: str, value: str) -> None:
    where = "service" if launcher == "service" else "hypercorn"
    status, lines = _failed_start(Server.start(fake_spec(where, "asyncio", **{name: value})))
    if launcher == "service":
        assert status == 2  # hypercorn's command ends with 0 whatever its child does
        assert len(lines) == 1
    assert sum(name in line for line in lines) == 1
    assert not any("Traceback" in line for line in lines)


@pytest.mark.parametrize("engine", ["fake", "torch"])
@pytest.mark.parametrize(("launcher", "worker"), [("faulty-service", "asyncio"), ("faulty-hypercorn", "trio")])
def test_port_answers_while_the_model_loads(
    launcher: str, worker: str, engine: str, tmp_path: Path, tiny_folder: Path
) -> None:
    """Not ready, with a reason, and so are requests; alive; then ready without anything else."""
    gate = tmp_path / "gate"
    settings = {"FAULTY_LOAD_GATE": gate, "CHORUS_ENGINE": engine, "CHORUS_SERVED_MODEL_NAME": MODEL}
    settings["CHORUS_MODEL"] = tiny_folder
    where = "faulty-service" if launcher == "faulty-service" else "faulty-hypercorn"
    with Server.start(spec(where, worker, settings)).wait_listening() as server:
        for path in ("/health", "/health/ready"):
            answer = server.get(path)
            assert "load" in check_error(answer, 503, code="engine_not_ready")["message"]
            assert int(answer.headers["retry-after"]) >= 1
        assert server.get("/health/live").status_code == 200
        assert server.get("/v1/models").status_code == 200
        for stream in (False, True):
            answer = server.post("/v1/completions", BODY | {"stream": stream})
            check_error(answer, 503, code="engine_not_ready")
            assert int(answer.headers["retry-after"]) >= 1
        check_error(server.post("/v1/completions", BODY | {"n": 0}), 400, "n")
        gate.touch()
        server.wait_ready()
        assert server.post("/v1/completions", BODY).status_code == 200


@pytest.mark.parametrize("engine", ["fake", "torch"])
@pytest.mark.parametrize("worker", WORKERS)
def test_sigterm_while_the_model_loads_ends_with_0(engine: str, worker: str, tmp_path: Path, tiny_folder: Path) -> None:
    """A loading that nothing can interrupt must not hold up the end."""
    settings = {"FAULTY_LOAD_GATE": tmp_path / "never", "CHORUS_ENGINE": engine, "CHORUS_MODEL": tiny_folder}
    with Server.start(spec("faulty-service", worker, settings)).wait_listening() as server:
        assert server.get("/health/ready").status_code == 503
        server.signal()
        assert server.wait() == 0
        assert "forced" not in server.output()
