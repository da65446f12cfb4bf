"""The scanner against Python's own reader."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from service.parsers.json_text import JsonScanner, json_type, json_value, to_json

strings = st.text('ab"\\/\n\x01\x7f é漢🎈', max_size=6)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | strings,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(strings, inner, max_size=4),
    max_leaves=12,
)


def reject(word: str) -> None:
    raise ValueError(word)


def reads(text: str) -> bool:
    try:
        json.loads(text, strict=False, parse_constant=reject)
    except ValueError:
        return False
    return True


@settings(deadline=None)
@given(values, st.booleans(), st.sampled_from([None, 1]))
def test_all_that_python_writes_is_json_to_the_letter(value: object, ascii_only: bool, indent: int | None) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only, indent=indent)
    assert json_value(text) == text


@settings(deadline=None)
@given(st.text(alphabet='{}[]",:\\u0012eE+-.tfalsrn \n\x01', max_size=12))
def test_accepts_what_python_accepts_and_nothing_else(text: str) -> None:
    checked = json_value(text)
    assert (checked is not None) == reads(text)
    if checked is not None:
        assert json.loads(checked) == json.loads(text, strict=False)


@settings(deadline=None)
@given(values, st.integers(min_value=0), st.sampled_from('{}[]",:\\x0e-.'))
def test_accepts_what_python_accepts_one_character_away_from_json(value: object, place: int, wrong: str) -> None:
    text = json.dumps(value)
    place %= len(text)
    text = text[:place] + wrong + text[place + 1 :]
    assert (json_value(text) is not None) == reads(text)


def test_stops_at_the_character_at_fault() -> None:
    scanner = JsonScanner()
    assert scanner.read('{"a": 1, b}', 0) == (9, '{"a": 1, ')
    assert scanner.broken
    assert not scanner.complete


def test_a_number_ends_where_something_else_begins() -> None:
    scanner = JsonScanner()
    assert scanner.read("x12.5e1}", 1) == (7, "12.5e1")
    assert scanner.complete


@pytest.mark.parametrize(
    ("text", "name"),
    [("{}", "object"), ("[]", "array"), ('""', "string"), ("true", "boolean"), ("null", "null"), ("-1", "number")],
)
def test_types(text: str, name: str) -> None:
    assert json_type(text) == name


def test_what_is_written_can_be_sent_as_utf8() -> None:
    assert to_json({"a": "é\ud800"}).encode() == rb'{"a": "\u00e9\ud800"}'
    with pytest.raises(ValueError, match="JSON"):
        to_json(float("inf"))
