"""openai-python's own helpers over responses: streams that fold themselves, parsed models, tools, kept responses."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types.responses import ResponseInputParam

from .apps import SETTINGS, serving
from .constrained import ConstrainedEngine
from .test_sdk import CALL, THOUGHT, Weather


@contextmanager
def sdk(*answers: str, store: Path | None = None) -> Iterator[openai.OpenAI]:
    """The response with seed s says answers[s]."""
    settings = replace(
        SETTINGS, tool_parser="hermes", reasoning_parser="think", max_model_len=4096, responses_store=store
    )

    def rule(seed: int, position: int, _: int) -> int:
        return [*answers[seed].encode(), 256][position]

    with serving(settings, engine=ConstrainedEngine(settings.engine_config(), rule=rule)) as client:
        yield openai.OpenAI(base_url="http://testserver.local/v1", api_key="x", http_client=client, max_retries=0)


def seeded(seed: int) -> dict[str, Any]:
    return {"model": "org/m", "extra_body": {"seed": seed}}


def test_create_gives_text_reasoning_and_usage() -> None:
    with sdk(f"{THOUGHT}Hello!") as client:
        answer = client.responses.create(input="hi", **seeded(0))
    assert answer.output_text == "Hello!"
    assert [item.type for item in answer.output] == ["reasoning", "message"]
    assert answer.status == "completed"
    assert answer.usage is not None
    assert answer.usage.output_tokens_details.reasoning_tokens > 0


def test_the_stream_helper_gives_the_answer_that_is_not_streamed() -> None:
    text = f"{THOUGHT}So: {CALL}\n{CALL} Done."
    tools: Any = [openai.pydantic_function_tool(Weather)]
    with sdk(text) as client:
        asked: dict[str, Any] = {
            "input": "hi",
            "tools": tools,
            "include": ["message.output_text.logprobs"],
            "top_logprobs": 1,
            **seeded(0),
        }
        with client.responses.stream(**asked) as stream:
            events = list(stream)
            final = stream.get_final_response()
        whole = client.responses.parse(**asked)
    assert {event.type for event in events} == {
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.reasoning_text.delta",
        "response.reasoning_text.done",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
        "response.output_item.done",
        "response.completed",
    }
    snapshots = [event.snapshot for event in events if event.type == "response.output_text.delta"]
    assert snapshots[2] == "So:" and snapshots[-1] == "Done."
    assert final.output_text == whole.output_text == "So:Done."
    for streamed, expected in zip(final.output, whole.output, strict=True):
        assert streamed.type == expected.type
        if streamed.type == "function_call" and expected.type == "function_call":
            assert streamed.arguments == expected.arguments
            assert streamed.parsed_arguments == Weather(city="Köln")
        if streamed.type == "message" and expected.type == "message":
            one, other = streamed.content[0], expected.content[0]
            assert one.type == other.type == "output_text"
            assert one.logprobs == other.logprobs


def test_parse_gives_a_model() -> None:
    with sdk('{"city": "A"}', '{"city": "B", "unit": "F"}') as client:
        answer = client.responses.parse(input="hi", text_format=Weather, **seeded(1))
        assert answer.output_parsed == Weather(city="B", unit="F")
        with client.responses.stream(input="hi", text_format=Weather, **seeded(0)) as stream:
            assert stream.get_final_response().output_parsed == Weather(city="A")


def test_a_tool_loop_sends_the_output_back() -> None:
    """As the SDK's documentation has it, with its objects and with their dumps."""
    with sdk(f"{THOUGHT}{CALL}", "It is 7 degrees.") as client:
        tools: Any = [{"type": "function", "name": "Weather", "parameters": Weather.model_json_schema()}]
        first = client.responses.parse(input="hi", tools=tools, **seeded(0))
        call = next(item for item in first.output if item.type == "function_call")
        result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": json.dumps({"degrees": 7})}
        for output in (first.output, [item.model_dump() for item in first.output]):
            conversation: ResponseInputParam = [{"role": "user", "content": "hi"}, *output, result]
            second = client.responses.create(input=conversation, tools=tools, **seeded(1))
            assert second.output_text == "It is 7 degrees."


def test_kept_responses_are_reached_by_the_client(tmp_path: Path) -> None:
    with sdk("Hello!", "Again.", store=tmp_path / "responses.sqlite") as client:
        first = client.responses.create(input="hi", metadata={"a": "b"}, **seeded(0))
        again = client.responses.create(input="more", previous_response_id=first.id, **seeded(1))
        assert again.previous_response_id == first.id
        assert client.responses.retrieve(first.id, include=["message.output_text.logprobs"]) == first
        items = list(client.responses.input_items.list(again.id, order="asc", limit=1))
        assert [item.type for item in items] == ["message"]
        with pytest.raises(openai.BadRequestError):
            client.responses.cancel(first.id)
        client.responses.delete(first.id)
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(first.id)
        with pytest.raises(openai.NotFoundError) as gone:
            client.responses.create(input="more", previous_response_id=again.id, **seeded(1))
        assert (gone.value.param, gone.value.code) == ("previous_response_id", "previous_response_not_found")
