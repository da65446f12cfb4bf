"""What is checked in a JSON schema before llguidance compiles it.

llguidance enforces what it accepts, with few exceptions. Those are mended or refused here, and so is what would
overflow its stack or keep it busy for minutes. Every refusal names the JSON pointer of what it is about.
"""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Iterator
from decimal import Decimal
from typing import Any
from urllib.parse import unquote

MAX_LEVELS = 500
"""Nested schemas on the way through all references, each followed once: llguidance's recursion goes no deeper. It
overflows an 8 MB stack at about 2,000.
"""

MAX_MULTIPLE = 10_000
"""Least common multiple of all `multipleOf`, decimal points left out: an automaton has as many states."""

MAX_PATTERN_ATOMS = 10_000
"""Characters, classes and the like in a pattern once its counted repetitions are written out."""

MAX_PATTERN_CHARS = 4096
"""In all patterns of a schema together: compilation may take time that grows with the square of it."""

MAX_MEETING_PATTERNS = 8
"""Patterns and formats that one string must satisfy at once: an automaton for a dozen takes seconds to build."""

_EXACT_INTEGER = 2**53
"""llguidance holds numbers as 64-bit floats, and reads them with an error in the last of 17 digits."""

# fmt: off
_ENFORCED = frozenset(
    (
        "type", "enum", "const", "anyOf", "oneOf", "allOf", "$ref", "items", "prefixItems", "additionalItems",
        "minItems", "maxItems", "properties", "required", "additionalProperties", "patternProperties",
        "minProperties", "maxProperties", "minLength", "maxLength", "pattern", "format", "minimum", "maximum",
        "exclusiveMinimum", "exclusiveMaximum", "multipleOf",
    )
)
_UNSUPPORTED = frozenset(
    (
        "not", "if", "then", "else", "contains", "minContains", "maxContains", "uniqueItems", "propertyNames",
        "dependentRequired", "dependentSchemas", "dependencies", "unevaluatedItems", "unevaluatedProperties",
        "$dynamicRef", "$recursiveRef", "$dynamicAnchor", "$recursiveAnchor", "contentSchema", "divisibleBy",
        "disallow", "extends", "formatMinimum", "formatMaximum", "formatExclusiveMinimum", "formatExclusiveMaximum",
        "x-guidance",
    )
)
# fmt: on
_NUMERIC = frozenset(("const", "enum", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"))

# llguidance takes any day of February up to the 29th, the year 0 and leap seconds, which no date library reads.
_REAL_YEAR = r"^(?:[1-9]\d{3}|0[1-9]\d{2}|00[1-9]\d|000[1-9])-"
_REAL_DAY = (
    r"^(?:\d{4}-(?:0[13-9]|1[0-2])-\d\d|\d{4}-02-(?:[01]\d|2[0-8])|"
    r"(?:\d\d(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)-02-29)"
)
_FORMAT_PATTERNS = {
    "date": (_REAL_YEAR, _REAL_DAY),
    "date-time": (_REAL_YEAR, _REAL_DAY, r"[Tt]\d\d:\d\d:[0-5]"),
    "time": (r"^\d\d:\d\d:[0-5]",),
}
_MENDING_PATTERNS = frozenset(pattern for patterns in _FORMAT_PATTERNS.values() for pattern in patterns)


class SchemaError(ValueError):
    """`str()` is fit for a client."""


def checked_schema(text: str) -> dict[str, Any]:
    """The parsed schema, mended where llguidance would let wrong values through. Raises SchemaError."""
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise SchemaError(f"the schema is no JSON text: {error}") from error
    if schema is True:
        return {}
    if not isinstance(schema, dict):
        raise SchemaError("no value satisfies this schema" if schema is False else "a JSON schema must be an object")
    _Checker(schema).check()
    return schema


def count_atoms(pattern: str) -> int:
    """About how many atoms a regular expression has once its counted repetitions are written out."""
    groups, last, position = [0], 0, 0
    for token in _REGEX_TOKEN.finditer(pattern):
        text = token.group()
        if text == "(":
            groups.append(0)
        elif text == ")":
            last = groups.pop() if len(groups) > 1 else 0
            groups[-1] += last
        elif count := token["count"]:
            times = max(1, int((token["most"] or count)[:9]))
            groups[-1] += last * (times - 1)
            last *= times
        else:
            last = 1
            groups[-1] += 1
        position = token.end()
    return sum(groups) + len(pattern) - position


_REGEX_TOKEN = re.compile(
    r"\\[pPxuU]\{[^}]*\}|\\.|\[\^?\]?(?:\\.|\[:\^?\w+:\]|[^\]\\])*\]|\{(?P<count>\d+)(?:,(?P<most>\d*))?\}|.", re.DOTALL
)


class _Checker:
    def __init__(self, root: dict[str, Any]) -> None:
        self._root = root
        self._num_pattern_chars = 0
        self._multiple = 1
        self._seen: set[int] = set()  # ids of the objects that were checked; all of them live in the root
        self._meeting: dict[int, int] = {}  # by such an id

    def check(self) -> None:
        levels = 0
        pending: dict[str, Any] = {"#": self._root}
        followed = set(pending)
        while pending:
            pointer, schema = pending.popitem()
            deepest = 0
            for depth, inner_pointer, inner in _nested(pointer, schema):
                deepest = max(deepest, depth)
                if levels + deepest > MAX_LEVELS:
                    raise SchemaError(f"the schema is nested too deeply, references counted (at {inner_pointer})")
                if id(inner) not in self._seen:
                    self._seen.add(id(inner))
                    self._check_one(inner_pointer, inner)
                if "$ref" in inner:
                    target = self._target(inner_pointer, inner["$ref"])
                    if target not in followed:
                        followed.add(target)
                        pending[target] = self._resolve(inner_pointer, target)
            levels += deepest
        if self._count_meeting(self._root) > MAX_MEETING_PATTERNS:
            raise SchemaError(f"more than {MAX_MEETING_PATTERNS} patterns and formats are combined for one string")

    def _count_meeting(self, schema: object) -> int:
        """At most how many patterns could meet on one string below this schema: those of all that holds at once, and
        the most among alternatives and among the parts of a value.
        """
        if not isinstance(schema, dict):
            return 0
        if id(schema) in self._meeting:
            return self._meeting[id(schema)]  # 0 on the way through a circle
        self._meeting[id(schema)] = 0
        most = {"alternative": 0, "part": 0}
        count = ("pattern" in schema) + ("format" in schema)
        for keyword, _, inner in _inner(schema):
            meeting = self._count_meeting(inner)
            if keyword == "allOf":
                count += meeting
            else:
                kind = "alternative" if keyword in ("anyOf", "oneOf") else "part"
                most[kind] = max(most[kind], meeting)
        count += sum(most.values())
        if "$ref" in schema:
            count += self._count_meeting(self._resolve("", self._target("", schema["$ref"])))
        self._meeting[id(schema)] = count
        return count

    def _check_one(self, pointer: str, schema: dict[str, Any]) -> None:
        if schema.get("uniqueItems") is False:
            del schema["uniqueItems"]
        for keyword, value in schema.items():
            self._check_keyword(f"{pointer}/{_escape(keyword)}", keyword)
            if keyword in _NUMERIC:
                self._check_numbers(f"{pointer}/{keyword}", value)
        if schema is not self._root and any(isinstance(schema.get(key), str) for key in ("$id", "id")):
            raise SchemaError(f"a schema with an $id inside another is not supported (at {pointer})")
        self._check_min_properties(pointer, schema)
        self._check_multiple(pointer, schema.get("multipleOf"))
        if isinstance(pattern := schema.get("pattern"), str):
            self._check_pattern(f"{pointer}/pattern", pattern)
        for pattern in _mapping(schema.get("patternProperties")):
            self._check_pattern(f"{pointer}/patternProperties", pattern)
        name = schema.get("format")
        if isinstance(name, str) and name in _FORMAT_PATTERNS and isinstance(schema.get("allOf", []), list):
            schema["allOf"] = [*schema.get("allOf", []), *({"pattern": p} for p in _FORMAT_PATTERNS[name])]

    def _check_keyword(self, pointer: str, keyword: str) -> None:
        if keyword in _ENFORCED:
            return
        if keyword in _UNSUPPORTED:
            raise SchemaError(f"the schema keyword {keyword!r} is not supported (at {pointer})")
        if near := difflib.get_close_matches(keyword, _ENFORCED, 1, 0.85):
            raise SchemaError(f"unknown schema keyword {keyword!r}, did you mean {near[0]!r}? (at {pointer})")

    def _check_min_properties(self, pointer: str, schema: dict[str, Any]) -> None:
        """Keys that are not listed in `properties` may repeat, and repeated ones count once."""
        required, least = schema.get("required"), schema.get("minProperties")
        if isinstance(least, int) and least > len(set(map(str, required)) if isinstance(required, list) else ()) + 1:
            message = "minProperties is supported up to one more than the number of required properties"
            raise SchemaError(f"{message} (at {pointer}/minProperties)")

    def _check_numbers(self, pointer: str, value: object) -> None:
        """Refuse numbers that llguidance would round."""
        stack = [value]
        while stack:
            match stack.pop():
                case bool():
                    continue
                case int(number):
                    exact = abs(number) <= _EXACT_INTEGER or number in (2**63 - 1, -(2**63))
                case float(number):
                    exact = abs(number) <= _EXACT_INTEGER and number == float(f"{number:.14e}")
                case list(inner):
                    stack += inner
                    continue
                case dict(inner):
                    stack += inner.values()
                    continue
                case _:
                    continue
            if not exact:
                raise SchemaError(f"{number} has more digits than are supported (at {pointer})")

    def _check_multiple(self, pointer: str, multiple: object) -> None:
        if isinstance(multiple, bool) or not isinstance(multiple, int | float):
            return
        if not 0 < multiple < math.inf:
            raise SchemaError(f"multipleOf must be positive (at {pointer}/multipleOf)")
        digits = Decimal(repr(multiple)).normalize().as_tuple().digits
        self._multiple = math.lcm(self._multiple, int("".join(map(str, digits))))
        if self._multiple > MAX_MULTIPLE:
            raise SchemaError(f"multipleOf is too large (at {pointer}/multipleOf)")

    def _check_pattern(self, pointer: str, pattern: str) -> None:
        if (len(pattern) - len(pattern.rstrip("\\"))) % 2:  # what llguidance puts behind it would be escaped
            raise SchemaError(f"the pattern ends within an escape (at {pointer})")
        if pattern in _MENDING_PATTERNS:
            return
        self._num_pattern_chars += len(pattern)
        if self._num_pattern_chars > MAX_PATTERN_CHARS:
            raise SchemaError(f"the patterns are longer than {MAX_PATTERN_CHARS} characters together (at {pointer})")
        if count_atoms(pattern) > MAX_PATTERN_ATOMS:
            raise SchemaError(f"the repetitions of a pattern multiply to more than {MAX_PATTERN_ATOMS} (at {pointer})")

    def _target(self, pointer: str, reference: object) -> str:
        if reference == "#" or (isinstance(reference, str) and reference.startswith("#/")):
            return "#" + unquote(reference[1:])
        raise SchemaError(f"only references within the schema (#/...) are supported (at {pointer}/$ref)")

    def _resolve(self, pointer: str, target: str) -> object:
        found: Any = self._root
        for part in target.split("/")[1:]:
            key = part.replace("~1", "/").replace("~0", "~")
            if isinstance(found, dict) and key in found:
                found = found[key]
            elif isinstance(found, list) and key.isdecimal() and int(key) < len(found):
                found = found[int(key)]
            else:
                raise SchemaError(f"the reference {target} leads nowhere (at {pointer}/$ref)")
        return found


def _nested(pointer: str, schema: object) -> Iterator[tuple[int, str, dict[str, Any]]]:
    """(depth from 1, pointer, schema) of a schema and all that are nested in it; references are not followed."""
    stack: list[tuple[int, str, object]] = [(1, pointer, schema)]
    while stack:
        depth, pointer, schema = stack.pop()
        if isinstance(schema, dict):  # not true or false, or what llguidance will name as wrong
            yield depth, pointer, schema
            stack += [(depth + 1, f"{pointer}/{suffix}", inner) for _, suffix, inner in _inner(schema)]


def _inner(schema: dict[str, Any]) -> Iterator[tuple[str, str, object]]:
    """(keyword, pointer from here, schema) of the schemas that stand directly in one."""
    for keyword in ("additionalProperties", "additionalItems", "items"):
        if isinstance(inner := schema.get(keyword), dict):
            yield keyword, keyword, inner
    for keyword in ("allOf", "anyOf", "oneOf", "prefixItems", "items"):
        if isinstance(schemas := schema.get(keyword), list):
            yield from ((keyword, f"{keyword}/{number}", inner) for number, inner in enumerate(schemas))
    for keyword in ("properties", "patternProperties"):
        for name, inner in _mapping(schema.get(keyword)).items():
            yield keyword, f"{keyword}/{_escape(name)}", inner


def _mapping(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _escape(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")
