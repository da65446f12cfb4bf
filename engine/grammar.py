"""Constraints on a choice's text: compiled by llguidance off the event loop, then one matcher for each choice.

Nothing that a client sends may end the process or hold up the engine's thread for long. llguidance bounds its own work;
where its limits do not reach, sources are refused before it sees them. A matcher that meets a limit later fails its own
choice only.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from numpy.typing import NDArray

from engine.api import (
    Constraint,
    InvalidConstraint,
    JsonBlocks,
    Lark,
    OnlyTokens,
    TriggeredBlocks,
    WithoutWords,
)
from engine.grammar_source import GrammarConstraint, grammar_source
from engine.matchers import (
    MAX_WORDS_BYTES,
    Matcher,
    TokenBytes,
    TokenSetMatcher,
    WordAutomaton,
    WordMatcher,
    has,
    only_one,
)

logger = logging.getLogger("chorus.engine")

# Fuel is llguidance's measure of work. What it does not measure grows faster than the size of an automaton's
# expression, which the initial fuel bounds too: in a grammar a few rules can multiply it.
_LIMITS = LLParserLimits(
    initial_lexer_fuel=500_000,
    step_lexer_fuel=200_000,
    step_max_items=50_000,
    max_items_in_row=5_000,
    max_lexer_states=50_000,
    max_grammar_size=200_000,
    verbose_errors=False,
)
_LARK_LIMITS = LLParserLimits(
    initial_lexer_fuel=6_000,
    step_lexer_fuel=200_000,
    step_max_items=50_000,
    max_items_in_row=5_000,
    max_lexer_states=50_000,
    max_grammar_size=100_000,
    verbose_errors=False,
)


class GrammarMatcher:
    """Where one choice stands in its grammar."""

    is_open = False

    def __init__(self, matcher: LLMatcher, eos_mask: NDArray[np.uint32]) -> None:
        self._matcher = matcher
        self._eos_mask = eos_mask
        self._allowed: NDArray[np.uint32] | None = None
        self.error: str | None = None

    def fork(self) -> GrammarMatcher:
        return GrammarMatcher(self._matcher.deep_copy(), self._eos_mask)

    def allowed(self) -> NDArray[np.uint32]:
        """The tokens that may come next, as bit t % 32 of word t // 32; it stays as it is until `accept`.

        End of sequence is among them where the text is complete, and alone where nothing may follow. None is when the
        grammar has come to a dead end or a limit: see `error`.
        """
        if self._allowed is None:
            self._allowed = self._compute()
        return self._allowed

    def forced(self) -> int | None:
        return only_one(self.allowed())

    def accept(self, token_id: int) -> bool:
        """Go on by a token; False for one that is not allowed."""
        if not has(self.allowed(), token_id):
            return False
        self._allowed = None
        return self._matcher.consume_token(token_id)

    def probe(self) -> str | None:
        """Go one token on, and say which limit is met there: too large a grammar may show after `{`, not before."""
        words = self.allowed()
        word = int(words.argmax())
        self.accept(word * 32 + int(words[word]).bit_length() - 1)
        self.allowed()
        return _one_line(self._matcher.get_error()) or None

    def _compute(self) -> NDArray[np.uint32]:
        mask = np.zeros_like(self._eos_mask)
        if not self._matcher.is_error():
            self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        if self._matcher.is_error():  # its mask would say end of sequence
            mask[:] = 0
        elif not self._matcher.is_accepting():  # a grammar may name the end of sequence as a token like any other
            mask &= ~self._eos_mask
        if not mask.any():
            self.error = _one_line(self._matcher.get_error()) or "no token of this model can go on from here"
        return mask


class GrammarCompiler:
    """Turns constraints into matchers for one model's tokens, in any thread."""

    def __init__(self, tokenizer: LLTokenizer, eos_token_ids: Iterable[int]) -> None:
        self._tokenizer = tokenizer
        self._eos_mask = np.zeros(-(-tokenizer.vocab_size // 32), np.uint32)
        for token_id in eos_token_ids:
            self._eos_mask[token_id >> 5] |= np.uint32(1 << (token_id & 31))

    def compile_all(self, constraints: Iterable[Constraint]) -> dict[Constraint, Matcher]:
        return {constraint: self.compile(constraint) for constraint in constraints}

    def compile(self, constraint: Constraint) -> Matcher:
        """A matcher at the start, to be forked for each choice. Raises InvalidConstraint."""
        match constraint:
            case OnlyTokens(token_ids=token_ids):
                return TokenSetMatcher(token_ids, self._tokenizer.vocab_size)
            case WithoutWords():
                return self._without_words(constraint)
        return self._compile_grammar(constraint)

    def _without_words(self, constraint: WithoutWords) -> WordMatcher:
        words = [word.encode() for word in constraint.words]
        if not all(words) or sum(map(len, words)) > MAX_WORDS_BYTES:
            message = f"words are not empty and have at most {MAX_WORDS_BYTES} bytes together"
            raise InvalidConstraint(message, constraint.param)
        return WordMatcher(WordAutomaton(words, self._token_bytes))

    @cached_property
    def _token_bytes(self) -> TokenBytes:
        tokenizer = self._tokenizer
        return TokenBytes(
            [
                b"" if tokenizer.is_special_token(token_id) else tokenizer.decode_bytes([token_id])
                for token_id in range(tokenizer.vocab_size)
            ]
        )

    def special_token(self, spelling: str) -> int | None:
        """The id of what the tokenizer spells so and takes as one token beside all text."""
        token_ids = self._tokenizer.tokenize_str(spelling, parse_special=True)
        return token_ids[0] if len(token_ids) == 1 and self._tokenizer.is_special_token(token_ids[0]) else None

    def _compile_grammar(self, constraint: GrammarConstraint) -> GrammarMatcher:
        param = constraint.param
        try:
            grammar = grammar_source(constraint, self.special_token)
        except (ValueError, RecursionError) as error:
            raise InvalidConstraint(_reworded(_one_line(str(error))), getattr(error, "param", param)) from error
        limits = _LARK_LIMITS if isinstance(constraint, Lark) else _LIMITS
        matcher = GrammarMatcher(LLMatcher(self._tokenizer, grammar, log_level=0, limits=limits), self._eos_mask)
        if not matcher.allowed().any():
            if isinstance(constraint, JsonBlocks | TriggeredBlocks):
                for block in constraint.blocks:
                    self._compile_grammar(block.value)  # to blame the field of the block that does not compile
            raise InvalidConstraint(_reworded(matcher.error or ""), param)
        if (limit := matcher.fork().probe()) is not None:
            raise InvalidConstraint(_reworded(limit), param)
        return matcher


def load_compiler(path: str | None, vocab_size: int, eos_token_ids: frozenset[int]) -> GrammarCompiler | None:
    """The compiler for the model in folder `path`, or None, with a line in the log, when its tokenizer does not serve.

    vocab_size: number of logits.
    """
    if path is None or not eos_token_ids:
        return None
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(Path(path, "tokenizer.json")))
        tokenizer.no_padding()
        tokenizer.no_truncation()
        for_grammars = LLTokenizer(tokenizer.to_str(), n_vocab=vocab_size, eos_token=sorted(eos_token_ids))
    except Exception as error:  # `tokenizers` raises nothing finer
        logger.warning("structured output is not available: %s", _one_line(str(error)))
        return None
    return GrammarCompiler(for_grammars, eos_token_ids)


def _reworded(error: str) -> str:
    """llguidance's message without the source that it quotes and the options that clients do not have."""
    if "oneOf constraints" in error:
        return "oneOf is supported where its options provably exclude each other; anyOf may serve instead"
    if error.startswith("recursion limit exceeded"):
        return "it is nested too deeply"
    if error.startswith("NoExtension"):
        return "no text satisfies it"
    if "Current row has" in error:
        return "it has too many alternatives, such as optional properties, at one place"
    return _QUOTED_SOURCE.split(error, 1)[0]


def _one_line(message: str) -> str:
    return " ".join(message.replace("<non-verbose/>", "").split())[:300]


_QUOTED_SOURCE = re.compile(r" \d+ \| |(?<=Regex is empty): ")
