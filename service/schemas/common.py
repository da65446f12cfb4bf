"""What chat and completions share: sampling fields with their fixed ranges, usage, the error envelope."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from service.schemas.fan_out import FanOutOptions
from service.schemas.structured import StructuredOutputs

FinishReason = Literal["stop", "length", "tool_calls"]

StopReason = int | str | UnsetType | None
"""Our extension on a choice that has ended: the stop string or token id that ended it, null for end of sequence."""


JsonValue = Any
"""A field that is refused or ignored whatever it holds: it must still be well-formed JSON."""


TokenId = Annotated[int, Meta(ge=0)]
BadWord = Annotated[str, Meta(min_length=1)]
StopString = Annotated[str, Meta(min_length=1)]
LogitBias = Annotated[float, Meta(ge=-100, le=100)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Probability = Annotated[float, Meta(ge=0, le=1)]


class StreamOptions(Struct, frozen=True, forbid_unknown_fields=True):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    continuous_usage_stats: bool | None = None


class SamplingFields(Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Fields of both generation endpoints. null equals absent; what a field is used for stands in `schemas.fields`."""

    model: str
    n: Annotated[int, Meta(ge=1)] | None = None
    seed: Annotated[int, Meta(ge=0, le=2**63 - 1)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    min_tokens: Annotated[int, Meta(ge=0)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Probability | None = None
    top_k: Annotated[int, Meta(ge=-1)] | None = None
    min_p: Probability | None = None
    stop: StopString | Annotated[list[StopString], Meta(max_length=16)] | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=256)] | None = None
    ignore_eos: bool | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=10)] | None = None
    logit_bias: dict[str, LogitBias] | None = None
    user: str | None = None
    fan_out: FanOutOptions | None = None
    timeout: Annotated[float, Meta(gt=0)] | None = None
    request_id: Annotated[str, Meta(pattern="^[ -~]{1,256}$")] | None = None
    priority: Annotated[int, Meta(ge=-1000, le=1000)] | None = None
    structured_outputs: StructuredOutputs | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    truncate_prompt_tokens: Annotated[int, Meta(ge=1)] | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=256)] | None = None
    allowed_token_ids: Annotated[list[TokenId], Meta(min_length=1, max_length=2**18)] | None = None
    bad_words: Annotated[list[BadWord], Meta(max_length=1000)] | None = None
    max_streaming_response_tokens: Annotated[int, Meta(ge=1)] | None = None
    prompt_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    kv_transfer_params: dict[str, JsonValue] | None = None


class PromptTokensDetails(Struct, kw_only=True, frozen=True):
    """cached_tokens: found in the cache as an earlier request left it; what sibling choices share is not counted."""

    cached_tokens: int = 0


class CompletionTokensDetails(Struct, kw_only=True, frozen=True):
    """reasoning_tokens: from the one that opens a choice's reasoning to the one that closes it."""

    reasoning_tokens: int = 0


class Usage(Struct, kw_only=True, frozen=True):
    """prompt_tokens counts each prompt once, completion_tokens sums over all choices. completion_tokens_details: where
    the model's reasoning is told apart.
    """

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails = PromptTokensDetails()
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET


class ErrorDetail(Struct, kw_only=True, frozen=True):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorEnvelope(Struct, kw_only=True, frozen=True):
    """The body of every 4xx and 5xx answer, and of the `data:` event of an error after the first byte."""

    error: ErrorDetail
