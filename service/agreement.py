"""What counts as a choice's answer, and when two answers are the same (self-consistency)."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable
from typing import NamedTuple

import msgspec
import re2

from service.errors import invalid
from service.schemas.fan_out import AgreeOptions

MAX_PROGRAM = 500
"""Instructions of a compiled regex: a match is linear in both, so that with MAX_SEARCHED it costs 0.1 s at worst."""

MAX_SEARCHED = 16_384
"""A regex looks at the last so many characters of a text."""

_REGEX_MEMORY = 256 * 1024
_BAD_ESCAPE = re.compile("~(?![01])")


class Answer(NamedTuple):
    """shown: for the client. key: equal for answers that are the same."""

    shown: object
    key: str


Extract = Callable[[str], Answer | None]
"""A choice's whole text to its answer; None where it gives none."""


def extractor(options: AgreeOptions) -> Extract:
    """Raises ApiError (400) naming the field."""
    if options.on == "text":
        if options.value is not None:
            raise invalid("`fan_out.agree.value` says nothing with `on` = `text`.", "fan_out.agree.value")
        return _text_answer
    if options.value is None:
        raise invalid(f"`fan_out.agree` on `{options.on}` needs `value`.", "fan_out.agree.value")
    return (_pointer_extractor if options.on == "json_pointer" else _regex_extractor)(options.value)


def _text_answer(text: str) -> Answer | None:
    """Case, compatibility forms and white space make no difference; a blank text is no answer."""
    key = " ".join(unicodedata.normalize("NFKC", text).casefold().split())
    return Answer(text.strip(), key) if key else None


def _pointer_extractor(pointer: str) -> Extract:
    """RFC 6901. Numbers that are equal, and objects with their keys in another order, are the same answer."""
    if (pointer and not pointer.startswith("/")) or _BAD_ESCAPE.search(pointer):
        message = f"`fan_out.agree.value`: `{pointer}` is no JSON pointer: it is empty, or starts with `/`."
        raise invalid(message, "fan_out.agree.value")
    steps = [step.replace("~1", "/").replace("~0", "~") for step in pointer.split("/")[1:]]

    def extract(text: str) -> Answer | None:
        try:
            found = msgspec.json.decode(text)
            for step in steps:
                found = _step_into(found, step)
            return _json_answer(found)
        except (msgspec.DecodeError, UnicodeEncodeError, RecursionError, LookupError):
            return None

    return extract


def _step_into(value: object, step: str) -> object:
    """Raises LookupError."""
    if isinstance(value, dict):
        return value[step]
    if isinstance(value, list) and re.fullmatch("0|[1-9][0-9]{0,9}", step):
        return value[int(step)]
    raise LookupError(step)


def _json_answer(value: object) -> Answer | None:
    if isinstance(value, str):
        text = _text_answer(value)
        return text and Answer(text.shown, f'"{text.key}')
    return Answer(value, msgspec.json.encode(_canonical(value), order="deterministic").decode())


def _canonical(value: object) -> object:
    if isinstance(value, dict):
        return {key: _canonical(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_canonical(inner) for inner in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _regex_extractor(pattern: str) -> Extract:
    """RE2's syntax and its linear time. The first match counts: its first group, or the whole without groups."""
    options = re2.Options()
    options.max_mem = _REGEX_MEMORY
    options.log_errors = False
    try:
        regex = re2.compile(pattern, options)
    except re2.error as error:
        reason = error.args[0].decode(errors="replace") if error.args and isinstance(error.args[0], bytes) else error
        raise invalid(f"`fan_out.agree.value` is no regex of RE2's: {reason}.", "fan_out.agree.value") from None
    if regex.programsize > MAX_PROGRAM:
        raise invalid("`fan_out.agree.value` is too complex a regex.", "fan_out.agree.value")

    def extract(text: str) -> Answer | None:
        match = regex.search(text[-MAX_SEARCHED:])
        found = match and match.group(1 if regex.groups else 0)
        return _text_answer(found) if found else None

    return extract
