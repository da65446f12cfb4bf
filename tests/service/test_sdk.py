"""openai-python's own helpers over what the server sends: parsed models, tools, streams that fold themselves."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Literal

import openai
import pytest
from pydantic import BaseModel

from .apps import SETTINGS, serving
from .constrained import ConstrainedEngine

THOUGHT, CALL = "<think>Hm.</think>", '<tool_call>{"name": "Weather", "arguments": {"city": "Köln"}}</tool_call>'


class Weather(BaseModel):
    """What the weather is like."""

    city: str
    unit: Literal["C", "F"] = "C"


@contextmanager
def sdk(*answers: str) -> Iterator[openai.OpenAI]:
    """The choice with seed s says answers[s]."""
    settings = replace(SETTINGS, tool_parser="hermes", reasoning_parser="think", max_model_len=4096)

    def rule(seed: int, position: int, _: int) -> int:
        return [*answers[seed].encode(), 256][position]

    with serving(settings, engine=ConstrainedEngine(settings.engine_config(), rule=rule)) as client:
        yield openai.OpenAI(base_url="http://testserver.local/v1", api_key="x", http_client=client, max_retries=0)


MESSAGES: list[openai.types.chat.ChatCompletionMessageParam] = [{"role": "user", "content": "hi"}]


def test_parse_gives_models_for_every_choice() -> None:
    with sdk('{"city": "A"}', '{"city": "B", "unit": "F"}', '{"city": "C"}') as client:
        answer = client.chat.completions.parse(model="org/m", messages=MESSAGES, response_format=Weather, n=3, seed=0)
    assert [choice.message.parsed for choice in answer.choices] == [
        Weather(city="A"),
        Weather(city="B", unit="F"),
        Weather(city="C"),
    ]


def test_parse_gives_arguments_of_tools() -> None:
    with sdk(CALL) as client:
        answer = client.chat.completions.parse(
            model="org/m", messages=MESSAGES, tools=[openai.pydantic_function_tool(Weather)], seed=0
        )
    (call,) = answer.choices[0].message.tool_calls or []
    assert call.function.parsed_arguments == Weather(city="Köln")


@pytest.mark.parametrize("usage", [True, False])
def test_the_stream_helper_folds_tools_reasoning_and_logprobs(usage: bool) -> None:
    answers = (f"{THOUGHT}So: {CALL}\n{CALL}", "Just text.", CALL)
    with sdk(*answers) as client:
        with client.chat.completions.stream(
            model="org/m",
            messages=MESSAGES,
            tools=[openai.pydantic_function_tool(Weather)],
            n=3,
            seed=0,
            logprobs=True,
            top_logprobs=1,
            stream_options={"include_usage": usage},
        ) as stream:
            kinds = {event.type for event in stream}
            final = stream.get_final_completion()
        whole = client.chat.completions.create(
            model="org/m",
            messages=MESSAGES,
            tools=[openai.pydantic_function_tool(Weather)],
            n=3,
            seed=0,
            logprobs=True,
            top_logprobs=1,
        )
    assert {
        "chunk",
        "content.delta",
        "content.done",
        "tool_calls.function.arguments.done",
        "logprobs.content.done",
    } <= kinds
    assert (final.usage is not None) == usage
    for streamed, expected in zip(final.choices, whole.choices, strict=True):
        assert streamed.finish_reason == expected.finish_reason
        assert streamed.message.content == expected.message.content
        assert streamed.logprobs is not None and expected.logprobs is not None
        assert streamed.logprobs.content == expected.logprobs.content
        calls = [
            [call.function.arguments for call in choice.message.tool_calls or []] for choice in (streamed, expected)
        ]
        assert calls[0] == calls[1]
        for call in streamed.message.tool_calls or []:
            assert call.function.parsed_arguments == Weather(city="Köln")


def test_a_conversation_goes_on_with_the_answer_of_a_tool() -> None:
    with sdk(CALL) as client:
        answer = client.chat.completions.create(
            model="org/m", messages=MESSAGES, tools=[openai.pydantic_function_tool(Weather)], seed=0
        )
        message = answer.choices[0].message
        assert message.tool_calls is not None
        again = client.chat.completions.create(
            model="org/m",
            messages=[
                *MESSAGES,
                message.model_dump(exclude_none=True),  # type: ignore[list-item]
                {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": json.dumps({"degrees": 7})},
            ],
            seed=0,
        )
    assert again.choices[0].finish_reason == "stop"
