"""A constraint as a grammar of llguidance's, with what llguidance sets no limit to kept within bounds."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import llguidance
from llguidance import LLMatcher

from engine.api import (
    Choice,
    JsonBlocks,
    JsonObject,
    JsonSchema,
    Lark,
    Regex,
    TriggeredBlocks,
)
from engine.json_schema import MAX_PATTERN_ATOMS, MAX_PATTERN_CHARS, SchemaError, checked_schema, count_atoms

MAX_SOURCE_CHARS = 131_072
"""Of one constraint, its schemas together."""

MAX_LARK_CHARS = 8192
MAX_LARK_RULES = 1000
"""Bounds the colons and opening brackets of a grammar, and with them the recursion of its compilation (an 8 MB stack
overflows at about 2,800).
"""

MAX_LARK_ANDS = 8
"""As MAX_MEETING_PATTERNS of JSON schemas."""

GrammarConstraint = JsonObject | JsonSchema | Regex | Lark | Choice | JsonBlocks | TriggeredBlocks

# One space at most where whitespace may stand. Without \u escapes a key has one spelling, so that none slips past the
# properties that the schema lists. Before 1.9 llguidance repeats a pattern of whitespace without bound (vLLM asks for
# such a release): there every space is fixed.
_SPACES: dict[str, object] = {"whitespace_pattern": " "}
if tuple(map(int, llguidance.__version__.split(".")[:2])) < (1, 9):
    _SPACES = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_JSON_STYLE = {**_SPACES, "json_allowed_escapes": 'nrbtf\\"', "lenient": False, "coerce_one_of": False}


class SourceError(ValueError):
    def __init__(self, message: str, param: str) -> None:
        super().__init__(message)
        self.param = param


@dataclass(frozen=True, slots=True)
class Source:
    """What a constraint says, in one of the languages that grammars are written in."""

    language: Literal["json", "regex", "lark"]
    text: str


def source_of(constraint: GrammarConstraint, special_token: Callable[[str], int | None]) -> Source:
    """Raises ValueError, with a `param` where that differs from the constraint's."""
    match constraint:
        case JsonObject():
            return Source("json", _styled({"type": "object"}))
        case JsonSchema(schema=schema, param=param):
            _check_length(schema)
            return Source("json", _styled(_checked(schema, param)))
        case Regex(pattern=pattern):
            if len(pattern) > MAX_PATTERN_CHARS or count_atoms(pattern) > MAX_PATTERN_ATOMS:
                raise ValueError(f"a regular expression has at most {MAX_PATTERN_CHARS} characters and, repetitions "
                                 f"written out, {MAX_PATTERN_ATOMS} parts")  # fmt: skip
            return Source("regex", pattern)
        case Lark(grammar=grammar):
            return Source("lark", _checked_lark(grammar))
        case Choice(options=options):
            _check_length("".join(options))
            if not options:
                raise ValueError("there is nothing to choose from")
            return Source("lark", _choice(options))
        case JsonBlocks():
            return Source("lark", _blocks(constraint))
        case TriggeredBlocks():
            return Source("lark", _triggered(constraint, special_token))


def grammar_source(constraint: GrammarConstraint, special_token: Callable[[str], int | None]) -> str:
    """llguidance's form of a constraint. Raises as `source_of`."""
    source = source_of(constraint, special_token)
    match source.language:
        case "json":
            return LLMatcher.grammar_from_json_schema(source.text)
        case "regex":
            return LLMatcher.grammar_from_regex(source.text)
        case "lark":
            return LLMatcher.grammar_from_lark(source.text)


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
    more = "*" if constraint.max_blocks is None else f"{{0,{constraint.max_blocks - 1}}}"
    again = f" ({json.dumps(constraint.separator)} block){more}" if constraint.max_blocks != 1 else ""
    start = f"start: {json.dumps(constraint.start)} block{again} {json.dumps(constraint.end)}"
    return "\n".join([start, *_block_rules(constraint)])


def _triggered(constraint: TriggeredBlocks, special_token: Callable[[str], int | None]) -> str:
    """REST is text without the trigger, and `call` ends where that first comes. Special tokens are no text."""
    times = "*" if constraint.max_blocks is None else f"{{0,{constraint.max_blocks}}}"
    marks = [f"<[{token_id}]>" for mark in constraint.marks if (token_id := special_token(mark)) is not None]
    lead = f"(REST ({' | '.join(marks)}))* " if marks else ""
    trigger = special_token(constraint.trigger)
    if trigger is None:
        pattern = re.escape(constraint.trigger).replace("/", r"\/")
        rules = [f"call[lazy]: /(?s:.*){pattern}/", f"REST: /(?s:.*)/ & ~/(?s:.*{pattern}.*)/"]
    else:
        rules = [f"call: REST <[{trigger}]>", "REST: /(?s:.*)/"]
    return "\n".join([f"start: ({lead}call block){times} {lead}REST", *rules, *_block_rules(constraint)])


def _block_rules(constraint: JsonBlocks | TriggeredBlocks) -> list[str]:
    _check_length("".join(block.value.schema for block in constraint.blocks))
    if not constraint.blocks or constraint.max_blocks == 0:
        raise ValueError("there is nothing to choose from")
    rules = [
        f"b{number}: {json.dumps(block.before)} %json {_styled(_checked(block.value.schema, block.value.param))} "
        f"{json.dumps(block.after)}"
        for number, block in enumerate(constraint.blocks)
    ]
    return ["block: " + " | ".join(f"b{number}" for number in range(len(constraint.blocks))), *rules]


def _styled(schema: dict[str, object]) -> str:
    return json.dumps({"x-guidance": _JSON_STYLE, **schema}, allow_nan=False)


def _checked(schema: str, param: str) -> dict[str, object]:
    try:
        return checked_schema(schema)
    except SchemaError as error:
        raise SourceError(str(error), param) from error


def _check_length(source: str) -> None:
    if len(source) > MAX_SOURCE_CHARS:
        raise ValueError(f"it has {len(source)} characters, at most {MAX_SOURCE_CHARS} are taken")
