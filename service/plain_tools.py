"""Tools, calls and their results for chat templates that know nothing of them: as text of ordinary messages."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import cast

from service.call_forms import CallForm
from service.messages import RenderedMessage

_INTRODUCTION = """# Tools

These functions can be called to help with an answer. Each is described as JSON, its parameters by a JSON schema:
"""
_HOW_TO_CALL = """
A call is written exactly like this, and nothing follows it:
"""
_NAME, _ARGUMENTS = "name of the function", '{"parameter": "value"}'


def with_calls_as_text(messages: Sequence[RenderedMessage], form: CallForm) -> list[RenderedMessage]:
    """For a template that knows no calls: they stand behind the content, as the model itself was made to write them."""
    return [_written(message, form) if "tool_calls" in message else message for message in messages]


def _written(message: RenderedMessage, form: CallForm) -> RenderedMessage:
    functions = [call["function"] for call in cast("list[dict[str, dict[str, str]]]", message["tool_calls"])]
    calls = [(function["name"], json.dumps(function["arguments"], ensure_ascii=False)) for function in functions]
    text = "\n".join(filter(None, (cast("str | None", message["content"]), form.written(calls))))
    return {key: value for key, value in message.items() if key != "tool_calls"} | {"content": text}


def with_tools_as_text(
    messages: Sequence[RenderedMessage], tools: Sequence[Mapping[str, object]], form: CallForm
) -> list[RenderedMessage]:
    """For a template that knows no tools: the first message describes them, behind a system's text or before a user's.

    A system message of its own would be refused by some templates, and take the place of what others say by themselves.
    tools: as OpenAI has them.
    """
    described = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    example = form.written([(_NAME, _ARGUMENTS)])
    text = f"{_INTRODUCTION}<tools>\n{described}\n</tools>\n{_HOW_TO_CALL}{example}"
    first, *rest = messages
    match first["role"]:
        case "system":
            return [first | {"content": f"{first['content']}\n\n{text}"}, *rest]
        case "user":
            return [first | {"content": f"{text}\n\n{first['content']}"}, *rest]
    return [{"role": "user", "content": text}, *messages]


def with_results_as_text(messages: Sequence[RenderedMessage]) -> list[RenderedMessage]:
    """For a template that knows no results of calls: the user tells them, those of one turn in one message."""
    told: list[RenderedMessage] = []
    tells = False
    for message in messages:
        if message["role"] != "tool":
            told.append(message)
            tells = False
            continue
        text = f"<tool_response>\n{message['content']}\n</tool_response>"
        if tells:
            told[-1] = told[-1] | {"content": f"{told[-1]['content']}\n{text}"}
        else:
            told.append({"role": "user", "content": text})
        tells = True
    return told
