from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec
import pytest

from engine.api import EndReason, PromptInfo, Request, SamplingParams, TokenPrompt
from service.choice_text import ChoiceEvent, TextRules
from service.fan_out import FanOut
from service.job import GenerationJob
from service.presenter import total
from service.presenters import PRESENTERS
from service.presenting import finish_reason
from service.tokenizer import ByteTokenizer

KINDS: list[Literal["chat", "completion"]] = ["chat", "completion"]


def make_job(kind: Literal["chat", "completion"], n: int, *, prompts: int = 1, usage: bool = False) -> GenerationJob:
    choices = tuple(SamplingParams(seed=k) for k in range(n))
    batch = tuple(Request("m", TokenPrompt((1,)), choices) for _ in range(prompts))
    return GenerationJob(kind, f"{kind}-1", 7, "served", batch, n, TextRules(), True, usage, None)


def event(index: int, text: str, num_tokens: int = 1, end: EndReason | None = None, stop: Any = None) -> ChoiceEvent:
    return ChoiceEvent(index, text, (), num_tokens, end, stop)


EVENTS = [
    event(1, "b"),
    event(0, ""),
    event(0, "a"),
    event(1, "B", 2, EndReason.STOP, "\n"),
    event(0, "", 1, EndReason.LENGTH),
]


def present(
    kind: Literal["chat", "completion"], events: Sequence[ChoiceEvent], **options: Any
) -> tuple[list[Any], Any]:
    """The stream's chunks and the body, each as the JSON that a client sees."""
    job, prompts = make_job(kind, 2, **options), [PromptInfo(5, 3)] * options.get("prompts", 1)
    fan_out = FanOut(job, prompts)
    streamed, whole = [PRESENTERS[kind](job, prompts, fan_out, ByteTokenizer()) for _ in range(2)]
    for one in events:
        fan_out.observe(one)
        whole.collect(one)
    chunks = [chunk for one in events for chunk in streamed.chunks(one)] + streamed.last_chunks()
    return [msgspec.to_builtins(chunk) for chunk in chunks], msgspec.to_builtins(whole.body())


def test_chat_chunks_begin_with_the_role_and_end_with_an_empty_delta_for_every_choice() -> None:
    chunks, _ = present("chat", EVENTS)
    choices = [chunk["choices"][0] for chunk in chunks]
    assert [(choice["index"], choice["delta"], choice["finish_reason"]) for choice in choices] == [
        (1, {"role": "assistant", "content": ""}, None),
        (1, {"content": "b"}, None),
        (0, {"role": "assistant", "content": ""}, None),
        (0, {"content": "a"}, None),
        (1, {"content": "B"}, None),
        (1, {}, "stop"),
        (0, {}, "length"),
    ]


def test_completion_chunks_carry_text_and_finish_together() -> None:
    chunks, _ = present("completion", EVENTS)
    choices = [chunk["choices"][0] for chunk in chunks]
    assert [(choice["index"], choice["text"], choice["finish_reason"]) for choice in choices] == [
        (1, "b", None),
        (0, "a", None),
        (1, "B", "stop"),
        (0, "", "length"),
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_id_object_created_and_model_are_the_same_in_all_chunks(kind: Literal["chat", "completion"]) -> None:
    chunks, body = present(kind, EVENTS, usage=True)
    keys = {(chunk["id"], chunk["object"], chunk["created"], chunk["model"]) for chunk in chunks}
    (key,) = keys
    assert key[0] == body["id"] == f"{kind}-1"
    assert key[2:] == (7, "served") == (body["created"], body["model"])


@pytest.mark.parametrize("kind", KINDS)
def test_usage_is_null_until_a_last_chunk_without_choices(kind: Literal["chat", "completion"]) -> None:
    chunks, body = present(kind, EVENTS, usage=True)
    assert [chunk["usage"] for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert all(len(chunk["choices"]) == 1 for chunk in chunks[:-1])
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == body["usage"]


@pytest.mark.parametrize("kind", KINDS)
def test_no_chunk_speaks_of_usage_unless_asked(kind: Literal["chat", "completion"]) -> None:
    chunks, _ = present(kind, EVENTS)
    assert all("usage" not in chunk and len(chunk["choices"]) == 1 for chunk in chunks)


@pytest.mark.parametrize("kind", KINDS)
def test_usage_counts_each_prompt_once_and_all_choices(kind: Literal["chat", "completion"]) -> None:
    events = [*EVENTS, event(2, "", 1, EndReason.STOP), event(3, "", 0, EndReason.CANCELLED)]
    _, body = present(kind, events, prompts=2)
    assert body["usage"] == {
        "prompt_tokens": 10,
        "completion_tokens": 7,
        "total_tokens": 17,
        "prompt_tokens_details": {"cached_tokens": 6},
    }


@pytest.mark.parametrize(("counts", "expected"), [([], 0), ([None], 0), ([None, 0], 0), ([0, None, 5], 5), ([2, 3], 5)])
def test_unknown_counts_add_nothing_and_zero_is_a_count(counts: list[int | None], expected: int) -> None:
    assert total(counts) == expected


@pytest.mark.parametrize("kind", KINDS)
def test_folded_stream_equals_the_body(kind: Literal["chat", "completion"]) -> None:
    chunks, body = present(kind, EVENTS, usage=True)
    for expected in body["choices"]:
        own = [chunk["choices"][0] for chunk in chunks[:-1] if chunk["choices"][0]["index"] == expected["index"]]
        texts = [c["delta"].get("content", "") if kind == "chat" else c["text"] for c in own]
        assert "".join(texts) == (expected["message"]["content"] if kind == "chat" else expected["text"])
        ends = [c for c in own if c["finish_reason"] is not None]
        assert ends == own[-1:]
        for key in ("finish_reason", "stop_reason", "end_reason"):
            assert ends[0][key] == expected[key]
        assert not any("end_reason" in c or "stop_reason" in c for c in own[:-1])


@pytest.mark.parametrize("kind", KINDS)
def test_choice_that_says_nothing_has_empty_text_not_null(kind: Literal["chat", "completion"]) -> None:
    _, body = present(kind, [event(0, "", 1, EndReason.STOP), event(1, "", 1, EndReason.STOP)])
    assert [c["message"]["content"] if kind == "chat" else c["text"] for c in body["choices"]] == ["", ""]


def test_all_that_is_not_a_stop_is_incomplete() -> None:
    assert {reason: finish_reason(reason) for reason in EndReason if reason is not EndReason.ERROR} == {
        EndReason.STOP: "stop",
        EndReason.LENGTH: "length",
        EndReason.DEADLINE: "length",
        EndReason.CANCELLED: "length",
    }
