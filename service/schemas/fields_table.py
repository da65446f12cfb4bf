"""The tables of fields as the README shows them."""

from __future__ import annotations

import json
from collections.abc import Mapping

from service.schemas.embedding_fields import EMBEDDING_FIELDS
from service.schemas.field_rules import FieldRule
from service.schemas.fields import CHAT_FIELDS, COMPLETION_FIELDS
from service.schemas.response_fields import RESPONSE_FIELDS


def fields_table() -> str:
    """The README's table of request fields by endpoint, in Markdown: those of the request itself, not those in them."""
    endpoints = {
        "chat": CHAT_FIELDS,
        "completions": COMPLETION_FIELDS,
        "responses": RESPONSE_FIELDS,
        "embeddings": EMBEDDING_FIELDS,
    }
    rows = [f"| field | {' | '.join(endpoints)} | |", f"| {' | '.join(['---'] * len(endpoints))} | --- | --- |"]
    for name in dict.fromkeys(name for fields in endpoints.values() for name in fields):
        if "." in name or "[" in name:
            continue
        rules = {endpoint: rule for endpoint, fields in endpoints.items() if (rule := fields.get(name)) is not None}
        uses = " | ".join(rules[endpoint].use.value if endpoint in rules else "" for endpoint in endpoints)
        rows.append(f"| `{name}` | {uses} | {_notes(rules)} |")
    return "\n".join(rows)


def _notes(rules: Mapping[str, FieldRule]) -> str:
    """What is said of the first endpoint, and where another differs its name and what is said of it."""
    notes: dict[str, str] = {}
    for endpoint, rule in rules.items():
        notes.setdefault(_shown_note(rule), endpoint)
    first, *others = notes.items()
    return "; ".join([first[0], *(f"{endpoint}: {note}" for note, endpoint in others)])


def _shown_note(rule: FieldRule) -> str:
    accepted = ", ".join(f"`{json.dumps(value)}`" for value in rule.neutral)
    return rule.note + (f" (accepted: {accepted})" if accepted else "")
