"""What a schema is refused for, and where: a keyword that is not enforced must never be dropped in silence."""

from __future__ import annotations

import json
from typing import Any

import pytest

from engine.api import InvalidConstraint
from engine.json_schema import SchemaError, checked_schema, count_atoms
from tests.engine.constrained import compiler, schema_of, token_texts


def chain(length: int, link: dict[str, Any]) -> dict[str, Any]:
    """Definitions that refer to the next, each in the way of `link`, whose "@" becomes the reference."""
    text = json.dumps(link)
    definitions = {f"d{i}": json.loads(text.replace('"@"', f'{{"$ref": "#/$defs/d{i + 1}"}}')) for i in range(length)}
    return {"$ref": "#/$defs/d0", "$defs": {**definitions, f"d{length}": {"type": "integer"}}}


def nested(depth: int) -> Any:
    schema: Any = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


def fields(schema: object) -> dict[str, object]:
    return {"type": "object", "properties": {"a/b": {"items": schema}}}


REFUSED: list[tuple[object, str]] = [
    ({"type": "str"}, "Invalid type: str"),
    ({"type": []}, "Unsatisfiable"),
    ({"pattern": "[a"}, "unclosed character class"),
    ({"pattern": "(?=a)b"}, "look-around"),
    ({"pattern": r"(a)\1"}, "backreferences"),
    ({"enum": []}, "Unsatisfiable"),
    (False, "no value satisfies"),
    ([], "must be an object"),
    ({"properties": []}, "properties must be an object"),
    ({"items": "x"}, "schema must be an object or boolean"),
    ({"required": "x"}, "Expected array for 'required'"),
    ({"minLength": -1}, "Expected positive integer for 'minLength'"),
    ({"type": "object", "required": ["x"], "properties": {}, "additionalProperties": False}, "'x' is unsatisfiable"),
    ({"allOf": [{"type": "string"}, {"type": "integer"}]}, "incompatible types"),
    ({"type": "integer", "minimum": 5, "maximum": 3}, "minimum .* is greater than maximum"),
    ({"type": "string", "minLength": 5, "maxLength": 3}, "minLength .* is greater than maxLength"),
    ({"type": "string", "format": "date-time", "maxLength": 5}, "Unsatisfiable schema"),
    ({"$ref": "#"}, "no text satisfies"),
    ({"$ref": "https://example.com/x.json"}, r"only references within the schema .*\(at #/\$ref\)"),
    ({"$ref": "other#/x"}, "only references within"),
    ({"$ref": "#anchor"}, "only references within"),
    ({"$ref": 3}, "only references within"),
    ({"$ref": "#/$defs/nope"}, "leads nowhere"),
    ({"$ref": "#/allOf/1", "allOf": [{}]}, "leads nowhere"),
    (fields({"uniqueItems": True}), r"'uniqueItems' is not supported \(at #/properties/a~1b/items/uniqueItems\)"),
    ({"if": {"type": "string"}, "then": {"minLength": 3}}, "'if' is not supported"),
    ({"not": {"type": "string"}}, "'not' is not supported"),
    ({"anyOf": [{"type": "null"}, {"contains": {}}]}, r"'contains' is not supported \(at #/anyOf/1/contains\)"),
    ({"propertyNames": {"maxLength": 3}}, "'propertyNames' is not supported"),
    ({"dependentRequired": {"a": ["b"]}}, "'dependentRequired' is not supported"),
    ({"dependencies": {"a": ["b"]}}, "'dependencies' is not supported"),
    ({"unevaluatedProperties": False}, "'unevaluatedProperties' is not supported"),
    ({"$dynamicRef": "#a"}, r"'\$dynamicRef' is not supported"),
    ({"$ref": "#/$defs/a", "$defs": {"a": {"divisibleBy": 3}}}, r"'divisibleBy' .*#/\$defs/a/divisibleBy"),
    ({"x-guidance": {"lenient": True}, "not": {}}, "'x-guidance' is not supported"),
    ({"type": "string", "maxlength": 3}, "did you mean 'maxLength'"),
    ({"type": "string", "format": "password"}, "Unknown format: password"),
    ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf is supported where"),
    ({"minProperties": 2}, r"minProperties is supported up to .*\(at #/minProperties\)"),
    ({"minProperties": 1, "properties": {"a": {}, "b": {}}}, "min/maxProperties only supported"),
    ({"patternProperties": {"^a": {"type": "integer"}, "b$": {"type": "string"}}}, "not disjoint"),
    ({"properties": {"a": {"$id": "x"}}}, r"\$id inside another is not supported \(at #/properties/a\)"),
    ({"$schema": "nonsense"}, "nonsense"),
    ({"const": 2**53 + 1}, "more digits than are supported"),
    ({"enum": [1, [{"a": 1e20}]]}, "more digits than are supported"),
    ({"const": 123456789.12345679}, "more digits than are supported"),
    ({"type": "integer", "minimum": 1e18}, "more digits than are supported"),
    ({"type": "number", "maximum": float("inf")}, "more digits than are supported"),
    ({"multipleOf": 0}, "multipleOf must be positive"),
    ({"multipleOf": 1000003}, "multipleOf is too large"),
    ({"allOf": [{"type": "integer"}, {"multipleOf": 97}, {"multipleOf": 89}, {"multipleOf": 83}]}, "too large"),
    ({"type": "string", "pattern": "((a{100}){100}){100}"}, "more than 10000"),
    ({"type": "string", "pattern": "a" * 5000}, "longer than 4096 characters"),
    ({"type": "string", "allOf": [{"pattern": f"a.{{{n}}}b"} for n in range(20)]}, "more than 8 patterns"),
    (chain(20, {"allOf": ["@", {"pattern": "a.{30}b"}]}), "more than 8 patterns"),
    ({"type": "object", "properties": {f"p{n}": {"type": "integer"} for n in range(2000)}}, "too many alternatives"),
    (nested(200), "nested too deeply"),
    (nested(600), "nested too deeply"),
    (chain(1500, {"type": "array", "items": "@"}), "nested too deeply"),
    (chain(2500, "@"), "nested too deeply"),  # type: ignore[arg-type]
    (chain(700, {"allOf": ["@", {"minimum": 1}]}), "nested too deeply"),
    ({"description": "x" * 140_000}, "at most 131072"),
    ({"title": "\ud800"}, r"\w"),
]


@pytest.mark.parametrize(("schema", "message"), REFUSED, ids=[json.dumps(schema)[:50] for schema, _ in REFUSED])
def test_refused_by_its_field_with_the_reason(schema: object, message: str) -> None:
    with pytest.raises(InvalidConstraint, match=message) as refusal:
        compiler().compile(schema_of(schema))
    assert refusal.value.param == "response_format"
    assert "x-guidance" not in str(refusal.value) or "x-guidance" in json.dumps(schema), "it quotes our own additions"


@pytest.mark.parametrize("text", ["", "{", "nul", "[" * 100_000, '{"const": ' + "9" * 5000 + "}"])
def test_text_that_is_no_json_is_refused(text: str) -> None:
    with pytest.raises(SchemaError, match="no JSON"):
        checked_schema(text)


def test_keywords_are_told_from_names() -> None:
    """Properties may be called anything, and annotations that nobody knows say nothing about values."""
    names = {"not": {}, "$id": {"type": "string"}, "if": {}, "maxlength": {}, "$ref": {"type": "integer"}}
    schema = {"type": "object", "properties": names, "x-order": 1, "deprecated": True, "example": 3, "nullable": True}
    assert checked_schema(json.dumps(schema)) == schema


def test_a_key_has_one_spelling() -> None:
    r"""{"\u0061": "x"} would pass for a key that the schema does not list, with a value of any kind."""
    matcher = compiler().compile(schema_of({"type": "object", "properties": {"a": {"type": "integer"}}}))
    for token_id in (b"{", b'"'):
        assert matcher.accept(_token(token_id))
    assert matcher.fork().accept(_token(b"\\"))
    after = matcher.fork()
    assert after.accept(_token(b"\\")) and not after.accept(_token(b"u"))


def _token(text: bytes) -> int:
    return token_texts().index(text)


@pytest.mark.parametrize(
    ("pattern", "atoms"),
    [
        ("", 0),
        ("abc", 3),
        ("a{3}", 3),
        ("a{2,5}b", 6),
        ("a{2,}", 2),
        ("(ab){10}", 20),
        ("((a{10}){10}){10}", 1000),
        (r"[a-z\]]{4}\{9\}", 7),
        (r"\p{Lu}{3}", 3),
        ("a{10}{10}", 100),
        ("a{99999999999999}", 999_999_999),
    ],
)
def test_repetitions_multiply(pattern: str, atoms: int) -> None:
    assert count_atoms(pattern) == atoms
