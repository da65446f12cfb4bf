"""Completions between a prompt and a suffix, by models whose tokenizer has tokens for the three places."""

from __future__ import annotations

from service.errors import invalid
from service.tokenizer import Tokenizer

_MARKS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # noqa: RUF001 as DeepSeek has them
)
"""Before the prompt, before the suffix, and where the answer begins."""


def infilled(token_ids: list[int], suffix: str, tokenizer: Tokenizer) -> list[int]:
    """The prompt whose answer stands between these tokens and the suffix. Raises ApiError (400)."""
    marks = next((marks for marks in _MARKS if tokenizer.special_spellings.issuperset(marks)), None)
    if marks is None:
        message = "Unsupported parameter: `suffix`: this model's tokenizer has no fill-in-the-middle tokens."
        raise invalid(message, "suffix", "unsupported_parameter")
    before, between, here = (tokenizer.encode(mark, add_special_tokens=False) for mark in marks)
    return [*before, *token_ids, *between, *tokenizer.encode(suffix, add_special_tokens=False), *here]
