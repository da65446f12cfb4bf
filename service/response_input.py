"""The input of a response: decoded items, and the messages that they are to the chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import msgspec

from service.decoding import validation_error
from service.errors import ApiError, invalid
from service.messages import RenderedMessage, rendered_call
from service.requests import refuse_fields
from service.schemas.field_rules import Use
from service.schemas.response_fields import RESPONSE_FIELDS
from service.schemas.response_items import (
    INPUT_ITEMS,
    CallItem,
    CallOutput,
    InputItem,
    InputMessage,
    InputText,
    ItemReference,
    PastRefusal,
    PastText,
    ReasoningItem,
)


@dataclass(frozen=True, slots=True)
class Placed:
    """place: where the item stands in the request, for errors."""

    item: InputItem
    place: str


def read_input(given: str | Sequence[Mapping[str, Any]]) -> list[Placed]:
    """Raises ApiError (400) naming the item."""
    if isinstance(given, str):
        return [Placed(InputMessage(role="user", content=given), "input")]
    if not given:
        raise invalid("`input` is an empty array.", "input", "empty_array")
    return [read_item(item, f"input[{number}]") for number, item in enumerate(given)]


def read_item(given: Mapping[str, Any], place: str) -> Placed:
    """Raises ApiError (400) naming the place."""
    kind = given.get("type")
    if kind is None:
        kind = "message" if "role" in given else "item_reference"
        given = {name: value for name, value in given.items() if name != "type"}
    type_ = INPUT_ITEMS.get(kind) if isinstance(kind, str) else None
    if type_ is None:
        raise _no_item(kind, place)
    try:
        item = msgspec.convert(given, type=type_)
    except msgspec.ValidationError as error:
        raise validation_error(str(error), type_, place) from None
    except RecursionError:
        raise invalid(f"`{place}` is nested too deeply.", place) from None
    refuse_fields(item, f"input[{kind}]", place, RESPONSE_FIELDS)
    return Placed(item, place)


def _no_item(kind: object, place: str) -> ApiError:
    rule = RESPONSE_FIELDS.get(f"input[{kind}]")
    if rule is not None and rule.use is Use.REFUSED:
        message = f"Unsupported parameter: `{place}` is a `{kind}`: {rule.note}."
        return invalid(message, f"{place}.type", "unsupported_parameter")
    return invalid(f"`{place}.type` is none of {', '.join(INPUT_ITEMS)}.", f"{place}.type", "invalid_value")


def render_items(instructions: str | None, items: Sequence[Placed]) -> list[RenderedMessage]:
    """As `render_messages` does for a chat. Reasoning, text and calls of one answer are one message, and
    so are instructions and a system message that the input begins with. Raises ApiError (400) naming the item.
    """
    messages: list[RenderedMessage] = [] if instructions is None else [{"role": "system", "content": instructions}]
    for placed in items:
        item, place = placed.item, placed.place
        match item:
            case InputMessage(role="assistant"):
                _add_to_answer(messages, content=_text(item.content, f"{place}.content"))
            case InputMessage():
                _add_spoken(messages, item, place)
            case ReasoningItem():
                parts = item.content or item.summary
                _add_to_answer(messages, reasoning_content="\n".join(part.text for part in parts))
            case CallItem():
                call = rendered_call(item.call_id, item.name, item.arguments, place)
                _add_to_answer(messages, tool_calls=[call])
            case CallOutput():
                named = {} if item.name is None else {"name": item.name}
                text = _text(item.output, f"{place}.output")
                messages.append({"role": "tool", "content": text, "tool_call_id": item.call_id, **named})
            case ItemReference():
                raise no_such_item(item.id, place)
    return messages


def no_such_item(item_id: str, place: str) -> ApiError:
    return invalid(f"There is no stored item `{item_id}`.", f"{place}.id", "item_not_found")


def _add_spoken(messages: list[RenderedMessage], item: InputMessage, place: str) -> None:
    role = "system" if item.role == "developer" else item.role
    text = _text(item.content, f"{place}.content")
    if role == "system" and len(messages) == 1 and messages[0]["role"] == "system":
        # templates want one, at the start
        messages[0] = {"role": "system", "content": f"{messages[0]['content']}\n\n{text}"}
    else:
        messages.append({"role": role, "content": text})


def _add_to_answer(messages: list[RenderedMessage], **more: Any) -> None:
    """To the answer that the conversation ends with, unless it has such a thing already; else to a new one."""
    last = messages[-1] if messages else {}
    calls = cast("list[object]", last.get("tool_calls", []))
    follows = last.get("role") == "assistant" and ("tool_calls" in more or not calls)
    if not follows or any(last.get(name) not in (None, "") for name in more if name != "tool_calls"):
        last = {"role": "assistant", "content": None}
        messages.append(last)
        calls = []
    if "tool_calls" in more:
        more["tool_calls"] = [*calls, *more["tool_calls"]]
    last.update(more)
    last["content"] = last["content"] or (None if "tool_calls" in last else "")


def _text(content: str | Sequence[InputText | PastText | PastRefusal], place: str) -> str:
    """Parts are joined by line breaks, whatever the template."""
    if isinstance(content, str):
        return content
    if not content:
        raise invalid(f"`{place}` is an empty array.", place, "empty_array")
    return "\n".join(part.refusal if isinstance(part, PastRefusal) else part.text for part in content)
