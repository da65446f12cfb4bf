"""Matchers without a grammar: sets of tokens, and words that may not occur."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.api import InvalidConstraint, OnlyTokens, WithoutWords
from engine.matchers import TokenBytes, WordAutomaton, WordMatcher, has
from tests.engine.constrained import EOS, VOCAB_SIZE, compiler, token_texts

PIECES = st.lists(st.sampled_from([b"", b"a", b"b", b"ab", b"ba", b"aab", b"bbb", b"abcab", b"c"]), min_size=1)
WORDS = st.lists(st.text("abc", min_size=1, max_size=5), min_size=1, max_size=4)


@given(tokens=PIECES, words=WORDS, seed=st.integers(0, 9))
def test_a_token_is_allowed_exactly_where_no_word_comes_of_it(tokens: list[bytes], words: list[str], seed: int) -> None:
    banned = [word.encode() for word in words]
    matcher = WordMatcher(WordAutomaton(banned, TokenBytes(tokens)))
    text, rng = b"", random.Random(seed)
    for _ in range(12):
        fits = [not any(word in text + token for word in banned) for token in tokens]
        assert [has(matcher.allowed(), number) for number in range(len(tokens))] == fits
        left = [number for number, fit in enumerate(fits) if fit]
        if not left:
            break
        refused = [number for number, fit in enumerate(fits) if not fit]
        assert not any(matcher.fork().accept(number) for number in refused)
        chosen = rng.choice(left)
        twin = matcher.fork()
        assert matcher.accept(chosen) and twin.accept(chosen)
        text += tokens[chosen]


def test_words_of_the_models_own_tokens() -> None:
    matcher = compiler().compile(WithoutWords(("ab", "\u00e9"), "bad_words"))
    a, b = (token_texts().index(text) for text in (b"a", b"b"))
    assert has(matcher.allowed(), b)
    assert matcher.accept(a)
    assert not has(matcher.allowed(), b) and has(matcher.allowed(), a) and has(matcher.allowed(), EOS)
    assert matcher.accept(EOS), "what is no text is allowed and changes nothing"
    assert not has(matcher.allowed(), b)
    num_allowed = int(np.unpackbits(matcher.allowed().view(np.uint8)).sum())
    assert num_allowed == VOCAB_SIZE - 1, "no token beyond the vocabulary"


@pytest.mark.parametrize("words", [("",), ("x" * 5000,)])
def test_words_that_are_none_or_too_many(words: tuple[str, ...]) -> None:
    with pytest.raises(InvalidConstraint) as caught:
        compiler().compile(WithoutWords(words, "bad_words"))
    assert caught.value.param == "bad_words"


def test_a_set_of_tokens() -> None:
    matcher = compiler().compile(OnlyTokens((5, VOCAB_SIZE - 1), "allowed_token_ids"))
    for _ in range(2):
        assert [t for t in range(VOCAB_SIZE) if has(matcher.allowed(), t)] == [5, VOCAB_SIZE - 1]
        assert matcher.accept(5) and not matcher.accept(6)
