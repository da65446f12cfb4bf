"""What was asked and what was answered, in OpenTelemetry's form of messages; kept only where traces are to have it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from engine.api import EndReason
from service.parsers import ContentDelta, Piece, ReasoningDelta
from service.parsers.pieces import Message, fold

if TYPE_CHECKING:
    from service.choice_text import ChoiceEvent
    from service.messages import RenderedMessage

MAX_TEXT = 32_768
"""Characters of one text: a collector refuses what is too long as a whole."""

Part = dict[str, object]


class Transcript:
    """The answer's choices, as far as they were handed out."""

    def __init__(self, num_choices: int) -> None:
        self._pieces: list[list[Piece]] = [[] for _ in range(num_choices)]

    def add(self, events: Iterable[ChoiceEvent]) -> None:
        for event in events:
            self._pieces[event.index] += [ReasoningDelta(event.reasoning), ContentDelta(event.text), *event.calls]

    def choices(self) -> list[Message]:
        return [fold(pieces) for pieces in self._pieces]


def input_messages(asked: Sequence[RenderedMessage]) -> str:
    """`gen_ai.input.messages` as JSON."""
    return json.dumps([{"role": message["role"], "parts": list(_asked_parts(message))} for message in asked])


def output_messages(answered: Sequence[Message], ends: Sequence[EndReason]) -> str:
    """`gen_ai.output.messages` as JSON, one for each choice."""
    pairs = zip(answered, ends, strict=True)
    return json.dumps(
        [
            {
                "role": "assistant",
                "parts": list(_answered_parts(message)),
                "finish_reason": _finish_reason(message, end),
            }
            for message, end in pairs
        ]
    )


def _asked_parts(message: RenderedMessage) -> Iterator[Part]:
    content = message.get("content")
    if message["role"] == "tool":
        yield {"type": "tool_call_response", "id": message.get("tool_call_id"), "response": _cut(str(content))}
        return
    if reasoning := message.get("reasoning_content"):
        yield {"type": "reasoning", "content": _cut(str(reasoning))}
    if content is not None:
        yield {"type": "text", "content": _cut(str(content))}
    calls = message.get("tool_calls")
    for call in calls if isinstance(calls, list) else []:
        function = call["function"]
        yield {"type": "tool_call", "id": call["id"], "name": function["name"], "arguments": function["arguments"]}


def _answered_parts(message: Message) -> Iterator[Part]:
    if message.reasoning:
        yield {"type": "reasoning", "content": _cut(message.reasoning)}
    if message.content:
        yield {"type": "text", "content": _cut(message.content)}
    for call in message.tool_calls:
        yield {"type": "tool_call", "id": call.id, "name": call.name, "arguments": _cut(call.arguments)}


def _finish_reason(message: Message, end: EndReason) -> str:
    return "tool_call" if message.tool_calls and end is EndReason.STOP else end.value


def _cut(text: str) -> str:
    return text if len(text) <= MAX_TEXT else text[:MAX_TEXT] + "..."
