"""What JSON a tool's parameter may be, by its schema."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeGuard

from service.parsers.json_text import json_type, to_json

_MAX_DEPTH = 16
_TYPES = frozenset({"string", "number", "boolean", "null", "object", "array"})


def parameter_types(schema: Mapping[str, object], key: str) -> frozenset[str]:
    """As `json_type` names them; empty where the schema does not say."""
    properties = schema.get("properties")
    return _types(properties.get(key), schema, set(), 0) if isinstance(properties, Mapping) else frozenset()


def _types(schema: object, root: Mapping[str, object], seen: set[str], depth: int) -> frozenset[str]:
    """seen: references followed so far; each counts once, since schemas may go in circles."""
    if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
        return frozenset()
    reference = schema.get("$ref")
    if isinstance(reference, str):
        if reference in seen:
            return frozenset()
        seen.add(reference)
        return _types(_resolve(reference, root), root, seen, depth + 1)
    declared = schema.get("type")
    if isinstance(declared, str):
        declared = [declared]
    if _is_list(declared):
        return frozenset("number" if name == "integer" else name for name in declared if isinstance(name, str)) & _TYPES
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if _is_list(values):
        return frozenset(json_type(to_json(value)) for value in values)
    for keyword in ("anyOf", "oneOf", "allOf"):
        if _is_list(branches := schema.get(keyword)):
            return frozenset().union(*(_types(branch, root, seen, depth + 1) for branch in branches))
    return frozenset()


def _is_list(value: object) -> TypeGuard[Sequence[object]]:
    return isinstance(value, list | tuple)


def _resolve(reference: str, root: Mapping[str, object]) -> object:
    """What a reference inside the document (`#/$defs/Place`) means; None for any other."""
    if not reference.startswith("#/"):
        return None
    target: object = root
    for part in reference[2:].split("/"):
        if not isinstance(target, Mapping):
            return None
        target = target.get(part.replace("~1", "/").replace("~0", "~"))
    return target
