"""What the input and the output of a response consist of."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from service.schemas.common import JsonValue
from service.schemas.logprobs import TokenLogprob

ItemStatus = Literal["in_progress", "completed", "incomplete"]

ItemId = Annotated[str, Meta(min_length=1, max_length=128)]


class _Given(Struct, tag_field="type", omit_defaults=True, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Told apart by `type`. null equals absent, and is not listed either."""


class InputText(_Given, tag="input_text", kw_only=True, frozen=True):
    text: str
    prompt_cache_breakpoint: JsonValue = None


class PastText(_Given, tag="output_text", kw_only=True, frozen=True):
    """Carries every field of an answer's part, so that a client can send it back unchanged."""

    text: str
    annotations: list[JsonValue] | None = None
    logprobs: list[JsonValue] | None = None
    parsed: JsonValue = None


class PastRefusal(_Given, tag="refusal", kw_only=True, frozen=True):
    refusal: str


class InputMessage(_Given, tag="message", kw_only=True, frozen=True):
    """type: may be left out."""

    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[InputText | PastText | PastRefusal]
    id: ItemId | None = None
    status: ItemStatus | None = None
    phase: Literal["commentary", "final_answer"] | None = None


class CallItem(
    _Given, tag="function_call", rename={"async_": "async", "dumped_async": "async_"}, kw_only=True, frozen=True
):
    """arguments: JSON text, an object. dumped_async: what openai-python's `model_dump` makes of `async`."""

    call_id: str
    name: str
    arguments: str
    id: ItemId | None = None
    status: ItemStatus | None = None
    parsed_arguments: JsonValue = None
    namespace: str | None = None
    caller: JsonValue = None
    async_: bool | None = None
    dumped_async: bool | None = None


class CallOutput(_Given, tag="function_call_output", kw_only=True, frozen=True):
    """What a call gave."""

    call_id: str
    output: str | list[InputText]
    id: ItemId | None = None
    status: ItemStatus | None = None
    name: str | None = None
    namespace: str | None = None
    caller: JsonValue = None


class SummaryText(_Given, tag="summary_text", kw_only=True, frozen=True):
    text: str


class ReasoningText(_Given, tag="reasoning_text", kw_only=True, frozen=True):
    text: str


class ReasoningItem(_Given, tag="reasoning", kw_only=True, frozen=True):
    summary: list[SummaryText]
    content: list[ReasoningText] | None = None
    id: ItemId | None = None
    status: ItemStatus | None = None
    encrypted_content: str | None = None


class ItemReference(_Given, tag="item_reference", kw_only=True, frozen=True):
    """type: may be left out."""

    id: ItemId


InputItem = InputMessage | CallItem | CallOutput | ReasoningItem | ItemReference

INPUT_ITEMS: dict[str, type[InputItem]] = {
    "message": InputMessage,
    "function_call": CallItem,
    "function_call_output": CallOutput,
    "reasoning": ReasoningItem,
    "item_reference": ItemReference,
}


class _Made(Struct, tag_field="type", kw_only=True, frozen=True):
    """Told apart by `type`."""


class OutputText(_Made, tag="output_text", kw_only=True, frozen=True):
    """logprobs: empty unless asked for; then one for each token of the answer until here, the end included."""

    text: str
    annotations: list[JsonValue] = []
    logprobs: list[TokenLogprob] = []


class OutputMessage(_Made, tag="message", kw_only=True, frozen=True):
    id: str
    status: ItemStatus
    role: Literal["assistant"] = "assistant"
    content: list[OutputText]


class OutputCall(_Made, tag="function_call", kw_only=True, frozen=True):
    """arguments: JSON text, an object; the beginning of one where the answer ends inside it."""

    id: str
    call_id: str
    name: str
    arguments: str
    status: ItemStatus


class OutputReasoning(_Made, tag="reasoning", kw_only=True, frozen=True):
    """The whole reasoning, of which there is no summary."""

    id: str
    summary: list[SummaryText] = []
    content: list[ReasoningText]
    status: ItemStatus


OutputItem = OutputReasoning | OutputMessage | OutputCall
