"""POST /v1/responses: request and answer. What their inputs and outputs consist of: `response_items`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from service.schemas.chat import MAX_TEMPLATE, ChatTemplateKwargs
from service.schemas.common import JsonValue, SamplingFields, StopReason
from service.schemas.response_items import OutputItem
from service.schemas.structured import JsonObjectFormat, JsonObjectValue, TextFormat
from service.schemas.tools import MAX_TOOLS, FunctionName

Include = Literal["message.output_text.logprobs", "reasoning.encrypted_content"]
Truncation = Literal["auto", "disabled"]
Summary = Literal["auto", "concise", "detailed"]
Metadata = Annotated[
    dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]], Meta(max_length=16)
]


class _Tagged(Struct, tag_field="type", kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Told apart by `type`."""


class ResponseTool(_Tagged, tag="function", rename={"async_": "async"}, kw_only=True, frozen=True):
    """parameters: a JSON schema of an object; none takes no arguments."""

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    allowed_callers: JsonValue = None
    async_: JsonValue = None
    defer_loading: JsonValue = None
    output_schema: JsonValue = None


class NamedFunction(_Tagged, tag="function", kw_only=True, frozen=True):
    name: FunctionName


class AllowedFunctions(_Tagged, tag="allowed_tools", kw_only=True, frozen=True):
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedFunction], Meta(min_length=1, max_length=MAX_TOOLS)]


ResponseToolChoice = Literal["none", "auto", "required"] | NamedFunction | AllowedFunctions


class SchemaFormat(_Tagged, tag="json_schema", kw_only=True, frozen=True):
    """strict: the schema is enforced whatever it says."""

    name: Annotated[str, Meta(pattern="^[a-zA-Z0-9_-]{1,64}$")]
    schema: JsonObjectValue
    description: str | None = None
    strict: bool | None = None


class TextOptions(Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    format: TextFormat | JsonObjectFormat | SchemaFormat | None = None
    verbosity: JsonValue = None


class ReasoningOptions(Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: Summary | None = None
    generate_summary: Summary | None = None
    context: JsonValue = None
    mode: JsonValue = None


class ResponseRequest(SamplingFields, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """input: text, or items as `response_items.INPUT_ITEMS` has them."""

    input: str | list[dict[str, Any]] | None = None
    instructions: str | None = None
    max_output_tokens: Annotated[int, Meta(ge=1)] | None = None
    previous_response_id: Annotated[str, Meta(min_length=1, max_length=128)] | None = None
    store: bool | None = None
    truncation: Truncation | None = None
    include: list[Include] | None = None
    metadata: Metadata | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningOptions | None = None
    text: TextOptions | None = None
    tool_choice: ResponseToolChoice | None = None
    tools: Annotated[list[ResponseTool], Meta(max_length=MAX_TOOLS)] | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    chat_template: Annotated[str, Meta(min_length=1, max_length=MAX_TEMPLATE)] | None = None
    chat_template_kwargs: ChatTemplateKwargs | None = None

    max_tool_calls: Annotated[int, Meta(ge=1)] | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: JsonValue = None
    prompt_cache_retention: str | None = None
    safety_identifier: str | None = None

    access_programs: JsonValue = None
    background: JsonValue = None
    background_options: JsonValue = None
    context_management: JsonValue = None
    conversation: JsonValue = None
    image: JsonValue = None
    moderation: JsonValue = None
    prompt: JsonValue = None
    service_tier: JsonValue = None


Status = Literal["in_progress", "completed", "incomplete", "cancelled", "failed"]


class ToolShown(Struct, tag_field="type", tag="function", kw_only=True, frozen=True):
    name: str
    description: str | None
    parameters: dict[str, Any] | None
    strict: bool


class TextShown(Struct, kw_only=True, frozen=True):
    format: TextFormat | JsonObjectFormat | SchemaFormat
    verbosity: Literal["medium"] = "medium"


class ReasoningShown(Struct, kw_only=True, frozen=True):
    effort: str | None = None
    summary: str | None = None


class InputTokensDetails(Struct, kw_only=True, frozen=True):
    """cached_tokens: found in the cache as an earlier request left it. cache_write_tokens: such as cost more; none."""

    cached_tokens: int
    cache_write_tokens: Literal[0] = 0


class OutputTokensDetails(Struct, kw_only=True, frozen=True):
    reasoning_tokens: int


class ResponseUsage(Struct, kw_only=True, frozen=True):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseFailure(Struct, kw_only=True, frozen=True):
    code: str
    message: str


class IncompleteDetails(Struct, kw_only=True, frozen=True):
    """OpenAI's only word for any answer that was cut short; `end_reason` says more."""

    reason: Literal["max_output_tokens"] = "max_output_tokens"


class Response(Struct, kw_only=True, frozen=True):
    """Times: unix seconds. store: whether it is, or will be. end_reason, stop_reason: our extensions, once it has ended
    without failing. usage: null until then.
    """

    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: Status
    background: Literal[False] = False
    completed_at: int | None = None
    error: ResponseFailure | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: Metadata
    model: str
    output: list[OutputItem] = []
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: ReasoningShown
    safety_identifier: str | None
    service_tier: Literal["default"] = "default"
    store: bool
    temperature: float
    text: TextShown
    tool_choice: ResponseToolChoice
    tools: list[ToolShown]
    top_logprobs: int
    top_p: float
    truncation: Truncation
    usage: ResponseUsage | None = None
    user: str | None
    end_reason: str | UnsetType = UNSET
    stop_reason: StopReason = UNSET
