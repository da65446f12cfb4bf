"""The `fan_out` extension: how a request's choices are steered while they run, and what the answer says of it."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

MAX_AGREE_VALUE = 256

Count = Annotated[int, Meta(ge=1)]


class AgreeOptions(Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """value: the pointer or the regex; none for a whole text."""

    on: Literal["text", "json_pointer", "regex"]
    value: Annotated[str, Meta(max_length=MAX_AGREE_VALUE)] | None = None
    count: Count


class FanOutOptions(Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """null equals absent."""

    on_error: Literal["fail", "isolate"] | None = None
    stop_after: Count | None = None
    keep_unfinished: bool | None = None
    rank_by: Literal["logprob"] | None = None
    keep: Count | None = None
    agree: AgreeOptions | None = None
    details: bool | None = None


class ChoiceDetails(Struct, kw_only=True, frozen=True):
    """Times in ms since the request arrived: until the engine began with the prompt, until the choice's first token and
    until its end. mean_logprob: of the tokens that count, null without any.
    """

    seed: int
    cached_tokens: int
    queue_ms: float | None
    first_token_ms: float | None
    total_ms: float
    mean_logprob: float | None


class Agreement(Struct, kw_only=True, frozen=True):
    """The answer that most choices of one prompt gave. reached: whether as many as were asked for. indices: of those
    that gave it. answer: as the first of them spelled it, null where no choice gave any.
    """

    answer: Any
    count: int
    reached: bool
    indices: list[int]


class FanOutResult(Struct, kw_only=True, frozen=True):
    """agree: one for a single prompt, else a list with one for each."""

    agree: Agreement | list[Agreement] | UnsetType = UNSET
