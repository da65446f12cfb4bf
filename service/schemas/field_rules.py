"""How it is said what becomes of a field, wherever it stands in a request.

A path names nested fields: `messages[user].content[text].text` is the `text` of a part of type "text" in a message of
role "user". What is said of a field that is refused or ignored holds for all beneath it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum


class Use(StrEnum):
    HONOURED = "honoured"
    NO_OP = "no-op"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class FieldRule:
    """note: for docs and errors. neutral: values of a refused field that ask for nothing and are accepted."""

    use: Use
    note: str
    neutral: tuple[object, ...] = ()


def honoured(note: str) -> FieldRule:
    return FieldRule(Use.HONOURED, note)


def no_op(note: str) -> FieldRule:
    return FieldRule(Use.NO_OP, note)


def refused(note: str, *neutral: object) -> FieldRule:
    return FieldRule(Use.REFUSED, note, neutral)


def rule_for(fields: Mapping[str, FieldRule], path: str) -> FieldRule | None:
    """The rule that holds for a path: its own, or that of a refused or ignored field above it."""
    if path in fields:
        return fields[path]
    while path := path[: max(path.rfind("."), path.rfind("["))] if ("." in path or "[" in path) else "":
        above = fields.get(path)
        if above is not None:
            return above if above.use is not Use.HONOURED else None
    return None
