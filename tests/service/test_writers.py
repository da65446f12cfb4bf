"""The bytes of a stream are those of its chunks, whichever way they were put together."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import msgspec
import pytest

from engine.api import EndReason, PromptInfo
from service.choice_text import ChoiceEvent
from service.fan_out import FanOut
from service.job import ShowRules
from service.parsers import ToolCallStart
from service.presenters import PRESENTERS
from service.presenting import Presenter
from service.token_entries import TokenEntry
from service.tokenizer import ByteTokenizer
from service.writers import StreamWriter

from .test_presenters import KINDS, make_job

ENTRY = TokenEntry(b"a", -0.5, (), 0)
EVENTS = [
    ChoiceEvent(0, "", (195,), 1),  # the first half of a character shows nothing
    ChoiceEvent(0, "é", (169,), 1),
    ChoiceEvent(1, 'a"\n\0\u2028', (1,), 1),
    ChoiceEvent(0, "b", (2,), 1),
    ChoiceEvent(0, "cd", (3, 4), 2),
    ChoiceEvent(1, "", (195,), 1),
    ChoiceEvent(1, "è\U0001f600", (5,), 1),
    ChoiceEvent(1, "e", (6,), 1, entries=(ENTRY,)),
    ChoiceEvent(0, "f", (7,), 1, reasoning="g", num_reasoning_tokens=1),
    ChoiceEvent(0, "h", (8,), 1),
    ChoiceEvent(0, "", (9,), 1, calls=(ToolCallStart(0, "call-1", "look"),)),
    ChoiceEvent(0, "i", (10,), 0),
    ChoiceEvent(0, "j", (10,), 1),
    ChoiceEvent(0, "k", (11,), 1, EndReason.STOP, "\n"),
    ChoiceEvent(1, "l", (12,), 1),
    ChoiceEvent(1, "", (), 0, EndReason.LENGTH),
]
SHOWS = [
    ShowRules(),
    ShowRules(logprobs=0),
    ShowRules(token_ids=True),
    ShowRules(running_usage=True),
    ShowRules(tokens_per_chunk=2),
    ShowRules(reasoning=True, may_call=True),
]


def presenter_of(kind: Literal["chat", "completion"], show: ShowRules, usage: bool) -> Presenter:
    job = replace(make_job(kind, 2, usage=usage), show=show)
    prompts = [PromptInfo(5, 3)]
    fan_out = FanOut(job, prompts)
    for event in EVENTS:
        fan_out.observe(event)
    return PRESENTERS[kind](job, prompts, fan_out, ByteTokenizer())


@pytest.mark.anyio
@pytest.mark.parametrize("usage", [False, True])
@pytest.mark.parametrize("show", SHOWS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("batch_size", [1, len(EVENTS)])
async def test_a_stream_has_the_bytes_of_its_chunks(
    kind: Literal["chat", "completion"], show: ShowRules, usage: bool, batch_size: int
) -> None:
    sent: list[bytes] = []

    async def send(message: Any) -> None:
        sent.append(message["body"])

    async def start(*_: object) -> None:
        pass

    writer = StreamWriter(start, presenter_of(kind, show, usage), send, None)
    for begin in range(0, len(EVENTS), batch_size):
        await writer.write(EVENTS[begin : begin + batch_size])
    await writer.end(None)
    presenter = presenter_of(kind, show, usage)
    chunks = [chunk for event in EVENTS for chunk in presenter.chunks(event)] + presenter.last_chunks()
    expected = [b"data: " + data + b"\n\n" for data in [*map(msgspec.json.encode, chunks), b"[DONE]"]]
    assert b"".join(sent) == b"".join(expected)
