"""POST /v1/completions: request and answer; a stream's chunk has the answer's shape."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from service.schemas.common import ErrorDetail, FinishReason, JsonValue, SamplingFields, StopReason, Usage
from service.schemas.fan_out import ChoiceDetails, FanOutResult
from service.schemas.logprobs import CompletionLogprobs, PromptLogprobs


class CompletionRequest(SamplingFields, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """prompt: text, a list of texts, token ids, or a list of token-id lists; mixtures are refused. max_tokens: 0 with
    echo only.
    """

    prompt: str | list[str | int | list[int]]

    max_tokens: Annotated[int, Meta(ge=0)] | None = None
    best_of: Annotated[int, Meta(ge=1)] | None = None
    echo: bool | None = None
    logprobs: Annotated[int, Meta(ge=0, le=5)] | None = None
    suffix: str | None = None


class CompletionChoice(Struct, kw_only=True, frozen=True):
    """finish_reason: null on the chunks of a stream until the choice has ended."""

    index: int
    text: str
    finish_reason: FinishReason | None = None
    logprobs: CompletionLogprobs | None = None
    stop_reason: StopReason = UNSET
    end_reason: str | UnsetType = UNSET
    error: ErrorDetail | UnsetType = UNSET
    details: ChoiceDetails | UnsetType = UNSET
    kv_transfer_params: dict[str, JsonValue] | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class Completion(Struct, kw_only=True, frozen=True):
    """usage: on chunks as in a chat's, always present in a body that is not streamed."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET
    fan_out: FanOutResult | UnsetType = UNSET
    kv_transfer_params: dict[str, JsonValue] | UnsetType = UNSET
