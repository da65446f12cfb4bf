"""Responses over real sockets: streams and bodies, cancelling, leaving, and a store that outlives its server."""

from __future__ import annotations

import json
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.e2e.answers import check_error
from tests.e2e.fixtures import ENDLESS, MODEL, fake_spec
from tests.e2e.server import Server, Servers
from tests.e2e.wire import Wire
from tests.service.response_folding import folded, parsed

PATH = "/v1/responses"
BODY: dict[str, Any] = {"model": MODEL, "input": "hi", "seed": 5, "max_output_tokens": 9}
ENDLESSLY = BODY | {"max_output_tokens": ENDLESS}

both_modes = pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])

REQUESTS: dict[str, dict[str, Any]] = {
    "text": {},
    "unicode": {"input": "日本語と\U0001f9ea emoji", "max_output_tokens": 48},
    "top_k": {"temperature": 1.7, "top_k": 5},
    "items": {"input": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
    "logprobs": {"include": ["message.output_text.logprobs"], "top_logprobs": 3},
    "stop": {"stop": ["e", "a"], "max_output_tokens": 60},
    "format": {"text": {"format": {"type": "json_object"}}, "max_output_tokens": 40},
    "call": {
        "tools": [{"type": "function", "name": "f", "parameters": {"type": "object"}}],
        "tool_choice": "required",
        "max_output_tokens": 60,
    },
}


@pytest.fixture(scope="module")
def keeping(servers: Servers, tmp_path_factory: pytest.TempPathFactory) -> Server:
    store = tmp_path_factory.mktemp("store") / "responses.sqlite"
    return servers.get(fake_spec("service", "trio", CHORUS_RESPONSES_STORE=store))


@pytest.mark.parametrize("name", REQUESTS)
def test_a_stream_says_what_the_body_says(one_tiny: Server, name: str) -> None:
    body = BODY | REQUESTS[name]
    whole = one_tiny.post(PATH, body)
    assert whole.status_code == 200, whole.text
    streamed = folded(parsed(one_tiny.post(PATH, body | {"stream": True}).text))
    assert _without_ids(streamed) == _without_ids(whole.json())


def _without_ids(response: dict[str, Any]) -> Any:
    items = [{key: value for key, value in item.items() if key not in ("id", "call_id")} for item in response["output"]]
    return items, response["status"], response["end_reason"], response["usage"]["output_tokens"]


@both_modes
def test_a_response_that_runs_can_be_cancelled(fake: Server, stream: bool) -> None:
    with Wire(fake) as wire:
        wire.post(PATH, ENDLESSLY | {"stream": stream})
        fake.wait_metric("chorus_sequences_running", lambda value: value == 1)
        (card,) = fake.get("/v1/requests").json()["data"]
        assert card["kind"] == "response"
        cancelled = fake.http.post(f"{PATH}/{card['id']}/cancel")
        assert (cancelled.status_code, cancelled.json()["id"]) == (200, card["id"])
        assert wire.read_head().headers["x-chorus-response-id"] == card["id"]
        body = b"".join(wire.pieces()).decode()
        answer = folded(parsed(body)) if stream else json.loads(body)
        assert (answer["status"], answer["end_reason"]) == ("cancelled", "cancelled")
    check_error(fake.http.post(f"{PATH}/{card['id']}/cancel"), 404)
    fake.wait_idle()


@both_modes
def test_a_client_that_leaves_stops_the_work_and_leaves_nothing(keeping: Server, stream: bool) -> None:
    with Wire(keeping) as wire:
        wire.post(PATH, ENDLESSLY | {"stream": stream})
        keeping.wait_metric("chorus_sequences_running", lambda value: value == 1)
        (card,) = keeping.get("/v1/requests").json()["data"]
        running = keeping.get(f"{PATH}/{card['id']}").json()
        assert (running["id"], running["status"], running["output"]) == (card["id"], "in_progress", [])
    keeping.wait_idle()
    check_error(keeping.get(f"{PATH}/{card['id']}"), 404)


@both_modes
def test_what_was_cancelled_is_kept_as_its_client_got_it(keeping: Server, stream: bool) -> None:
    with Wire(keeping) as wire:
        wire.post(PATH, ENDLESSLY | {"stream": stream})
        keeping.wait_metric("chorus_sequences_running", lambda value: value == 1)
        (card,) = keeping.get("/v1/requests").json()["data"]
        assert keeping.http.delete(f"/v1/requests/{card['id']}").status_code == 200
        wire.read_head()
        body = b"".join(wire.pieces()).decode()
    answer = folded(parsed(body)) if stream else json.loads(body)
    assert keeping.get(f"{PATH}/{card['id']}").json() == answer
    keeping.wait_idle()


@pytest.mark.parametrize("worker", ["asyncio", "trio"])
def test_a_conversation_goes_on_after_the_server_was_killed(worker: str, tmp_path: Path) -> None:
    """What a client was told is complete is on the disk by then."""
    wanted = fake_spec("service", worker, CHORUS_RESPONSES_STORE=tmp_path / "responses.sqlite")
    with Server.start(wanted) as server:
        server.wait_ready()
        # the last event is one write, the end of the body another, which the server may not live to make
        with (
            suppress(httpx.TransportError),
            httpx.stream("POST", f"{server.url}{PATH}", json=BODY | {"stream": True}) as response,
        ):
            for line in response.iter_lines():
                if line == "event: response.incomplete":
                    server.process.send_signal(signal.SIGKILL)
                elif line.startswith("data: "):
                    last = json.loads(line.removeprefix("data: "))
        server.process.wait()
    assert last["type"] == "response.incomplete"
    with Server.start(wanted) as server:
        server.wait_ready()
        assert server.get(f"{PATH}/{last['response']['id']}").json() == last["response"]
        more = server.post(PATH, BODY | {"previous_response_id": last["response"]["id"], "input": "more"})
        assert more.status_code == 200, more.text


def test_the_official_client_streams_from_every_launcher(fake: Server) -> None:
    with openai.OpenAI(base_url=f"{fake.url}/v1", api_key="none", max_retries=0) as client:
        asked: dict[str, Any] = {"model": MODEL, "input": "hi", "max_output_tokens": 9, "extra_body": {"seed": 5}}
        events = list(client.responses.create(**asked, stream=True))
        assert events[-1].type == "response.incomplete"
        whole = client.responses.create(**asked)
        assert events[-1].response.output_text == whole.output_text
        with pytest.raises(openai.BadRequestError) as refused:
            client.responses.create(**asked, background=True)
        assert (refused.value.param, refused.value.code) == ("background", "unsupported_parameter")
    fake.wait_idle()
