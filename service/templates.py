"""What goes into a chat template and what comes out of it, whoever renders it."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

MAX_RENDERED = 16 * 2**20
"""Characters that a template may make of one request: more than any context holds, and soon tokenised."""

Message = Mapping[str, object]


class TemplateError(Exception):
    """The chat template refuses these messages; `str()` is what it says about them, without its source."""


@dataclass(frozen=True, slots=True)
class TemplateOptions:
    """What a chat template gets beside the messages.

    tools: as OpenAI has them. continues_last: the prompt ends inside the last message, so that the answer goes on with
    it; else generation_prompt opens the assistant's next one. variables: of the template, by name.
    """

    tools: Sequence[Mapping[str, object]] = ()
    generation_prompt: bool = True
    continues_last: bool = False
    variables: Mapping[str, object] = field(default_factory=dict)


PLAIN = TemplateOptions()


def knows(template: str, name: str) -> bool:
    """Whether a template's source speaks of it at all."""
    return re.search(rf"\b{re.escape(name)}\b", template) is not None


@dataclass(frozen=True, slots=True)
class TemplateCall:
    """One rendering. In messages, tools and variables every control token's spelling stands between two markers, so
    that it can be told from those that the template writes itself.
    """

    template: str
    messages: list[Any]
    tools: list[Any]
    variables: dict[str, Any]
    generation_prompt: bool
    continues_last: bool
    control_re: re.Pattern[str]
    marker: str

    def pieces(self, rendered: str) -> list[str | None]:
        """[text, control token in a user's string, text, ..., text]; None for a marker that a template parted.

        Raises TemplateError.
        """
        if len(rendered) > MAX_RENDERED:
            raise TemplateError(f"The chat template makes more than {MAX_RENDERED} characters of this.")
        return re.split(f"{self.marker}({self.control_re.pattern}){self.marker}|{self.marker}", rendered)


def template_call(
    template: str, messages: Sequence[Message], options: TemplateOptions, control_tokens: Collection[str]
) -> TemplateCall:
    """control_tokens: spellings that may not become tokens where a client wrote them into a string."""
    given = [list(messages), list(options.tools), dict(options.variables)]
    marker = _unused_character(json.dumps(given, ensure_ascii=False, default=dict))
    control_re = re.compile("|".join(map(re.escape, sorted(control_tokens, key=len, reverse=True))) or "(?!)")
    marked_messages, tools, variables = _mark(given, control_re, marker)
    return TemplateCall(
        template=template,
        messages=marked_messages,
        tools=tools,
        variables=variables,
        generation_prompt=options.generation_prompt and not options.continues_last,
        continues_last=options.continues_last,
        control_re=control_re,
        marker=marker,
    )


def _unused_character(text: str) -> str:
    return next(character for character in map(chr, range(0xF0000, 0xFFFFE)) if character not in text)


def _mark(value: Any, control_re: re.Pattern[str], marker: str) -> Any:
    """Put markers around control tokens in every string of a message; keys stay."""
    match value:
        case str():
            return control_re.sub(lambda match: f"{marker}{match.group()}{marker}", value)
        case Mapping():
            return {key: _mark(inner, control_re, marker) for key, inner in value.items()}
        case list() | tuple():
            return [_mark(inner, control_re, marker) for inner in value]
    return value
