"""What Open WebUI sends to an OpenAI-compatible server, as plain HTTP: the application itself would be gigabytes.

Its connection check and its list of models, a chat that is streamed and one that is stopped, the title that it asks for
beside a chat, and the embeddings of its documents.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.e2e.server import SETTLE_SECONDS, Server

from . import DEFAULT, EMBEDDER, NEAR_AND_FAR, PARIS, QUESTION

pytestmark = pytest.mark.timeout(400)

HEADERS = {
    "Authorization": "Bearer none",
    "X-OpenWebUI-User-Name": "Ann%20Example",
    "X-OpenWebUI-User-Id": "6e2c",
    "X-OpenWebUI-User-Email": "ann%40example.com",
    "X-OpenWebUI-User-Role": "user",
    "X-OpenWebUI-Chat-Id": "0c1d",
}


@pytest.fixture
def client(server: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=f"{server.url}/v1", headers=HEADERS, timeout=SETTLE_SECONDS) as client:
        yield client


def chat(**more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": QUESTION}]
    return {"stream": True, "model": DEFAULT, "messages": messages, "temperature": 0, **more}


def events(lines: Iterator[str]) -> Iterator[Any]:
    """As its middleware reads them: line by line, up to [DONE]."""
    for line in lines:
        if line.startswith("data: ") and line != "data: [DONE]":
            yield json.loads(line.removeprefix("data: "))


def test_both_models_are_in_its_list(client: httpx.Client) -> None:
    answer = client.get("/models").json()
    assert answer["object"] == "list"
    assert {(card["id"], card["object"]) for card in answer["data"]} == {(DEFAULT, "model"), (EMBEDDER, "model")}


def test_a_streamed_chat_shows_text_and_then_its_usage(client: httpx.Client) -> None:
    text, ends, usage = "", [], None
    body = chat(stream_options={"include_usage": True}, max_tokens=40)
    with client.stream("POST", "/chat/completions", json=body) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        for event in events(response.iter_lines()):
            usage = event.get("usage") or usage
            for choice in event["choices"]:
                text += choice["delta"].get("content") or ""
                ends += [choice["finish_reason"]] if choice["finish_reason"] else []
    assert (text, ends) == (PARIS, ["stop"])
    assert usage is not None and usage["prompt_tokens"] == 37


def test_its_stop_button_ends_the_request(client: httpx.Client, server: Server) -> None:
    """It closes the connection; the fixture waits until nothing is held."""
    with client.stream("POST", "/chat/completions", json=chat(max_tokens=1900, ignore_eos=True)) as response:
        first = next(events(response.iter_lines()))
        assert first["choices"]
        assert len(server.get("/v1/requests").json()["data"]) == 1
    server.wait_idle()
    assert server.get("/v1/requests").json()["data"] == []


def test_the_title_that_it_asks_for_comes_whole(client: httpx.Client) -> None:
    task = f"Generate a concise, 3-5 word title for this chat.\n\nUSER: {QUESTION}\nASSISTANT: {PARIS}"
    body = {"model": DEFAULT, "messages": [{"role": "user", "content": task}], "stream": False}
    answer = client.post("/chat/completions", json=body | {"max_completion_tokens": 20}).json()
    assert answer["choices"][0]["message"]["content"]


def test_its_documents_are_embedded_in_order(client: httpx.Client) -> None:
    answer = client.post("/embeddings", json={"input": NEAR_AND_FAR, "model": EMBEDDER}).json()
    assert [len(item["embedding"]) for item in answer["data"]] == [384] * 3


def test_an_error_is_one_that_it_can_show(client: httpx.Client) -> None:
    response = client.post("/chat/completions", json=chat(model="gone"))
    assert response.status_code == 404
    assert "gone" in response.json()["error"]["message"]
