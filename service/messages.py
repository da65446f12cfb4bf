"""Chat messages as the template gets them: one string of content each."""

from __future__ import annotations

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
    """Raises ApiError (400) naming the message. Keys: role, content, and name or reasoning_content where given."""
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
            raise _refused(f"{place}.role", "messages[tool]", "role `tool`")
        case FunctionMessage():
            raise _refused(f"{place}.role", "messages[function]", "role `function`")
    return rendered


def _assistant(message: AssistantMessage, place: str) -> RenderedMessage:
    for name in ("audio", "tool_calls", "function_call"):
        rule = CHAT_FIELDS[f"messages[assistant].{name}"]
        value = getattr(message, name)
        if value is not None and value not in rule.neutral:
            raise _refused(f"{place}.{name}", f"messages[assistant].{name}", f"`{name}`")
    content = message.refusal if message.content is None else message.content
    if content is None:
        raise invalid("An assistant message needs `content`.", f"{place}.content")
    rendered = _spoken("assistant", content, message.name, place)
    if message.reasoning_content is not None:
        rendered["reasoning_content"] = message.reasoning_content
    return rendered


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


def _refused(param: str, path: str, what: str) -> Exception:
    return invalid(f"Unsupported: {what}: {CHAT_FIELDS[path].note}.", param, "unsupported_parameter")
