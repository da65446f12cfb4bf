"""Random schemas, and random text within them: combinations of keywords are where constraints get lost."""

from __future__ import annotations

import json
import random
import re
from datetime import date, datetime

import numpy as np
import pytest

from engine.api import InvalidConstraint
from engine.matchers import Matcher
from tests.engine.constrained import EOS, accepts, compiler, schema_of, token_texts, violations


def test_any_schema_that_compiles_is_kept() -> None:
    rng = random.Random(7)
    num_kept = num_ended = 0
    for _ in range(400):
        schema = random_schema(rng)
        try:
            matcher = compiler().compile(schema_of(schema))
        except InvalidConstraint:
            continue
        num_kept += 1
        for _ in range(3):
            text = random_walk(matcher.fork(), rng)
            if text is not None:
                num_ended += 1
                assert violations(schema, text) == [], (json.dumps(schema), text)
    assert num_kept > 250 and num_ended > 600


def random_walk(matcher: Matcher, rng: random.Random, limit: int = 300) -> bytes | None:
    """Text from tokens drawn at random among those allowed, None when it has not come to an end."""
    closing = {number for number, text in enumerate(token_texts()) if text in (b'"', b"}", b"]", b",", b":")}
    text = b""
    for _ in range(limit):
        allowed = np.flatnonzero(np.unpackbits(matcher.allowed().view(np.uint8), bitorder="little")).tolist()
        assert allowed, f"a dead end after {text!r}: {matcher.error}"
        if EOS in allowed and (rng.random() < 0.5 or allowed == [EOS]):
            return text
        near = [token_id for token_id in allowed if token_id in closing]
        token_id = rng.choice(near if near and rng.random() < 0.4 else [t for t in allowed if t != EOS])
        assert matcher.accept(token_id)
        text += token_texts()[token_id]
    return None


def random_schema(rng: random.Random, depth: int = 0) -> dict[str, object]:
    kind = rng.random()
    if depth > 2 or kind < 0.5:
        return random_scalar(rng)
    if kind < 0.65:
        schema: dict[str, object] = {"type": "array", "items": random_schema(rng, depth + 1)}
        if rng.random() < 0.3:
            schema["prefixItems"] = [random_schema(rng, depth + 1)]
        schema |= {key: rng.randint(0, 4) for key in ("minItems", "maxItems") if rng.random() < 0.4}
        return schema
    if kind < 0.85:
        names = rng.sample(["a", "b", "ab", 'q"'], rng.randint(0, 3))
        schema = {"properties": {name: random_schema(rng, depth + 1) for name in names}}
        schema |= {"type": "object"} if rng.random() < 0.8 else {}
        schema["required"] = rng.sample([*names, "z"], rng.randint(0, min(2, len(names))))
        schema["additionalProperties"] = rng.choice([True, False, random_schema(rng, depth + 1)])
        if rng.random() < 0.2:
            schema["patternProperties"] = {rng.choice(["^x", "^[cd]"]): random_schema(rng, depth + 1)}
        schema |= {key: rng.randint(0, 2) for key in ("minProperties", "maxProperties") if rng.random() < 0.15}
        return schema
    combined: dict[str, object] = {
        rng.choice(["anyOf", "oneOf", "allOf"]): [random_schema(rng, depth + 1) for _ in range(rng.randint(1, 3))]
    }
    return {**random_schema(rng, depth + 1), **combined} if rng.random() < 0.4 else combined


def random_scalar(rng: random.Random) -> dict[str, object]:
    kind = rng.choice(["string", "integer", "number", "boolean", "enum", "const"])
    if kind == "enum":
        return {"enum": rng.sample([1, "a", 'é"\n', None, True, {"a": 1}, [1, "a"], 1.5, -0.5, ""], rng.randint(1, 4))}
    if kind == "const":
        return {"const": rng.choice([1, "a", None, {"a": 1}, [1, 2], 1.0])}
    schema: dict[str, object] = {"type": kind}
    if kind == "string":
        schema |= {key: rng.randint(0, 6) for key in ("minLength", "maxLength") if rng.random() < 0.4}
        if rng.random() < 0.4:
            schema["pattern"] = rng.choice(["^a", "b$", r"\d{2}", "a|b", r"^\w+$", r"^[^a]*$", "^$", '"', r"\\", "é"])
        if rng.random() < 0.2:
            schema["format"] = rng.choice(["date", "uuid", "ipv4", "email"])
    elif kind != "boolean":
        bounds = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
        schema |= {key: rng.choice([0, -1, 5, 10, -20, 0.5, 1.25, 100, 2e10]) for key in bounds if rng.random() < 0.25}
        if rng.random() < 0.2:
            schema["multipleOf"] = rng.choice([1, 3, 7, 0.5, 0.25, 10, 0.1])
    return schema


@pytest.mark.parametrize("kind", ["date", "date-time", "time"])
def test_dates_exist(kind: str) -> None:
    """Date libraries refuse the 29th of February of most years, the year 0 and the second 60."""
    rng = random.Random(3)
    matcher = compiler().compile(schema_of({"type": "string", "format": kind}))
    parse = {"date": date.fromisoformat, "date-time": datetime.fromisoformat}.get(kind, lambda t: f"1999-01-01T{t}")
    texts = {json.loads(text) for _ in range(150) if (text := random_walk(matcher.fork(), rng))}
    assert len(texts) > 50
    for text in texts:
        parse(re.sub("[zZ]$", "+00:00", re.sub(r"(\.\d{6})\d+", r"\1", text)))


def test_february_of_a_leap_year_has_29_days() -> None:
    matcher = compiler().compile(schema_of({"type": "string", "format": "date"}))
    days = ["2024-02-29", "2000-02-29", "2023-02-29", "1900-02-29", "0000-01-01", "0001-01-01", "2023-02-28"]
    assert [accepts(matcher, json.dumps(day)) for day in days] == [True, True, False, False, False, True, True]
