"""POST /v1/chat/completions: request, answer and stream chunk."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from service.schemas.common import ErrorDetail, FinishReason, JsonValue, SamplingFields, StopReason, Usage
from service.schemas.fan_out import ChoiceDetails, FanOutResult


class TextPart(Struct, tag_field="type", tag="text", kw_only=True, frozen=True, forbid_unknown_fields=True):
    text: str
    prompt_cache_breakpoint: JsonValue = None


Content = str | list[TextPart]


class _Message(Struct, tag_field="role", kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Told apart by `role`."""


class SystemMessage(_Message, tag="system", frozen=True):
    content: Content
    name: str | None = None


class DeveloperMessage(_Message, tag="developer", frozen=True):
    """Rendered as a system message."""

    content: Content
    name: str | None = None


class UserMessage(_Message, tag="user", frozen=True):
    content: Content
    name: str | None = None


class AssistantMessage(_Message, tag="assistant", frozen=True):
    """Carries every field of an answer, so that a client can send it back unchanged."""

    content: Content | None = None
    name: str | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    annotations: list[JsonValue] | None = None
    audio: JsonValue = None
    tool_calls: JsonValue = None
    function_call: JsonValue = None


class ToolMessage(_Message, tag="tool", frozen=True):
    """Known so that it can be refused by name."""

    content: JsonValue = None
    tool_call_id: JsonValue = None


class FunctionMessage(_Message, tag="function", frozen=True):
    """Known so that it can be refused by name."""

    content: JsonValue = None
    name: JsonValue = None


Message = SystemMessage | DeveloperMessage | UserMessage | AssistantMessage | ToolMessage | FunctionMessage


class ChatCompletionRequest(SamplingFields, kw_only=True, frozen=True, forbid_unknown_fields=True):
    messages: list[Message]
    max_completion_tokens: Annotated[int, Meta(ge=1)] | None = None

    metadata: dict[str, str] | None = None
    parallel_tool_calls: bool | None = None
    prediction: JsonValue = None
    prompt_cache_key: str | None = None
    prompt_cache_options: JsonValue = None
    prompt_cache_retention: str | None = None
    safety_identifier: str | None = None
    store: bool | None = None

    audio: JsonValue = None
    function_call: JsonValue = None
    functions: JsonValue = None
    logprobs: bool | None = None
    modalities: JsonValue = None
    moderation: JsonValue = None
    reasoning_effort: JsonValue = None
    response_format: JsonValue = None
    service_tier: JsonValue = None
    tool_choice: JsonValue = None
    tools: JsonValue = None
    top_logprobs: int | None = None
    verbosity: JsonValue = None
    web_search_options: JsonValue = None


class ChatMessage(Struct, kw_only=True, frozen=True):
    role: Literal["assistant"] = "assistant"
    content: str | None = None
    refusal: str | None = None
    reasoning_content: str | UnsetType = UNSET


class ChatChoice(Struct, kw_only=True, frozen=True):
    index: int
    message: ChatMessage
    finish_reason: FinishReason
    logprobs: None = None
    stop_reason: StopReason = UNSET
    end_reason: str | UnsetType = UNSET
    error: ErrorDetail | UnsetType = UNSET
    details: ChoiceDetails | UnsetType = UNSET


class ChatCompletion(Struct, kw_only=True, frozen=True):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    fan_out: FanOutResult | UnsetType = UNSET


class ChatDelta(Struct, kw_only=True, frozen=True):
    """role: in a choice's first chunk only."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET


class ChatChunkChoice(Struct, kw_only=True, frozen=True):
    index: int
    delta: ChatDelta
    finish_reason: FinishReason | None = None
    logprobs: None = None
    stop_reason: StopReason = UNSET
    end_reason: str | UnsetType = UNSET
    error: ErrorDetail | UnsetType = UNSET
    details: ChoiceDetails | UnsetType = UNSET


class ChatCompletionChunk(Struct, kw_only=True, frozen=True):
    """usage: absent unless asked for; then null on every chunk but the last, whose choices are []. fan_out: on the
    very last chunk only.
    """

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    fan_out: FanOutResult | UnsetType = UNSET
