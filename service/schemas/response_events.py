"""The events of a streamed response: `event:` is their type, their numbers rise by 1 from 0."""

from __future__ import annotations

from msgspec import Struct

from service.schemas.logprobs import TokenLogprob
from service.schemas.response_items import OutputItem, OutputText, ReasoningText
from service.schemas.responses import Response


class ResponseEvent(Struct, tag_field="type", kw_only=True, frozen=True):
    """Told apart by `type`."""

    sequence_number: int


class _Whole(ResponseEvent, kw_only=True, frozen=True):
    response: Response


class Created(_Whole, tag="response.created", kw_only=True, frozen=True):
    pass


class InProgress(_Whole, tag="response.in_progress", kw_only=True, frozen=True):
    pass


class Completed(_Whole, tag="response.completed", kw_only=True, frozen=True):
    """The last event, unless it is one of the next two."""


class Incomplete(_Whole, tag="response.incomplete", kw_only=True, frozen=True):
    """Also of a response that was cancelled."""


class Failed(_Whole, tag="response.failed", kw_only=True, frozen=True):
    """An `error` comes before it."""


class _OfItem(ResponseEvent, kw_only=True, frozen=True):
    output_index: int
    item: OutputItem


class ItemAdded(_OfItem, tag="response.output_item.added", kw_only=True, frozen=True):
    pass


class ItemDone(_OfItem, tag="response.output_item.done", kw_only=True, frozen=True):
    pass


class _Within(ResponseEvent, kw_only=True, frozen=True):
    item_id: str
    output_index: int


class _OfPart(_Within, kw_only=True, frozen=True):
    content_index: int = 0


class PartAdded(_OfPart, tag="response.content_part.added", kw_only=True, frozen=True):
    part: OutputText | ReasoningText


class PartDone(_OfPart, tag="response.content_part.done", kw_only=True, frozen=True):
    part: OutputText | ReasoningText


class TextDelta(_OfPart, tag="response.output_text.delta", kw_only=True, frozen=True):
    delta: str
    logprobs: list[TokenLogprob]


class TextDone(_OfPart, tag="response.output_text.done", kw_only=True, frozen=True):
    text: str
    logprobs: list[TokenLogprob]


class ReasoningDelta(_OfPart, tag="response.reasoning_text.delta", kw_only=True, frozen=True):
    delta: str


class ReasoningDone(_OfPart, tag="response.reasoning_text.done", kw_only=True, frozen=True):
    text: str


class ArgumentsDelta(_Within, tag="response.function_call_arguments.delta", kw_only=True, frozen=True):
    delta: str


class ArgumentsDone(_Within, tag="response.function_call_arguments.done", kw_only=True, frozen=True):
    """name: as newer clients expect."""

    name: str
    arguments: str


class ErrorEvent(ResponseEvent, tag="error", kw_only=True, frozen=True):
    code: str | None
    message: str
    param: str | None


Event = (
    Created
    | InProgress
    | Completed
    | Incomplete
    | Failed
    | ItemAdded
    | ItemDone
    | PartAdded
    | PartDone
    | TextDelta
    | TextDone
    | ReasoningDelta
    | ReasoningDone
    | ArgumentsDelta
    | ArgumentsDone
    | ErrorEvent
)
