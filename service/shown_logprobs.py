"""Token entries as the endpoints show them."""

from __future__ import annotations

from collections.abc import Sequence

from engine.api import TokenLogprobs
from service.schemas.logprobs import (
    ChatLogprobs,
    CompletionLogprobs,
    PromptLogprob,
    PromptLogprobs,
    TokenLogprob,
    TopLogprob,
)
from service.token_entries import TokenEntry, bounded
from service.tokenizer import Tokenizer


def chat_logprobs(entries: Sequence[TokenEntry], num_top: int) -> ChatLogprobs:
    return ChatLogprobs(content=token_logprobs(entries, num_top))


def token_logprobs(entries: Sequence[TokenEntry], num_top: int) -> list[TokenLogprob]:
    return [
        TokenLogprob(
            token=entry.token.decode(errors="replace"),
            logprob=entry.logprob or 0.0,
            bytes=list(entry.token),
            top_logprobs=[
                TopLogprob(token=token.decode(errors="replace"), logprob=logprob, bytes=list(token))
                for token, logprob in entry.top[:num_top]
            ],
        )
        for entry in entries
    ]


def completion_logprobs(entries: Sequence[TokenEntry], num_top: int) -> CompletionLogprobs:
    return CompletionLogprobs(
        tokens=[_spelled(entry.token) for entry in entries],
        token_logprobs=[entry.logprob for entry in entries],
        top_logprobs=[_top(entry, num_top) for entry in entries] if num_top else None,
        text_offset=[entry.offset for entry in entries],
    )


def prompt_logprobs(
    token_ids: Sequence[int], told: Sequence[TokenLogprobs | None], num_top: int, tokenizer: Tokenizer
) -> PromptLogprobs:
    """told: of each token but the first; fewer where the prompt was not computed to its end."""
    known = [None, *told, *[None] * len(token_ids)][: len(token_ids)]
    return [None if entry is None else _by_token_id(entry, num_top, tokenizer) for entry in known]


def _by_token_id(entry: TokenLogprobs, num_top: int, tokenizer: Tokenizer) -> dict[str, PromptLogprob]:
    ranks = {token_id: rank for rank, (token_id, _) in enumerate(entry.top, start=1)}
    return {
        str(token_id): PromptLogprob(
            logprob=bounded(logprob),
            rank=ranks.get(token_id),
            decoded_token=tokenizer.token_bytes(token_id).decode(errors="replace"),
        )
        for token_id, logprob in (*entry.top[:num_top], (entry.token_id, entry.logprob))
    }


def _top(entry: TokenEntry, num_top: int) -> dict[str, float] | None:
    """Of two tokens with one spelling the likelier one counts."""
    if entry.logprob is None:
        return None
    top: dict[str, float] = {}
    for token, logprob in (*entry.top[:num_top], (entry.token, entry.logprob)):
        top.setdefault(_spelled(token), logprob)
    return top


def _spelled(token: bytes) -> str:
    """Exact, so that tokens that are parts of characters stay apart."""
    try:
        return token.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token)
