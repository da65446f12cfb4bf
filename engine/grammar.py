"""Constraints on a choice's text: compiled by llguidance off the event loop, then one matcher for each choice.

Nothing that a client sends may end the process or hold up the engine's thread for long. llguidance bounds its own work;
where its limits do not reach, sources are refused before it sees them. A matcher that meets a limit later fails its own
choice only.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from numpy.typing import NDArray

from engine.api import Choice, Constraint, InvalidConstraint, JsonBlocks, JsonObject, JsonSchema, Lark, Regex
from engine.json_schema import MAX_PATTERN_ATOMS, MAX_PATTERN_CHARS, SchemaError, checked_schema, count_atoms

logger = logging.getLogger("chorus.engine")

MAX_SOURCE_CHARS = 131_072
"""Of one constraint, its schemas together."""

MAX_LARK_CHARS = 8192
MAX_LARK_RULES = 1000
"""Bounds the colons and opening brackets of a grammar, and with them the recursion of its compilation (an 8 MB stack
overflows at about 2,800).
"""

MAX_LARK_ANDS = 8
"""As MAX_MEETING_PATTERNS of JSON schemas."""

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

# One space at most where whitespace may stand. Without \u escapes a key has one spelling, so that none slips past the
# properties that the schema lists.
_JSON_STYLE = {"whitespace_pattern": " ", "json_allowed_escapes": 'nrbtf\\"', "lenient": False, "coerce_one_of": False}


class Matcher:
    """Where one choice stands in its grammar. It belongs to one thread at a time.

    error: why nothing may follow although the text is not complete; None while something may.
    """

    def __init__(self, matcher: LLMatcher, eos_mask: NDArray[np.uint32]) -> None:
        self._matcher = matcher
        self._eos_mask = eos_mask
        self._allowed: NDArray[np.uint32] | None = None
        self.error: str | None = None

    def fork(self) -> Matcher:
        return Matcher(self._matcher.deep_copy(), self._eos_mask)

    def allowed(self) -> NDArray[np.uint32]:
        """The tokens that may come next, as bit t % 32 of word t // 32; it stays as it is until `accept`.

        End of sequence is among them where the text is complete, and alone where nothing may follow. None is when the
        grammar has come to a dead end or a limit: see `error`.
        """
        if self._allowed is None:
            self._allowed = self._compute()
        return self._allowed

    def accept(self, token_id: int) -> bool:
        """Go on by a token; False for one that is not allowed."""
        allowed = self.allowed()
        if not int(allowed[token_id >> 5]) >> (token_id & 31) & 1:
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
        param = constraint.param
        try:
            grammar = _grammar(constraint)
        except (ValueError, RecursionError) as error:
            raise InvalidConstraint(_reworded(_one_line(str(error))), getattr(error, "param", param)) from error
        limits = _LARK_LIMITS if isinstance(constraint, Lark) else _LIMITS
        matcher = Matcher(LLMatcher(self._tokenizer, grammar, log_level=0, limits=limits), self._eos_mask)
        if not matcher.allowed().any():
            if isinstance(constraint, JsonBlocks):
                for block in constraint.blocks:
                    self.compile(block.value)  # to blame the field of the block that does not compile
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


class _SourceError(ValueError):
    def __init__(self, message: str, param: str) -> None:
        super().__init__(message)
        self.param = param


def _grammar(constraint: Constraint) -> str:
    """llguidance's form of a constraint. Raises ValueError, with a `param` where that differs from the constraint's."""
    match constraint:
        case JsonObject():
            return LLMatcher.grammar_from_json_schema(_styled({"type": "object"}))
        case JsonSchema(schema=schema, param=param):
            _check_length(schema)
            return LLMatcher.grammar_from_json_schema(_styled(_checked(schema, param)))
        case Regex(pattern=pattern):
            if len(pattern) > MAX_PATTERN_CHARS or count_atoms(pattern) > MAX_PATTERN_ATOMS:
                raise ValueError(f"a regular expression has at most {MAX_PATTERN_CHARS} characters and, repetitions "
                                 f"written out, {MAX_PATTERN_ATOMS} parts")  # fmt: skip
            return LLMatcher.grammar_from_regex(pattern)
        case Lark(grammar=grammar):
            return LLMatcher.grammar_from_lark(_checked_lark(grammar))
        case Choice(options=options):
            _check_length("".join(options))
            if not options:
                raise ValueError("there is nothing to choose from")
            return LLMatcher.grammar_from_lark(_choice(options))
        case JsonBlocks():
            return LLMatcher.grammar_from_lark(_blocks(constraint))


def _checked_lark(grammar: str) -> str:
    if len(grammar) > MAX_LARK_CHARS or sum(map(grammar.count, ":([")) > MAX_LARK_RULES:
        raise ValueError(f"a grammar has at most {MAX_LARK_CHARS} characters, {MAX_LARK_RULES} colons and brackets")
    if grammar.count("&") > MAX_LARK_ANDS:
        raise ValueError(f"a grammar has at most {MAX_LARK_ANDS} intersections")
    first, *pieces = grammar.split("%json")
    checked = [first]
    for piece in pieces:
        stripped = piece.lstrip()
        _, end = json.JSONDecoder().raw_decode(stripped)
        checked.append(f"%json {_styled(checked_schema(stripped[:end]))}{stripped[end:]}")
    return "".join(checked)


def _choice(options: tuple[str, ...]) -> str:
    """One terminal, since alternative rules are costly by the thousand; it may not be empty."""
    texts = [json.dumps(option) for option in options if option]
    if not texts:
        return 'start: ""'
    empty = ' | ""' if "" in options else ""
    return f"start: OPTION{empty}\nOPTION: {' | '.join(texts)}"


def _blocks(constraint: JsonBlocks) -> str:
    _check_length("".join(block.value.schema for block in constraint.blocks))
    if not constraint.blocks or constraint.max_blocks == 0:
        raise ValueError("there is nothing to choose from")
    rules = [
        f"b{number}: {json.dumps(block.before)} %json {_styled(_checked(block.value.schema, block.value.param))} "
        f"{json.dumps(block.after)}"
        for number, block in enumerate(constraint.blocks)
    ]
    more = "*" if constraint.max_blocks is None else f"{{0,{constraint.max_blocks - 1}}}"
    again = f" ({json.dumps(constraint.separator)} block){more}" if constraint.max_blocks != 1 else ""
    start = f"start: {json.dumps(constraint.start)} block{again} {json.dumps(constraint.end)}"
    block = "block: " + " | ".join(f"b{number}" for number in range(len(constraint.blocks)))
    return "\n".join([start, block, *rules])


def _styled(schema: dict[str, object]) -> str:
    return json.dumps({"x-guidance": _JSON_STYLE, **schema}, allow_nan=False)


def _checked(schema: str, param: str) -> dict[str, object]:
    try:
        return checked_schema(schema)
    except SchemaError as error:
        raise _SourceError(str(error), param) from error


def _check_length(source: str) -> None:
    if len(source) > MAX_SOURCE_CHARS:
        raise ValueError(f"it has {len(source)} characters, at most {MAX_SOURCE_CHARS} are taken")


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
