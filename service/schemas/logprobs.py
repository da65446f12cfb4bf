"""Log probabilities as chat and completions show them. All numbers are finite and at most 0."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

Byte = Annotated[int, Meta(ge=0, le=255)]


class TopLogprob(Struct, kw_only=True, frozen=True):
    """token: the bytes as text, U+FFFD where they are none. bytes: exactly the token's."""

    token: str
    logprob: float
    bytes: list[Byte]


class TokenLogprob(Struct, kw_only=True, frozen=True):
    """top_logprobs: the likeliest tokens in this one's place, best first."""

    token: str
    logprob: float
    bytes: list[Byte]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct, kw_only=True, frozen=True):
    """content: one for each token of the choice, those of reasoning, tool calls, a stop string or the end included."""

    content: list[TokenLogprob]
    refusal: None = None


class CompletionLogprobs(Struct, kw_only=True, frozen=True):
    """Lists of equal length, one element for each token, those of a stop string or the end included.

    tokens: text, or `bytes:\\xe2\\x80` for a token that is no whole characters. top_logprobs: the likeliest tokens and
    the drawn one; null with logprobs 0. text_offset: characters before the token. What precedes a prompt's first token
    is nothing: its logprob is null.
    """

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class PromptLogprob(Struct, kw_only=True, frozen=True):
    """rank: 1 for the likeliest token; null below those that were asked for."""

    logprob: float
    rank: int | None
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]
"""As vLLM has them: for each token of the prompt its own and the likeliest in its place, by token id; null for the
first, which nothing precedes.
"""
