"""What a choice's text must be, as specifications: no engine's own form. `engine.api` has all of it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class JsonObject:
    """Any JSON object. param, here and below: the field of the client that asks for it, named in refusals."""

    param: str


@dataclass(frozen=True, slots=True)
class JsonSchema:
    """JSON text that a schema (itself JSON text) accepts, with at most one space wherever whitespace may stand."""

    schema: str
    param: str


@dataclass(frozen=True, slots=True)
class Regex:
    """Text that the pattern matches as a whole, in the syntax of Rust's `regex`; no lookaround."""

    pattern: str
    param: str


@dataclass(frozen=True, slots=True)
class Lark:
    """Text of llguidance's dialect of Lark grammars."""

    grammar: str
    param: str


@dataclass(frozen=True, slots=True)
class Choice:
    """One of the options, exactly."""

    options: tuple[str, ...]
    param: str


@dataclass(frozen=True, slots=True)
class JsonBlock:
    """Fixed text, JSON text that the schema accepts, fixed text: a tool call, say."""

    before: str
    value: JsonSchema
    after: str


@dataclass(frozen=True, slots=True)
class JsonBlocks:
    """`start`, then one to max_blocks (None: any number) of the blocks in any order with `separator` between, `end`."""

    blocks: tuple[JsonBlock, ...]
    param: str
    start: str = ""
    separator: str = ""
    end: str = ""
    max_blocks: int | None = None


@dataclass(frozen=True, slots=True)
class TriggeredBlocks:
    """Free text; wherever it comes to the trigger one of the blocks follows, and free text again.

    max_blocks: how often it may, None for any number of times. marks: special tokens that free text may have, by their
    spellings; it has none beside them.
    """

    blocks: tuple[JsonBlock, ...]
    trigger: str
    param: str
    marks: tuple[str, ...] = ()
    max_blocks: int | None = None


@dataclass(frozen=True, slots=True)
class OnlyTokens:
    """Text of these tokens alone; the end of sequence is none of them unless it is named."""

    token_ids: tuple[int, ...]
    param: str


@dataclass(frozen=True, slots=True)
class WithoutWords:
    """Text that none of the words occurs in, however it is cut into tokens."""

    words: tuple[str, ...]
    param: str


OpenConstraint = OnlyTokens | WithoutWords
"""Of a text that is never complete: stop tokens, ignore_eos and min_tokens mean what they always do."""

Constraint = JsonObject | JsonSchema | Regex | Lark | Choice | JsonBlocks | TriggeredBlocks | OpenConstraint
"""What a choice's text must be, as a specification: entering `submit` compiles it or raises InvalidConstraint."""
