"""curl, as examples everywhere use it: whole, streamed, n=2, and ended by Ctrl-C."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
from typing import Any

import pytest

from tests.e2e.server import SETTLE_SECONDS, Server

from . import DEFAULT, PARIS, QUESTION

CURL = shutil.which("curl")
pytestmark = [pytest.mark.skipif(CURL is None, reason="curl is not installed"), pytest.mark.timeout(400)]

ASKED: dict[str, Any] = {
    "model": DEFAULT,
    "messages": [{"role": "user", "content": QUESTION}],
    "temperature": 0,
    "max_tokens": 24,
}


def command(server: Server, body: dict[str, Any], *options: str) -> list[str]:
    assert CURL is not None
    url, json_type = f"{server.url}/v1/chat/completions", "Content-Type: application/json"
    return [CURL, "--silent", "--show-error", *options, url, "-H", json_type, "-d", json.dumps(body)]


def curl(server: Server, body: dict[str, Any], *options: str) -> str:
    done = subprocess.run(
        command(server, body, *options), capture_output=True, text=True, check=False, timeout=SETTLE_SECONDS
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_whole_answer_has_both_choices(server: Server) -> None:
    answer = json.loads(curl(server, ASKED | {"n": 2}, "--fail"))
    assert [choice["message"]["content"] for choice in answer["choices"]] == [PARIS, PARIS]


@pytest.mark.parametrize("http2", [False, True])
def test_streamed_answer_has_both_choices(server: Server, http2: bool) -> None:
    options = ["--fail", "--no-buffer", *(["--http2-prior-knowledge"] if http2 else [])]
    events = curl(server, ASKED | {"n": 2, "stream": True}, *options).strip().split("\n\n")
    assert events.pop() == "data: [DONE]"
    texts = ["", ""]
    for event in events:
        for choice in json.loads(event.removeprefix("data: "))["choices"]:
            texts[choice["index"]] += choice["delta"].get("content", "")
    assert texts == [PARIS, PARIS]


def test_refusal_ends_curl_with_its_status(server: Server) -> None:
    refused = subprocess.run(
        command(server, ASKED | {"n": 0}, "--fail-with-body"),
        capture_output=True,
        check=False,
        timeout=SETTLE_SECONDS,
    )
    assert refused.returncode == 22
    assert json.loads(refused.stdout)["error"]["param"] == "n"


@pytest.mark.parametrize("stream", [False, True])
def test_interrupted_curl_leaves_nothing_running(server: Server, stream: bool) -> None:
    """The fixture waits until nothing is held; an answer as long as this would keep it for minutes."""
    endless = ASKED | {"n": 2, "max_tokens": 1900, "ignore_eos": True, "stream": stream}
    with subprocess.Popen(command(server, endless, "--no-buffer"), stdout=subprocess.PIPE) as process:
        server.wait_metric("chorus_sequences_running", lambda value: value == 2)
        if stream:
            assert process.stdout is not None and process.stdout.readline().startswith(b"data: {")
        process.send_signal(signal.SIGTERM)  # SIGINT is ignored by what a script runs in the background
        assert process.wait(SETTLE_SECONDS) != 0
    server.wait_idle()
    assert server.get("/v1/requests").json()["data"] == []
