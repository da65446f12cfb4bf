"""The service over an engine that reads and writes text: what goes on, what comes back, what is refused by name."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import httpx
import pytest
from litestar import Litestar

from service.app import create_app
from service.lifespan import Services
from service.settings import Settings
from tests.engine.upstream.scripted import Scripted, Wire, fleet, until

pytestmark = pytest.mark.anyio

CHAT = {"model": "served", "messages": [{"role": "user", "content": "hi"}]}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}, "strict": True}}


@asynccontextmanager
async def front(answer: Any, **settings: Any) -> AsyncIterator[tuple[httpx.AsyncClient, Scripted, Litestar]]:
    """A client of the app over one server that answers so."""
    async with fleet(answer) as (engine, (server,)):
        app = create_app(Settings(engine="upstream", **settings), engine=engine)
        services: Services = app.state.services
        transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)  # type: ignore[arg-type]
        async with _hosted(services), httpx.AsyncClient(transport=transport, base_url="http://chorus") as client:
            yield client, server, app


@asynccontextmanager
async def _hosted(services: Services) -> AsyncIterator[None]:
    """The rest of the app's life: the engine runs already."""
    from service.lifespan import _load_tokenizer

    async with anyio.create_task_group() as group:
        group.start_soon(_load_tokenizer, services)
        await until(lambda: services.tokenizer is not None)
        yield


async def fine(wire: Wire) -> None:
    await wire.head()
    await wire.said("one", " two", finish="stop")
    usage = {"prompt_tokens": 5, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 4}}
    await wire.event({"choices": [], "usage": usage})
    await wire.event("[DONE]")
    await wire.end()


async def test_a_chat_goes_on_as_messages_and_its_usage_is_the_servers() -> None:
    async with front(fine) as (client, server, _):
        answer = await client.post("/v1/chat/completions", json={**CHAT, "n": 2, "seed": 3})
        body = answer.json()
        assert [choice["message"]["content"] for choice in body["choices"]] == ["one two"] * 2
        assert [choice["finish_reason"] for choice in body["choices"]] == ["stop"] * 2
        usage = body["usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (5, 6)
        assert usage["prompt_tokens_details"] == {"cached_tokens": 4}
        assert sorted(sent["seed"] for sent in server.bodies) == [3, 4]
        standard = {"model", "messages", "seed", "stream", "stream_options"}
        assert [set(sent) for sent in server.bodies] == [standard] * 2
        assert server.bodies[0]["messages"] == CHAT["messages"]


async def test_what_the_client_sent_goes_on_and_nothing_else() -> None:
    wanted = {
        "temperature": 1.0,
        "top_k": 5,
        "stop": ["x"],
        "logit_bias": {"7": 1.0},
        "max_completion_tokens": 9,
        "response_format": {"type": "json_object"},
        "reasoning_effort": "low",
        "chat_template_kwargs": {"enable_thinking": False},
        "structured_outputs": None,
        "user": "nobody",
    }
    async with front(fine) as (client, server, _):
        answer = await client.post("/v1/chat/completions", json={**CHAT, **wanted})
        assert answer.status_code == 200, answer.text
        sent = server.bodies[0]
        standard = {"model", "messages", "seed", "stream", "stream_options"}
        assert set(sent) - standard == set(wanted) - {"structured_outputs", "user"}
        assert all(sent[name] == value for name, value in wanted.items() if name in sent)


async def test_tools_go_on_and_the_servers_calls_come_back() -> None:
    async def calls(wire: Wire) -> None:
        def delta(**fields: object) -> dict[str, Any]:
            return {"choices": [{"index": 0, "delta": fields}]}

        await wire.head()
        await wire.event(delta(reasoning_content="hm"))
        first = {"index": 0, "id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"a"'}}
        await wire.event(delta(tool_calls=[first]))
        await wire.event(delta(tool_calls=[{"index": 0, "function": {"arguments": ": 1}"}}]))
        await wire.said(finish="tool_calls")
        await wire.end()

    past = [
        *CHAT["messages"],
        {
            "role": "assistant",
            "tool_calls": [{"id": "p", "type": "function", "function": {"name": "weather", "arguments": '{"b": 2}'}}],
        },
        {"role": "tool", "tool_call_id": "p", "content": "rain"},
    ]
    asked = {**CHAT, "messages": past, "tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False}
    async with front(calls) as (client, server, _):
        for stream in (False, True):
            answer = await client.post("/v1/chat/completions", json={**asked, "stream": stream})
            if stream:
                chunks = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
                deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
                assert "".join(one.get("reasoning_content", "") for one in deltas) == "hm"
                functions = [call["function"] for one in deltas for call in one.get("tool_calls", [])]
                assert functions[0]["name"] == "weather"
                assert "".join(function["arguments"] for function in functions) == '{"a": 1}'
                assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"
            else:
                (choice,) = answer.json()["choices"]
                (call,) = choice["message"]["tool_calls"]
                assert (call["id"], call["function"]) == ("c1", {"name": "weather", "arguments": '{"a": 1}'})
                assert (choice["message"]["reasoning_content"], choice["finish_reason"]) == ("hm", "tool_calls")
        sent = server.bodies[0]
        assert sent["tools"] == [TOOL]
        assert (sent["tool_choice"], sent["parallel_tool_calls"]) == ("required", False)
        assert sent["messages"][1]["tool_calls"][0]["function"]["arguments"] == '{"b": 2}'


async def test_a_completion_goes_on_as_text_or_token_ids_and_is_echoed_here() -> None:
    async with front(fine) as (client, server, _):
        asked = {"model": "served", "prompt": ["a", "b"], "max_tokens": 3, "echo": True, "suffix": None}
        answer = await client.post("/v1/completions", json=asked)
        assert [choice["text"] for choice in answer.json()["choices"]] == ["aone two", "bone two"]
        assert sorted(sent["prompt"] for sent in server.bodies) == ["a", "b"]
        assert all("echo" not in sent for sent in server.bodies)
        answer = await client.post("/v1/completions", json={"model": "served", "prompt": [5, 6]})
        assert answer.status_code == 200 and server.bodies[-1]["prompt"] == [5, 6]


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/v1/completions", {"prompt": "a", "return_token_ids": True}, "return_token_ids"),
        ("/v1/completions", {"prompt": "a", "prompt_logprobs": 1}, "prompt_logprobs"),
        ("/v1/completions", {"prompt": "a", "echo": True, "logprobs": 1}, "echo"),
        ("/v1/completions", {"prompt": [5], "echo": True}, "echo"),
        ("/v1/chat/completions", {"messages": CHAT["messages"], "chat_template": "x"}, "chat_template"),
        ("/v1/responses", {"input": "a", "truncation": "auto"}, "truncation"),
        ("/tokenize", {"prompt": "a"}, None),
        ("/detokenize", {"tokens": [1]}, None),
        ("/v1/chat/completions/render", {"messages": CHAT["messages"]}, None),
    ],
)
async def test_what_needs_tokens_here_is_refused_by_name(path: str, fields: dict[str, Any], param: str | None) -> None:
    async with front(fine) as (client, server, _):
        answer = await client.post(path, json={"model": "served", **fields})
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["param"] == param
        assert server.bodies == []


async def test_an_include_stop_str_is_looked_for_here_so_that_any_server_will_do() -> None:
    async with front(fine) as (client, server, _):
        asked = {"model": "served", "prompt": "a", "stop": "e t", "include_stop_str_in_output": True}
        (choice,) = (await client.post("/v1/completions", json=asked)).json()["choices"]
        assert (choice["text"], choice["stop_reason"], choice["finish_reason"]) == ("one t", "e t", "stop")
        assert "stop" not in server.bodies[0]


@pytest.mark.parametrize(
    ("theirs", "code", "own"),
    [
        ("messages[0].content", None, "input"),
        ("messages", "context_length_exceeded", "input"),
        ("max_tokens", "context_length_exceeded", "max_output_tokens"),
        (None, "context_length_exceeded", "max_output_tokens"),
        ("reasoning_effort", "unsupported_parameter", "reasoning.effort"),
        ("response_format.json_schema.schema", None, "text.format.schema"),
        ("top_p", None, "top_p"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_what_the_server_refuses_of_a_response_has_the_clients_name(
    stream: bool, theirs: str | None, code: str | None, own: str
) -> None:
    async def refusing(wire: Wire) -> None:
        await wire.refuse(400, {"error": {"message": "m", "param": theirs, "code": code}})

    wanted = {"type": "json_schema", "name": "x", "schema": {"type": "object"}}
    body = {"model": "served", "input": "hi", "stream": stream, "text": {"format": wanted}}
    async with front(refusing) as (client, _, _):
        answer = await client.post("/v1/responses", json=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, own)
        chat = await client.post("/v1/chat/completions", json=CHAT)
        assert chat.json()["error"]["param"] == (theirs or "max_tokens")


async def test_a_response_is_made_of_a_chat() -> None:
    async with front(fine) as (client, server, _):
        answer = await client.post("/v1/responses", json={"model": "served", "input": "hi", "max_output_tokens": 20})
        assert answer.status_code == 200, answer.text
        body = answer.json()
        assert body["output"][0]["content"][0]["text"] == "one two"
        assert body["usage"]["output_tokens"] == 3
        assert server.paths == ["/v1/chat/completions"] and server.bodies[0]["max_tokens"] == 20


async def test_a_steered_fan_out_closes_what_it_has_no_use_for() -> None:
    closed: list[int] = []

    async def answer(wire: Wire) -> None:
        if wire.body["seed"] == 1:
            await fine(wire)
            return
        await wire.head()
        await wire.said("a")
        await wire.wait_closed()
        closed.append(wire.body["seed"])

    async with front(answer) as (client, _, _app):
        asked = {**CHAT, "n": 3, "seed": 1, "fan_out": {"stop_after": 1}}
        choices = (await client.post("/v1/chat/completions", json=asked)).json()["choices"]
        assert [choice["end_reason"] for choice in choices] == ["stop", "cancelled", "cancelled"]
        await until(lambda: sorted(closed) == [2, 3])


async def test_refusals_are_http_errors_in_the_servers_words() -> None:
    async def busy(wire: Wire) -> None:
        await wire.refuse(429, {"error": {"message": "full"}}, retry_after="7")

    async with front(busy) as (client, server, _):
        answer = await client.post("/v1/chat/completions", json={**CHAT, "stream": True})
        assert (answer.status_code, answer.headers["retry-after"]) == (429, "7")
        assert answer.json()["error"]["message"] == "full"

        async def bad(wire: Wire) -> None:
            await wire.refuse(400, {"error": {"message": "no", "param": "stop", "code": "c"}})

        server.answer = bad
        answer = await client.post("/v1/chat/completions", json=CHAT)
        error = answer.json()["error"]
        assert (answer.status_code, error["message"], error["param"], error["code"]) == (400, "no", "stop", "c")


async def test_metrics_tell_of_each_upstream_under_the_name_that_the_settings_give_it() -> None:
    async with front(fine) as (client, server, _):
        await client.post("/v1/chat/completions", json=CHAT)
        text = (await client.get("/metrics")).text
        name = server.url.removeprefix("http://")
        assert f'chorus_upstream_up{{upstream="{name}"}} 1.0' in text
        assert f'chorus_upstream_circuit_open{{upstream="{name}"}} 0.0' in text
        assert f'chorus_upstream_choices{{upstream="{name}"}} 0.0' in text
        assert f'chorus_upstream_requests_total{{outcome="ok",upstream="{name}"}} 1.0' in text
