"""Python's literals as JSON."""

from __future__ import annotations

import ast

from service.parsers.json_text import to_json

_ESCAPES = frozenset("\n\\'\"abfnrtv01234567xNuU")
_JSON_WORDS: dict[str, bool | None] = {"true": True, "false": False, "null": None}  # models mix the two languages


def escape(character: str, *, raw: bool) -> str:
    """A backslash and the character behind it. Where that is no escape Python would warn: the backslash is meant."""
    return "\\" + character if raw or character in _ESCAPES else "\\\\" + character


def arguments_json(source: str) -> str | None:
    """What stands in a call's parentheses as a JSON object; None unless it is keywords, each once, with literals."""
    try:
        call = ast.parse(f"f({source})", mode="eval").body
        if not isinstance(call, ast.Call) or call.args:
            return None
        arguments = {_key(keyword.arg): _value(keyword.value) for keyword in call.keywords}
        return to_json(arguments) if len(arguments) == len(call.keywords) else None
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None


def _key(name: object) -> str:
    if not isinstance(name, str):
        raise ValueError("only strings are keys")
    return name


def _value(node: ast.expr) -> object:
    match node:
        case ast.Constant(value=str() | int() | float() | None):
            return node.value
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number)):
            return -number
        case ast.Name(id=word) if word in _JSON_WORDS:
            return _JSON_WORDS[word]
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_value(item) for item in items]
        case ast.Dict(keys=keys, values=values):
            return {_key(key and _value(key)): _value(value) for key, value in zip(keys, values, strict=True)}
        case _:
            raise ValueError("not a literal")
