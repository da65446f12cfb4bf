"""`CHORUS_ENGINE=vllm python -m service`, from outside. Runs where vllm is importable: see .ci/vllm.

What takes two processes of the model runs where CHORUS_TEST_AT_SIZE is set: tensor parallel 2, and two nodes.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.answers import ask, ask_streamed, check_envelope, check_error, fold
from tests.e2e.server import Server, Servers, Spec, spec, wait_until
from tests.e2e.wire import Wire

if find_spec("vllm") is None:
    pytest.skip("vllm is not installed here: see .ci/vllm", allow_module_level=True)

MODEL = "SmolLM2-135M-Instruct"
PATH = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "Name three colours."}]
BODY: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "n": 3, "seed": 5, "max_tokens": 24}
TINY: dict[str, Any] = {"model": MODEL, "prompt": [30, 40, 50], "n": 3, "seed": 5, "max_tokens": 24}
ENDLESS = {"max_tokens": 1500, "ignore_eos": True, "stream": True}
RUNNING = "chorus_sequences_running"

SETTINGS: dict[str, object] = {
    "CHORUS_ENGINE": "vllm",
    "CHORUS_DTYPE": "float32",
    "CHORUS_MAX_MODEL_LEN": 2048,
    "CHORUS_MAX_NUM_SEQS": 4,
    "CHORUS_MAX_QUEUED_SEQS": 4,
    "CHORUS_ENFORCE_EAGER": "true",
    "CHORUS_GPU_MEMORY_UTILIZATION": "0.2",
}
SPLIT: dict[str, object] = {"CHORUS_TENSOR_PARALLEL_SIZE": 2, "VLLM_CPU_OMP_THREADS_BIND": "0|1"}
at_size = pytest.mark.skipif(not os.environ.get("CHORUS_TEST_AT_SIZE"), reason="CHORUS_TEST_AT_SIZE is not set")


def vllm_spec(worker: str = "asyncio", **more: object) -> Spec:
    return spec("service", worker, {**SETTINGS, **more})


@pytest.fixture
def server(servers: Servers) -> Iterator[Server]:
    running = servers.get(vllm_spec())
    yield running
    running.wait_idle()


@pytest.mark.timeout(300)
def test_stream_of_a_chat_says_what_its_body_says(server: Server) -> None:
    whole, streamed = ask(server, BODY), ask_streamed(server, BODY)
    assert streamed.choices == whole.choices
    assert len(set(whole.texts)) == 3
    assert ask(server, BODY | {"n": 1, "seed": 6}).choices == [whole.choices[1]]


def test_answer_is_held_to_a_schema(server: Server) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"]}
    named = {"name": "s", "schema": schema | {"additionalProperties": False}}
    answer = ask(server, BODY | {"response_format": {"type": "json_schema", "json_schema": named}})
    assert {json.loads(text)["a"] for text in answer.texts} <= {"x", "y"}


def test_abandoned_stream_leaves_nothing_running(server: Server) -> None:
    with Wire(server) as wire:
        wire.post(PATH, BODY | ENDLESS)
        assert wire.read_head().status == 200
        server.wait_metric(RUNNING, lambda value: value == 3)
    server.wait_idle()


def test_what_does_not_fit_the_queue_is_refused_whole(server: Server) -> None:
    with Wire(server) as wire:
        wire.post(PATH, BODY | ENDLESS | {"n": 6})
        assert wire.read_head().status == 200
        response = server.post(PATH, BODY)
        check_error(response, 429, code="rate_limit_exceeded")
        assert int(response.headers["retry-after"]) >= 1


def test_what_vllm_cannot_do_is_refused_by_its_field(server: Server) -> None:
    check_error(server.post(PATH, BODY | {"min_tokens": 3, "structured_outputs": {"regex": "a+"}}), 400, "min_tokens")
    check_error(server.post(PATH, BODY | {"kv_transfer_params": {"do_remote_decode": True}}), 400, "kv_transfer_params")


@pytest.mark.timeout(300)
def test_what_runs_at_a_signal_may_finish() -> None:
    with Server.start(vllm_spec("trio", CHORUS_DRAIN_SECONDS=200)).wait_ready() as own, Wire(own) as streamed:
        streamed.post(PATH, BODY | {"max_tokens": 60, "ignore_eos": True, "stream": True})
        assert streamed.read_head().status == 200
        first = streamed.next_event()
        own.wait_metric(RUNNING, lambda value: value == 3)
        own.signal(signal.SIGTERM)
        folded = fold([first, *streamed.events()], 3)
        assert [choice.end_reason for choice in folded.choices] == ["length"] * 3
        assert own.wait() == 0


def children_of(pid: int, title: str) -> list[int]:
    """Processes below it with that title."""
    parents = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            parents[int(folder.name)] = (int(fields[1]), (folder / "cmdline").read_text())
        except (FileNotFoundError, ProcessLookupError):
            continue
    below, found = {pid}, []
    while more := {child for child, (parent, _) in parents.items() if parent in below} - below:
        below |= more
        found += [child for child in more if title in parents[child][1]]
    return found


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("title", "settings"),
    [
        ("EngineCore", {"VLLM_ENABLE_V1_MULTIPROCESSING": 1}),
        pytest.param("Worker_TP", SPLIT, marks=at_size),
    ],
    ids=["engine core", "worker"],
)
def test_process_of_vllms_that_is_killed_is_told_to_every_client(
    tiny_model: dict[str, object], title: str, settings: dict[str, object]
) -> None:
    """Its step would wait for ever."""
    own = Server.start(vllm_spec(**tiny_model, **settings)).wait_ready()
    with own, Wire(own) as streamed, Wire(own) as idle:
        streamed.post("/v1/completions", TINY | ENDLESS)
        assert streamed.read_head().status == 200
        own.wait_metric(RUNNING, lambda value: value == 3)
        os.kill(children_of(own.process.pid, title)[0], signal.SIGKILL)
        events = streamed.events()
        check_envelope(json.loads(events[-1]), code="engine_dead")
        idle.get("/health/live")
        assert idle.read().status == 503
        assert own.wait() == 1
        wait_until(lambda: not children_of(own.process.pid, "VLLM"), "none of its processes is left")


@pytest.fixture
def tiny_model() -> dict[str, object]:
    """The default one has nine heads, which are not to be halved."""
    from tests.contract.vllm_engine import tiny_folder

    return {"CHORUS_MODEL": tiny_folder(), "CHORUS_SERVED_MODEL_NAME": MODEL}


@at_size
@pytest.mark.timeout(400)
def test_tensor_parallel_2_draws_the_same(servers: Servers, tiny_model: dict[str, object]) -> None:
    alone = ask(servers.get(vllm_spec(**tiny_model)), TINY)
    with Server.start(vllm_spec(**tiny_model, **SPLIT)).wait_ready() as own:
        assert ask(own, TINY).choices == alone.choices
        assert len(children_of(own.process.pid, "Worker_TP")) == 2
        ask_streamed(own, TINY)
        own.wait_idle()


@at_size
@pytest.mark.timeout(400)
def test_data_parallel_2_draws_the_same_on_either_copy(servers: Servers, tiny_model: dict[str, object]) -> None:
    alone = ask(servers.get(vllm_spec(**tiny_model)), TINY)
    copies = {"CHORUS_DATA_PARALLEL_SIZE": 2, "VLLM_CPU_OMP_THREADS_BIND": "0|1"}
    with Server.start(vllm_spec(**tiny_model, **copies)).wait_ready() as own:
        assert len(children_of(own.process.pid, "EngineCore_DP")) == 2
        with Wire(own) as streamed:
            streamed.post("/v1/completions", TINY | ENDLESS)
            assert streamed.read_head().status == 200
            streamed.next_event()
            assert ask(own, TINY).choices == alone.choices, "of the copy that has less to do"
        own.wait_idle()
        assert ask(own, TINY).choices == alone.choices


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


@at_size
@pytest.mark.timeout(400)
def test_two_nodes_draw_the_same(servers: Servers, tiny_model: dict[str, object]) -> None:
    """Tensor parallel over loopback: the second node is vLLM's own, without a server."""
    alone = ask(servers.get(vllm_spec(**tiny_model)), TINY)
    port = free_port()
    nodes = {"CHORUS_TENSOR_PARALLEL_SIZE": 2, "CHORUS_NNODES": 2, "CHORUS_MASTER_ADDR": "127.0.0.1"}
    environment = {"VLLM_HOST_IP": "127.0.0.1", "VLLM_NO_USAGE_STATS": "1"}
    first = vllm_spec(**tiny_model, **nodes, **environment, CHORUS_MASTER_PORT=port, VLLM_CPU_OMP_THREADS_BIND="0")
    headless = (
        f"{sys.executable} -m vllm.entrypoints.cli.main serve {tiny_model['CHORUS_MODEL']} --headless --nnodes 2 "
        f"--node-rank 1 --master-addr 127.0.0.1 --master-port {port} --tensor-parallel-size 2 --dtype float32 "
        "--enforce-eager --max-model-len 2048 --max-num-seqs 4 --max-num-batched-tokens 2048 "
        "--no-enable-chunked-prefill --gpu-memory-utilization 0.2 --kv-cache-memory-bytes 268435456"
    )
    with Server.start(first) as own:
        bare = os.environ | environment | {"VLLM_CPU_OMP_THREADS_BIND": "1"}
        second = subprocess.Popen(headless.split(), env=bare, process_group=0)
        try:
            own.wait_ready()
            assert ask(own, TINY).choices == alone.choices
            own.wait_idle()
        finally:
            os.killpg(second.pid, signal.SIGKILL)
            second.wait()
