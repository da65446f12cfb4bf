"""POST /v1/chat/completions: request, answer and stream chunk."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from service.schemas.common import ErrorDetail, FinishReason, JsonValue, SamplingFields, StopReason, Usage
from service.schemas.fan_out import ChoiceDetails, FanOutResult
from service.schemas.logprobs import ChatLogprobs, PromptLogprobs
from service.schemas.structured import ResponseFormat
from service.schemas.tools import CalledFunction, PastCall, ToolChoice, Tools


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
    tool_calls: list[PastCall] | None = None
    function_call: CalledFunction | None = None
    parsed: JsonValue = None


class ToolMessage(_Message, tag="tool", frozen=True):
    """What a call gave."""

    content: Content
    tool_call_id: str
    name: str | None = None


class FunctionMessage(_Message, tag="function", frozen=True):
    """The older form of a tool message."""

    name: str
    content: str | None = None


Message = SystemMessage | DeveloperMessage | UserMessage | AssistantMessage | ToolMessage | FunctionMessage


MAX_TEMPLATE = 65536


class ChatTemplateKwargs(Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """The only variables that a client may set in a template; others could turn it into something else."""

    enable_thinking: bool | None = None
    thinking: bool | None = None


class ChatCompletionRequest(SamplingFields, kw_only=True, frozen=True, forbid_unknown_fields=True):
    messages: list[Message]
    max_completion_tokens: Annotated[int, Meta(ge=1)] | None = None

    chat_template: Annotated[str, Meta(min_length=1, max_length=MAX_TEMPLATE)] | None = None
    chat_template_kwargs: ChatTemplateKwargs | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

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
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    response_format: ResponseFormat | None = None
    service_tier: JsonValue = None
    tool_choice: ToolChoice | None = None
    tools: Tools | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    verbosity: JsonValue = None
    web_search_options: JsonValue = None


class FunctionCall(Struct, kw_only=True, frozen=True):
    """arguments: JSON text, an object; the beginning of one where the answer ends inside it."""

    name: str
    arguments: str


class ToolCall(Struct, kw_only=True, frozen=True):
    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class ChatMessage(Struct, kw_only=True, frozen=True):
    """content: null where there are tools and no text."""

    role: Literal["assistant"] = "assistant"
    content: str | None = None
    refusal: str | None = None
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChoice(Struct, kw_only=True, frozen=True):
    index: int
    message: ChatMessage
    finish_reason: FinishReason
    logprobs: ChatLogprobs | None = None
    stop_reason: StopReason = UNSET
    end_reason: str | UnsetType = UNSET
    error: ErrorDetail | UnsetType = UNSET
    details: ChoiceDetails | UnsetType = UNSET
    kv_transfer_params: dict[str, JsonValue] | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(Struct, kw_only=True, frozen=True):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    fan_out: FanOutResult | UnsetType = UNSET
    kv_transfer_params: dict[str, JsonValue] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class FunctionDelta(Struct, kw_only=True, frozen=True):
    name: str | UnsetType = UNSET
    arguments: str


class ToolCallDelta(Struct, kw_only=True, frozen=True):
    """id, type and name: with a call's first delta only. index: 0, 1, ... over the calls of a choice."""

    index: int
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET
    function: FunctionDelta


class ChatDelta(Struct, kw_only=True, frozen=True):
    """role: in a choice's first chunk only."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType | None = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class ChatChunkChoice(Struct, kw_only=True, frozen=True):
    index: int
    delta: ChatDelta
    finish_reason: FinishReason | None = None
    logprobs: ChatLogprobs | None = None
    stop_reason: StopReason = UNSET
    end_reason: str | UnsetType = UNSET
    error: ErrorDetail | UnsetType = UNSET
    details: ChoiceDetails | UnsetType = UNSET
    kv_transfer_params: dict[str, JsonValue] | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET


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
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
