"""`python -m service` as a process: address, exit status, draining. Each on the workers it concerns."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

ROOT = Path(__file__).parents[2]
BODY = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "seed": 1, "stream": True}
workers = pytest.mark.parametrize("worker", ["asyncio", "uvloop", "trio"])
loops = pytest.mark.parametrize("worker", ["asyncio", "trio"])


class Server:
    def __init__(self, process: subprocess.Popen[str], port: int) -> None:
        self.process, self.port = process, port
        self.url = f"http://127.0.0.1:{port}"
        self.log = ""

    def end(self, seconds: float = 20) -> int:
        self.log += self.process.communicate(timeout=seconds)[1]
        return self.process.returncode


def environment(**settings: object) -> dict[str, str]:
    given = {f"CHORUS_{name.upper()}": str(value) for name, value in settings.items()}
    coverage = {name: value for name, value in os.environ.items() if name.startswith("COVERAGE_")}
    return {"CHORUS_PORT": "0", "CHORUS_SERVED_MODEL_NAME": "m", "PATH": os.environ["PATH"]} | coverage | given


@contextmanager
def server(*command: str, **settings: object) -> Iterator[Server]:
    process = subprocess.Popen(
        [sys.executable, "-m", *command], env=environment(**settings), cwd=ROOT, stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    try:
        first = process.stderr.readline()
        match = re.search(r"http://127\.0\.0\.1:(\d+)", first)
        assert match, first + process.stderr.read()
        chorus = Server(process, int(match[1]))
        with httpx.Client(base_url=chorus.url) as client:
            while client.get("/health/ready").status_code == 503:
                pass
        yield chorus
    finally:
        process.kill()
        process.communicate()


def slow(step_seconds: float, worker: str, **settings: object) -> Any:
    return server("tests.service.slow_server", str(step_seconds), worker=worker, **settings)


def events(lines: Iterator[str]) -> list[str]:
    return [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]


@workers
def test_it_serves_and_stops_with_status_0(worker: str) -> None:
    with server("service", engine="fake", worker=worker) as chorus, httpx.Client(base_url=chorus.url) as client:
        answer = client.post("/v1/chat/completions", json=BODY | {"stream": False, "n": 3, "max_tokens": 2})
        assert [choice["index"] for choice in answer.json()["choices"]] == [0, 1, 2]
        chorus.process.send_signal(signal.SIGTERM)  # with an idle connection open, which may not hold the exit
        assert chorus.end() == 0
    lines = [json.loads(line) for line in chorus.log.splitlines()]
    assert [line["event"] for line in lines if line["logger"] != "chorus.request"] == ["start", "ready", "stop"]
    start = lines[0]
    assert start["backend"] == "fake" and start["served_model_name"] == "m" and start["worker"] == worker


@loops
def test_a_running_stream_is_finished_after_sigterm_and_new_connections_are_refused(worker: str) -> None:
    with slow(0.02, worker) as chorus, httpx.Client(base_url=chorus.url) as client:
        with client.stream("POST", "/v1/chat/completions", json=BODY | {"max_tokens": 40}) as stream:
            lines = stream.iter_lines()
            assert next(lines).startswith("data: ")
            chorus.process.send_signal(signal.SIGTERM)
            rest = events(lines)
        assert rest[-1] == "[DONE]"
        assert "".join(json.loads(event)["choices"][0]["delta"].get("content", "") for event in rest[:-1])
        assert chorus.end() == 0
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{chorus.url}/health")


@loops
def test_at_the_drain_limit_a_stream_is_ended_explicitly(worker: str) -> None:
    with slow(0.05, worker, drain_seconds=0.2) as chorus, httpx.Client(base_url=chorus.url, timeout=20) as client:
        with client.stream("POST", "/v1/chat/completions", json=BODY | {"max_tokens": 2000}) as stream:
            lines = stream.iter_lines()
            assert next(lines).startswith("data: ")
            chorus.process.send_signal(signal.SIGTERM)
            last = events(lines)[-1]
        assert last == "[DONE]" or "error" in json.loads(last)
        assert chorus.end() == 0


@loops
def test_a_second_signal_ends_it_now(worker: str) -> None:
    with (
        slow(0.05, worker, drain_seconds=300) as chorus,
        httpx.stream("POST", f"{chorus.url}/v1/chat/completions", json=BODY | {"max_tokens": 2000}) as stream,
    ):
        lines = stream.iter_lines()  # kept: dropping it would close the connection
        assert next(lines).startswith("data: ")
        chorus.process.send_signal(signal.SIGTERM)
        while is_listening(chorus.port):  # until the first signal has been taken in
            pass
        chorus.process.send_signal(signal.SIGINT)
        assert chorus.end(10) in (0, 1)


def is_listening(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@loops
def test_a_death_ends_streams_with_an_error_and_the_process_with_1(worker: str) -> None:
    with slow(0.05, worker) as chorus, httpx.Client(base_url=chorus.url, timeout=20) as client:
        with client.stream("POST", "/v1/chat/completions", json=BODY | {"max_tokens": 2000}) as stream:
            lines = stream.iter_lines()
            assert next(lines).startswith("data: ")
            chorus.process.send_signal(signal.SIGUSR1)
            last = events(lines)[-1]
        assert json.loads(last)["error"]["code"] == "engine_dead"
        assert client.get("/health/live").status_code == 503
        assert chorus.end() == 1


@loops
def test_a_stalled_reader_does_not_hold_the_exit(worker: str) -> None:
    settings = {"drain_seconds": 0.1, "release_timeout": 1, "max_model_len": 100_000, "stream_credit": 1000}
    with slow(0.0, worker, **settings) as chorus, socket.socket() as reader:
        reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        reader.connect(("127.0.0.1", chorus.port))
        body = json.dumps(BODY | {"n": 8, "max_tokens": 90_000}).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        reader.sendall(head.encode() + body)
        assert reader.recv(1)
        chorus.process.send_signal(signal.SIGTERM)
        chorus.end(15)


def test_a_body_too_large_closes_the_connection_after_the_413() -> None:
    with server("service", engine="fake", max_body_bytes=1000) as chorus:
        for head in ("Content-Length: 100000\r\n", "Transfer-Encoding: chunked\r\n"):
            with socket.create_connection(("127.0.0.1", chorus.port), timeout=20) as client:
                client.sendall(f"POST /v1/completions HTTP/1.1\r\nHost: x\r\n{head}\r\n".encode())
                client.sendall(b"FFF\r\n" + b"x" * 0xFFF)
                answer = b"".join(iter(lambda: client.recv(65536), b""))
            assert answer.startswith(b"HTTP/1.1 413") and b"invalid_request_error" in answer


def test_a_taken_port_is_one_line_and_status_1() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = subprocess.run(
            [sys.executable, "-m", "service"],
            env=environment(engine="fake", port=port),
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=60,
        )
    assert done.returncode == 1
    assert done.stderr == f"chorus: cannot listen on 127.0.0.1:{port}: Address already in use\n"


@pytest.mark.parametrize(("flag", "expected"), [("--version", "chorus 0.1.0"), ("--help", "CHORUS_MAX_NUM_SEQS")])
def test_flags(flag: str, expected: str) -> None:
    command = [sys.executable, "-m", "service", flag]
    done = subprocess.run(command, env=environment(), cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and expected in done.stdout


@loops
def test_plain_hypercorn_serves_the_same_app(worker: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "hypercorn", "-k", worker, "-b", f"127.0.0.1:{port}", "service.app:app"]
    process = subprocess.Popen(command, env=environment(engine="fake"), cwd=ROOT, stderr=subprocess.PIPE, text=True)
    try:
        while not is_listening(port):
            assert process.poll() is None
        url = f"http://127.0.0.1:{port}"
        while httpx.get(f"{url}/health/ready").status_code == 503:
            pass
        answer = httpx.post(f"{url}/v1/chat/completions", json=BODY | {"stream": False, "n": 2, "max_tokens": 2})
        assert len(answer.json()["choices"]) == 2
    finally:
        process.terminate()
        log = process.communicate(timeout=30)[1]
    lines = [json.loads(line) for line in log.splitlines()]
    assert sum("Running on" in line["event"] for line in lines) == 1, "hypercorn's own lines are as ours, and come once"


@pytest.mark.parametrize(("options", "status"), [(["-w", "0"], 1), ([], 0)])
def test_a_death_under_plain_hypercorn_ends_it(options: list[str], status: int) -> None:
    """The app's process ends with 1. Hypercorn's parent makes 0 of it, which no app can change, but starts no other."""
    command = [sys.executable, "-m", "hypercorn", *options, "-b", "127.0.0.1:0", "tests.service.dying_app:app"]
    done = subprocess.run(command, env=environment(), cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == status
    assert done.stderr.count("no such model") == 1


def test_a_bad_setting_under_plain_hypercorn_is_one_line() -> None:
    command = [sys.executable, "-m", "hypercorn", "-w", "0", "-b", "127.0.0.1:0", "service.app:app"]
    done = subprocess.run(command, env=environment(max_n="x"), cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr == "chorus: CHORUS_MAX_N=x: expected a whole number\n"
