"""What servers write, in the ways in which they write it."""

from __future__ import annotations

import json
from typing import Any

import anyio
import pytest

from engine.api import CallDelta, EndReason, TextDelta
from tests.engine.upstream.scripted import Wire, answering, ask, chat, completion, fleet, read

pytestmark = pytest.mark.anyio

USAGE = {
    "choices": [],
    "usage": {
        "prompt_tokens": 9,
        "completion_tokens": 3,
        "total_tokens": 12,
        "prompt_tokens_details": {"cached_tokens": 4},
        "completion_tokens_details": {"reasoning_tokens": 2},
    },
}


def delta(finish: str | None = None, **fields: object) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": fields, "finish_reason": finish}]}


async def test_what_an_answer_says_beside_its_text_is_told() -> None:
    steps = [
        delta(role="assistant", content=""),
        delta(content="a"),
        delta(content="b"),
        delta("stop"),
        USAGE,
        "[DONE]",
    ]
    async with fleet(answering(steps)) as (engine, _), engine.submit([chat()]) as submission:
        text, last = await read(submission.choices[0])
        assert (text, last.end_reason, last.stop_reason) == ("ab", EndReason.STOP, None)
        # two events were taken for two tokens; the server says that there were three
        assert last.delta == TextDelta(1, num_reasoning_tokens=2)
        prompt = submission.prompts[0]
        assert (prompt.num_tokens, prompt.num_cached_tokens) == (9, 4)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 4096])
async def test_the_stream_may_be_cut_and_written_in_any_way(size: int) -> None:
    """Bytes of a character apart, CR and LF apart, comments, fields that nobody knows, characters that end lines in
    Unicode alone, an event of two data lines."""
    said = "é🎵\u2028\x85"
    whole = json.dumps(delta(content=said), ensure_ascii=False)
    first, second = '{"choices": [', json.dumps(delta(content="!")["choices"][0]) + "]}"
    raw = (
        f": ping\r\n\r\nid: 1\r\nevent: message\r\nretry: 5\r\ndata: {whole}\r\n\r\n"
        f"data:{json.dumps(delta(role='assistant'))}\n\nunknown: x\ndata: {first}\ndata: {second}\n\n"
        f": and on\n\ndata: {json.dumps(delta('length'))}\r\rdata: [DONE]\n\n"
    ).encode()

    async def answer(wire: Wire) -> None:
        await wire.head()
        for start in range(0, len(raw), size):
            await wire.chunk(raw[start : start + size])
        await wire.end()

    async with fleet(answer) as (engine, _):
        ((text, last),) = await ask(engine, chat())
    assert (text, last.end_reason) == (said + "!", EndReason.LENGTH)


@pytest.mark.parametrize(
    ("steps", "text", "end"),
    [
        ([delta(content="a"), delta("stop")], "a", EndReason.STOP),  # no [DONE]
        ([delta("stop", content="a"), "[DONE]"], "a", EndReason.STOP),  # all at once
        ([delta(content="a"), "[DONE]"], "a", EndReason.STOP),  # no finish_reason
        ([delta(content="a"), delta("stop"), delta(content=""), USAGE, "[DONE]"], "a", EndReason.STOP),
        ([delta("content_filter", content="a"), "[DONE]"], "a", EndReason.LENGTH),
        ([{"choices": [{"index": 0, "text": "a", "finish_reason": "stop"}]}, "[DONE]"], "a", EndReason.STOP),
        (
            [{"id": "x", "object": "chat.completion.chunk"}, delta("stop", content="a", refusal=None)],
            "a",
            EndReason.STOP,
        ),
    ],
)
async def test_servers_end_their_answers_in_ways_of_their_own(steps: list[object], text: str, end: EndReason) -> None:
    async with fleet(answering(steps)) as (engine, _):
        ((said, last),) = await ask(engine, chat())
    assert (said, last.end_reason) == (text, end)


async def test_an_end_reason_and_a_stop_reason_of_a_server_that_knows_them_are_kept() -> None:
    end = {"index": 0, "text": "", "finish_reason": "length", "end_reason": "deadline"}
    stop = {"index": 0, "text": "a", "finish_reason": "stop", "stop_reason": "\n"}
    async with fleet(answering([{"choices": [end]}, "[DONE]"]), answering([])) as (engine, servers):
        servers[1].is_well = False
        servers[0].answer = answering([{"choices": [end]}, "[DONE]"])
        servers[1].answer = servers[0].answer
        ((_, last),) = await ask(engine, completion())
        assert last.end_reason is EndReason.DEADLINE
        servers[0].answer = servers[1].answer = answering([{"choices": [stop]}, "[DONE]"])
        ((_, last),) = await ask(engine, completion())
        assert (last.end_reason, last.stop_reason) == (EndReason.STOP, "\n")


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning"])
async def test_reasoning_and_calls_come_as_the_server_tells_them_apart(field: str) -> None:
    def call(**fields: object) -> dict[str, Any]:
        return delta(tool_calls=[fields])

    steps = [
        delta(**{field: "hm"}),
        call(index=1, id="a", type="function", function={"name": "f", "arguments": ""}),
        call(index=1, function={"arguments": "{}"}),
        call(index=5, id="b", type="function", function={"name": "g", "arguments": '{"x":1}'}),
        delta("tool_calls"),
        "[DONE]",
    ]
    async with fleet(answering(steps)) as (engine, _), engine.submit([chat()]) as submission:
        deltas = [update.delta async for update in submission.choices[0] if update.delta is not None]
    assert [one.reasoning for one in deltas if one.reasoning] == ["hm"]
    calls = [one for each in deltas for one in each.calls]
    assert calls == [
        CallDelta(0, "", "a", "f"),
        CallDelta(0, "{}"),
        CallDelta(1, '{"x":1}', "b", "g"),  # numbered from 0, whatever the server does
    ]


async def test_calls_without_numbers_are_told_apart_by_their_ids() -> None:
    steps = [
        delta(tool_calls=[{"id": "a", "function": {"name": "f", "arguments": "{"}}]),
        delta(tool_calls=[{"function": {"arguments": "}"}}]),
        delta("tool_calls", tool_calls=[{"id": "b", "function": {"name": "g", "arguments": "{}"}}]),
    ]
    async with fleet(answering(steps)) as (engine, _), engine.submit([chat()]) as submission:
        calls = [one async for update in submission.choices[0] if update.delta for one in update.delta.calls]
    assert calls == [CallDelta(0, "{", "a", "f"), CallDelta(0, "}"), CallDelta(1, "{}", "b", "g")]


async def test_logprobs_keep_their_tokens_bytes_in_both_forms() -> None:
    half = {"token": "\ufffd", "bytes": [0xE2, 0x82], "logprob": -0.5, "top_logprobs": [{"token": "x", "logprob": -1}]}
    content = {"choices": [{"index": 0, "delta": {"content": ""}, "logprobs": {"content": [half]}}]}
    steps = [content, delta("stop"), "[DONE]"]
    async with fleet(answering(steps)) as (engine, servers):
        async with engine.submit([chat()]) as submission:
            (first,) = [u.delta async for u in submission.choices[0] if u.delta and u.delta.logprobs]
        assert (first.logprobs[0].token, first.logprobs[0].logprob) == (b"\xe2\x82", -0.5)
        assert first.logprobs[0].top == ((b"x", -1.0),)
        older = {
            "tokens": ["bytes:\\xe2\\x82", "a"],
            "token_logprobs": [-0.5, -0.25],
            "top_logprobs": [None, {"b": -2.0, "a": -0.25}],
        }
        servers[0].answer = answering([{"choices": [{"text": "a", "finish_reason": "stop", "logprobs": older}]}])
        async with engine.submit([completion(logprobs=2)]) as submission:
            (first,) = [u.delta async for u in submission.choices[0] if u.delta and u.delta.logprobs]
        assert [entry.token for entry in first.logprobs] == [b"\xe2\x82", b"a"]
        assert first.logprobs[1].top == ((b"a", -0.25), (b"b", -2.0))
        assert first.num_tokens == 2


@pytest.mark.parametrize(
    "raw",
    [b"data: {\n\n", b"data: []\n\n", b'data: {"choices": [{"delta": {"content": 5}}]}\n\n', b"data: \xff\xfe\n\n"],
)
async def test_what_is_no_chunk_fails_the_choice_and_nothing_else(raw: bytes) -> None:
    async def answer(wire: Wire) -> None:
        await wire.head()
        await wire.said("a")
        await wire.chunk(raw)
        await wire.wait_closed()

    async with fleet(answer) as (engine, servers):
        ((text, last),) = await ask(engine, chat())
        assert (text, last.end_reason) == ("a", EndReason.ERROR)
        servers[0].answer = answering([delta("stop", content="b")])
        ((text, _),) = await ask(engine, chat())
        assert text == "b"


async def test_an_answer_that_is_no_stream_is_an_error_that_says_so() -> None:
    async def answer(wire: Wire) -> None:
        await wire.refuse(200, {"choices": []}, content_type="application/json")

    async with fleet(answer) as (engine, _):
        with pytest.raises(Exception, match="text/event-stream"):
            await ask(engine, chat())


async def test_a_silent_server_is_given_up_after_the_idle_timeout_but_not_before_its_first_token() -> None:
    begin = anyio.Event()

    async def answer(wire: Wire) -> None:
        await wire.head()
        await begin.wait()
        await wire.said("a")
        await wire.wait_closed()

    async with fleet(answer, idle_timeout=0.2) as (engine, _), engine.submit([chat()]) as submission:
        await anyio.sleep(0.5)
        begin.set()
        text, last = await read(submission.choices[0])
        assert (text, last.end_reason) == ("a", EndReason.ERROR)
        assert "sent nothing" in str(last.error)
