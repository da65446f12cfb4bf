"""One JSON value, checked as its text comes in."""

from __future__ import annotations

import json
import re

_SPACE = " \t\r\n"
_FIRST_CHARACTERS = {"{": "object", "[": "array", '"': "string", "t": "boolean", "f": "boolean", "n": "null"}
_SURROGATE = re.compile("[\ud800-\udfff]")
_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')
_DIGITS = frozenset("0123456789")
_HEX = frozenset("0123456789abcdefABCDEF")
_LITERALS = {"t": "rue", "f": "alse", "n": "ull"}
_CLOSERS = {"{": "}", "[": "]"}
# what of a number has been read -> what may follow it (d: digit, n: digit but zero, s: sign, e: exponent's letter)
_NUMBER: dict[str, dict[str, str]] = {
    "minus": {"0": "zero", "n": "whole"},
    "zero": {".": "point", "e": "exponent"},
    "whole": {"d": "whole", ".": "point", "e": "exponent"},
    "point": {"d": "fraction"},
    "fraction": {"d": "fraction", "e": "exponent"},
    "exponent": {"s": "sign", "d": "power"},
    "sign": {"d": "power"},
    "power": {"d": "power"},
}
_WHOLE_NUMBERS = frozenset({"zero", "whole", "fraction", "power"})


class JsonScanner:
    """Strict (RFC 8259) but for one thing: a control character inside a string, which models write, is escaped.

    Nesting costs memory, not recursion. After `complete` or `broken` nothing more is read.
    """

    def __init__(self) -> None:
        self.complete = False
        self.broken = False
        self._open: list[str] = []  # the closers of the containers around
        self._expects = "value"  # value | value or close | key | key or close | colon | comma or close
        self._in_string = False
        self._escape = 0  # 1: after a backslash; 2 to 5: hex digits to come, plus one
        self._rest = ""  # of true, false or null
        self._number = ""  # a key of _NUMBER

    def read(self, text: str, at: int) -> tuple[int, str]:
        """Where the value, or the text, or what is JSON ends, and the JSON up to there."""
        out: list[str] = []
        while at < len(text) and not self.complete:
            if self._in_string and not self._escape and (plain := _PLAIN.match(text, at)):
                out.append(plain.group())
                at = plain.end()
                continue
            step = self._step(text[at])
            if not step:
                self.broken = not self.complete
                break
            out.append(step)
            at += 1
        return at, "".join(out)

    def _step(self, character: str) -> str:
        """The character as JSON; "" where it does not belong to the value."""
        if self._in_string:
            return self._string_step(character)
        if self._rest:
            return self._literal_step(character)
        if self._number:
            state = _next_in_number(self._number, character)
            if state or self._number not in _WHOLE_NUMBERS:
                self._number = state
                return character if state else ""
            self._number = ""
            self._value_ends()
            if self.complete:
                return ""
        if character in _SPACE:
            return character
        return character if self._structure_step(character) else ""

    def _structure_step(self, character: str) -> bool:
        if self._open and character == self._open[-1] and self._expects.endswith("close"):
            self._open.pop()
            self._value_ends()
            return True
        match self._expects:
            case "value" | "value or close":
                return self._value_begins(character)
            case "key" | "key or close":
                self._in_string = character == '"'
                return self._in_string
            case "colon":
                self._expects = "value"
                return character == ":"
            case _:
                self._expects = "key" if self._open[-1] == "}" else "value"
                return character == ","

    def _value_begins(self, character: str) -> bool:
        if character in _CLOSERS:
            self._open.append(_CLOSERS[character])
            self._expects = "key or close" if character == "{" else "value or close"
        elif character == '"':
            self._in_string = True
            self._expects = "value"
        elif character in _LITERALS:
            self._rest = _LITERALS[character]
        else:
            self._number = "minus" if character == "-" else _next_in_number("minus", character)
            return bool(self._number)
        return True

    def _value_ends(self) -> None:
        self.complete = not self._open
        self._expects = "comma or close"

    def _literal_step(self, character: str) -> str:
        if character != self._rest[0]:
            return ""
        self._rest = self._rest[1:]
        if not self._rest:
            self._value_ends()
        return character

    def _string_step(self, character: str) -> str:
        if self._escape == 1:
            self._escape = 5 if character == "u" else 0
            return character if character in '"\\/bfnrtu' else ""
        if self._escape:
            self._escape = 0 if self._escape == 2 else self._escape - 1
            return character if character in _HEX else ""
        if character == '"':
            self._in_string = False
            if self._expects.startswith("key"):
                self._expects = "colon"
            else:
                self._value_ends()
        elif character == "\\":
            self._escape = 1
        else:
            return json.dumps(character)[1:-1]
        return character


def _next_in_number(state: str, character: str) -> str:
    """An empty string where the character does not go on with the number."""
    follows = _NUMBER[state]
    if character in _DIGITS:
        return follows.get("d") or follows.get("0" if character == "0" else "n", "")
    if character in "eE":
        return follows.get("e", "")
    return follows.get("s", "") if character in "+-" else follows.get(character, "") if character == "." else ""


def json_value(text: str) -> str | None:
    """The text, escaped where the scanner does so, if it is one JSON value with nothing but space around it."""
    text = text.strip(_SPACE)
    scanner = JsonScanner()
    end, checked = scanner.read(text + " ", 0)  # the space ends a number
    return checked.rstrip(_SPACE) if scanner.complete and end >= len(text) else None


def json_type(text: str) -> str:
    """The type of a JSON value, in JSON schema's words; `number` for integers too."""
    return _FIRST_CHARACTERS.get(text[0], "number")


def to_json(value: object) -> str:
    """JSON without NaN and without lone surrogates (which UTF-8 cannot carry). Raises ValueError, TypeError."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return json.dumps(value, allow_nan=False) if _SURROGATE.search(text) else text
