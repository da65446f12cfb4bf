"""From `response_format` and `structured_outputs` to the engine's constraint on each choice's text."""

from __future__ import annotations

import json
from collections.abc import Mapping

from engine.api import Capability, Choice, Constraint, EngineInfo, JsonObject, JsonSchema, Lark, Regex
from service.errors import invalid
from service.schemas.structured import JsonObjectFormat, JsonSchemaFormat, ResponseFormat, StructuredOutputs


def constraint_of(format_: ResponseFormat | None, outputs: StructuredOutputs | None) -> Constraint | None:
    """Raises ApiError (400) naming the field. A schema is not looked into: the engine does that."""
    formatted = _of_format(format_)
    if outputs is None:
        return formatted
    structured = _of_outputs(outputs)
    if formatted is not None:
        message = "`structured_outputs` and `response_format` both say what the text must be; give one."
        raise invalid(message, "structured_outputs")
    return structured


def _of_format(format_: ResponseFormat | None) -> Constraint | None:
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
        field = constraint.param.partition(".")[0].partition("[")[0]
        message = f"Unsupported parameter: `{field}`: this engine cannot constrain what the model writes."
        raise invalid(message, field, "unsupported_parameter")
