"""From the fields that say what a text may be to the engine's constraint on each choice."""

from __future__ import annotations

import json
from collections.abc import Mapping

from engine.api import (
    Capability,
    Choice,
    Constraint,
    EngineInfo,
    JsonObject,
    JsonSchema,
    Lark,
    OnlyTokens,
    Regex,
    WithoutWords,
)
from service.errors import ApiError, invalid
from service.schemas.common import SamplingFields
from service.schemas.structured import JsonObjectFormat, JsonSchemaFormat, ResponseFormat, StructuredOutputs


def constraint_of(request: SamplingFields, format_: Constraint | None = None) -> Constraint | None:
    """format_: what the endpoint's own field for it asks for. Raises ApiError (400) naming the field. A schema is not
    looked into: the engine does that.
    """
    outputs = request.structured_outputs
    wanted: list[Constraint | None] = [
        format_,
        None if outputs is None else _of_outputs(outputs),
        OnlyTokens(tuple(request.allowed_token_ids), "allowed_token_ids") if request.allowed_token_ids else None,
        WithoutWords(tuple(request.bad_words), "bad_words") if request.bad_words else None,
    ]
    given = [constraint for constraint in wanted if constraint is not None]
    if len(given) > 1:
        raise both_say(given[0], given[1].param)
    return given[0] if given else None


def both_say(constraint: Constraint, param: str) -> ApiError:
    field, other = field_of(constraint.param), field_of(param)
    return invalid(f"`{other}` and `{field}` both say what the text may be; give one.", other)


def field_of(param: str) -> str:
    """The request's own field that it is in."""
    return param.partition(".")[0].partition("[")[0]


def constraint_of_format(format_: ResponseFormat | None) -> Constraint | None:
    """That of a chat."""
    match format_:
        case JsonObjectFormat():
            return JsonObject("response_format")
        case JsonSchemaFormat(json_schema=named):
            param = "response_format.json_schema.schema"
            return JsonSchema(schema_text(named.schema, param), param)
    return None


def _of_outputs(outputs: StructuredOutputs) -> Constraint:
    given = [name for name in outputs.__struct_fields__ if getattr(outputs, name) not in (None, False)]
    if len(given) != 1:
        message = f"`structured_outputs` needs exactly one of {', '.join(outputs.__struct_fields__)}."
        raise invalid(message, "structured_outputs")
    param = f"structured_outputs.{given[0]}"
    if outputs.json is not None:
        text = outputs.json if isinstance(outputs.json, str) else schema_text(outputs.json, param)
        return JsonSchema(text, param)
    if outputs.regex is not None:
        return Regex(outputs.regex, param)
    if outputs.choice is not None:
        return Choice(tuple(outputs.choice), param)
    if outputs.grammar is not None:
        return Lark(outputs.grammar, param)
    return JsonObject(param)


def schema_text(schema: Mapping[str, object], param: str) -> str:
    """Keys stay in the client's order, which is the order that answers have them in."""
    try:
        return json.dumps(schema, allow_nan=False)
    except (ValueError, RecursionError):
        raise invalid(f"`{param}` is no schema: it is nested too deeply or has a number out of range.", param) from None


def check_constraint(constraint: Constraint | None, info: EngineInfo) -> None:
    """Raises ApiError (400) where the engine cannot hold a text to anything."""
    if constraint is not None and Capability.CONSTRAINTS not in info.capabilities:
        field = field_of(constraint.param)
        message = f"Unsupported parameter: `{field}`: this engine cannot constrain what the model writes."
        raise invalid(message, field, "unsupported_parameter")
    if isinstance(constraint, OnlyTokens) and (wrong := max(constraint.token_ids)) >= info.vocab_size:
        raise not_a_token(str(wrong), info.vocab_size, constraint.param)


def not_a_token(spelling: str, vocab_size: int, param: str) -> ApiError:
    return invalid(f"`{param}`: `{spelling}` is no token id from 0 to {vocab_size - 1}.", param)
