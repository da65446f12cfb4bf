"""What an answer must look like on the wire, a stream folded into the body it stands for, and the fake's answers.

The Structs are the schema that strict clients validate with: no other keys, no nulls where the API has none.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import httpx
import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from tests.e2e.server import Server
from tests.e2e.wire import Answer

FinishReason = Literal["stop", "length", "tool_calls", "content_filter"]
Count = Annotated[int, Meta(ge=0)]
LEAKS = ("Traceback", "object at 0x", "<class ", ".py", "service.", "engine.", "{%")


class _Strict(Struct, forbid_unknown_fields=True):
    pass


class TokenDetails(_Strict):
    cached_tokens: Count


class Usage(_Strict):
    prompt_tokens: Count
    completion_tokens: Count
    total_tokens: Count
    prompt_tokens_details: TokenDetails


class Delta(_Strict):
    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChunkChoice(_Strict):
    index: Count
    delta: Delta
    finish_reason: FinishReason | None
    logprobs: None = None
    stop_reason: int | str | UnsetType | None = UNSET
    end_reason: str | UnsetType = UNSET


class TextChoice(_Strict):
    index: Count
    text: str
    finish_reason: FinishReason | None
    logprobs: None = None
    stop_reason: int | str | UnsetType | None = UNSET
    end_reason: str | UnsetType = UNSET


class Message(_Strict):
    role: Literal["assistant"]
    content: str
    refusal: None


class ChatChoice(_Strict):
    index: Count
    message: Message
    finish_reason: FinishReason
    logprobs: None
    stop_reason: int | str | None
    end_reason: str


class ChatChunk(_Strict):
    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: Usage | UnsetType | None = UNSET


class TextChunk(_Strict):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[TextChoice]
    usage: Usage | UnsetType | None = UNSET


class ChatBody(_Strict):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class TextBody(_Strict):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[TextChoice]
    usage: Usage


class Choice(Struct):
    """What both kinds of answer say of one choice."""

    text: str
    finish_reason: str
    stop_reason: int | str | None
    end_reason: str


class Folded(Struct):
    """usage: None for a stream that was not asked for it."""

    choices: list[Choice]
    usage: Usage | None

    @property
    def texts(self) -> list[str]:
        return [choice.text for choice in self.choices]


def read_body(body: bytes) -> Folded:
    """A whole answer, checked against its schema."""
    kind = json.loads(body)["object"]
    answer: Any = msgspec.json.decode(body, type=ChatBody if kind == "chat.completion" else TextBody, strict=True)
    assert [choice.index for choice in answer.choices] == list(range(len(answer.choices)))
    choices = [
        Choice(
            choice.message.content if kind == "chat.completion" else choice.text,
            choice.finish_reason,
            choice.stop_reason,
            choice.end_reason,
        )
        for choice in answer.choices
    ]
    _check_usage(answer.usage)
    return Folded(choices, answer.usage)


def fold(events: Sequence[str], num_choices: int, *, usage: bool = False) -> Folded:
    """A whole stream, checked chunk by chunk and in its order."""
    assert events[-1:] == ["[DONE]"], events[-3:]
    assert events.count("[DONE]") == 1
    chunks = [_chunk(event) for event in events[:-1]]
    assert len({(chunk.id, chunk.created, chunk.model) for chunk in chunks}) == 1
    totals = None
    if usage:
        last = chunks.pop()
        assert last.choices == []
        totals = last.usage
        _check_usage(totals)
    assert all(chunk.usage is (None if usage else UNSET) for chunk in chunks)
    assert all(len(chunk.choices) == 1 for chunk in chunks)
    by_index: dict[int, list[Any]] = {index: [] for index in range(num_choices)}
    for chunk in chunks:
        by_index[chunk.choices[0].index].append(chunk.choices[0])
    return Folded([_fold_choice(parts) for parts in by_index.values()], totals)


def _chunk(event: str) -> Any:
    kind = json.loads(event).get("object")
    return msgspec.json.decode(event, type=ChatChunk if kind == "chat.completion.chunk" else TextChunk, strict=True)


def _fold_choice(parts: Sequence[Any]) -> Choice:
    """One role first, one finish last, and nothing empty between that a client would have to skip."""
    *before, last = parts
    assert all(part.finish_reason is None and part.stop_reason is UNSET for part in before)
    if isinstance(last, ChunkChoice):
        assert before[0].delta == Delta(role="assistant", content="")
        assert all(part.delta.role is UNSET for part in parts[1:])
        assert all(part.delta.content for part in before[1:])
        assert last.delta == Delta()
        text = "".join(part.delta.content for part in before)
    else:
        assert all(part.text for part in before)
        text = "".join(part.text for part in parts)
    assert last.finish_reason is not None
    return Choice(text, last.finish_reason, last.stop_reason, last.end_reason)


def _check_usage(usage: Any) -> None:
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert usage.prompt_tokens_details.cached_tokens <= usage.prompt_tokens


PATHS = {"messages": "/v1/chat/completions", "prompt": "/v1/completions"}


def path_of(body: Mapping[str, Any]) -> str:
    return next(path for field, path in PATHS.items() if field in body)


def num_choices(body: Mapping[str, Any]) -> int:
    prompt = body.get("prompt")
    is_list = isinstance(prompt, list) and not isinstance(prompt[0], int)
    return (len(prompt) if is_list and prompt is not None else 1) * (body.get("n") or 1)


def ask(server: Server, body: Mapping[str, Any]) -> Folded:
    """The answer that is not streamed."""
    response = server.post(path_of(body), body)
    assert response.status_code == 200, response.text
    folded = read_body(response.content)
    assert len(folded.choices) == num_choices(body)
    return folded


def ask_streamed(server: Server, body: Mapping[str, Any]) -> Folded:
    """The same answer, streamed and folded, with usage."""
    streamed = {**body, "stream": True, "stream_options": {"include_usage": True}}
    with server.http.stream("POST", path_of(body), json=streamed) as response:
        assert response.status_code == 200, response.read()
        assert response.headers["content-type"].startswith("text/event-stream")
        events = response.read().decode().split("\n\n")
    assert events.pop() == ""
    data = [event.removeprefix("data: ") for event in events if not event.startswith(":")]
    return fold(data, num_choices(body), usage=True)


def check_error(answer: httpx.Response | Answer, status: int, param: str | None = None, code: str | None = None) -> Any:
    """The only shape that an error has, whoever raised it. param and code are checked where given."""
    content = answer.content if isinstance(answer, httpx.Response) else answer.body
    found = answer.status_code if isinstance(answer, httpx.Response) else answer.status
    assert found == status, content
    assert answer.headers["content-type"] == "application/json"
    return check_envelope(json.loads(content), param, code)


def check_envelope(body: Any, param: str | None = None, code: str | None = None) -> Any:
    assert set(body) == {"error"}
    error = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str) and error["message"]
    assert isinstance(error["type"], str) and error["type"]
    assert not any(leak in error["message"] for leak in LEAKS), error["message"]
    if param is not None:
        assert error["param"] == param, error
    if code is not None:
        assert error["code"] == code, error
    return error


def letters(seed: int, num_prompt_tokens: int, count: int) -> str:
    """What the fake engine answers: see engine/fake.py."""
    return "".join(chr(ord("a") + (seed + k + num_prompt_tokens) % 26) for k in range(count))
