"""Chat messages as the template gets them: one string of content each, arguments of calls as objects."""

from __future__ import annotations

import json
from collections.abc import Sequence

from service.errors import invalid
from service.schemas.chat import (
    AssistantMessage,
    Content,
    DeveloperMessage,
    FunctionMessage,
    Message,
    SystemMessage,
    ToolMessage,
    UserMessage,
)
from service.schemas.fields import CHAT_FIELDS

RenderedMessage = dict[str, object]


def render_messages(messages: Sequence[Message]) -> list[RenderedMessage]:
    """Raises ApiError (400) naming the message. Keys: role, content, and those of name, reasoning_content,
    tool_calls (arguments as objects) and tool_call_id that it has."""
    if not messages:
        raise invalid("`messages` is an empty array; it needs at least one message.", "messages", "empty_array")
    return [_render(message, f"messages[{position}]") for position, message in enumerate(messages)]


def _render(message: Message, place: str) -> RenderedMessage:
    match message:
        case SystemMessage() | DeveloperMessage():
            rendered = _spoken("system", message.content, message.name, place)
        case UserMessage():
            rendered = _spoken("user", message.content, message.name, place)
        case AssistantMessage():
            rendered = _assistant(message, place)
        case ToolMessage():
            rendered = _spoken("tool", message.content, message.name, place)
            rendered["tool_call_id"] = message.tool_call_id
        case FunctionMessage():
            rendered = _spoken("tool", message.content or "", message.name, place)
            rendered["tool_call_id"] = message.name
    return rendered


def _assistant(message: AssistantMessage, place: str) -> RenderedMessage:
    if message.audio is not None:
        note = CHAT_FIELDS["messages[assistant].audio"].note
        raise invalid(f"Unsupported: `audio`: {note}.", f"{place}.audio", "unsupported_parameter")
    calls = _calls(message, place)
    content = message.refusal if message.content is None else message.content
    if content is None and not calls:
        raise invalid("An assistant message needs `content` or `tool_calls`.", f"{place}.content")
    rendered: RenderedMessage = {"role": "assistant", "content": None}
    if content is not None:
        rendered = _spoken("assistant", content, message.name, place)
    if message.reasoning_content is not None:
        rendered["reasoning_content"] = message.reasoning_content
    if calls:
        rendered["tool_calls"] = calls
    return rendered


def _calls(message: AssistantMessage, place: str) -> list[dict[str, object]]:
    """The older `function_call` counts as a call whose id is the function's name."""
    calls = [
        rendered_call(call.id, call.function.name, call.function.arguments, f"{place}.tool_calls[{number}].function")
        for number, call in enumerate(message.tool_calls or [])
    ]
    if (function := message.function_call) is not None:
        calls.append(rendered_call(function.name, function.name, function.arguments, f"{place}.function_call"))
    return calls


def _spoken(role: str, content: Content, name: str | None, place: str) -> RenderedMessage:
    rendered: RenderedMessage = {"role": role, "content": _text(content, f"{place}.content")}
    if name is not None:
        rendered["name"] = name
    return rendered


def _text(content: Content, place: str) -> str:
    """Parts are joined by line breaks, whatever the template."""
    if isinstance(content, str):
        return content
    if not content:
        raise invalid("`content` is an empty array.", place, "empty_array")
    return "\n".join(part.text for part in content)


def rendered_call(id_: str, name: str, arguments: str, place: str) -> dict[str, object]:
    """place: where the arguments stand. Raises ApiError (400)."""
    try:
        value = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise invalid(f"`{place}.arguments` is no JSON object.", f"{place}.arguments")
    return {"id": id_, "type": "function", "function": {"name": name, "arguments": value}}
