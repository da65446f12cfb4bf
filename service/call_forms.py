# ruff: noqa: RUF001 (the bars in DeepSeek's markers are not ASCII)
"""How families write calls whose arguments are JSON: what a model is held to that must call, and is shown again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CallForm:
    """before, after: around the arguments; {} stands for the name, braces are doubled. start, end: around all calls.

    trigger: what each call begins with, and nothing else does: where a model comes to it by itself, a call follows.
    """

    before: str
    after: str
    separator: str
    start: str = ""
    end: str = ""
    trigger: str = ""

    def written(self, calls: Sequence[tuple[str, str]]) -> str:
        """calls: names and arguments, as JSON."""
        texts = [f"{self.before.format(name)}{arguments}{self.after}" for name, arguments in calls]
        return self.start + self.separator.join(texts) + self.end


COMMON_FORM = "hermes"
"""For models whose calls are no JSON, or that write none."""

CALL_FORMS = {
    "deepseek": CallForm(
        before="<｜tool▁call▁begin｜>function<｜tool▁sep｜>{}\n```json\n",
        after="\n```<｜tool▁call▁end｜>",
        separator="\n",
        start="<｜tool▁calls▁begin｜>",
        end="<｜tool▁calls▁end｜>",
    ),
    "hermes": CallForm('<tool_call>\n{{"name": "{}", "arguments": ', "}\n</tool_call>", "\n", trigger="<tool_call>"),
    "llama3_json": CallForm('{{"name": "{}", "parameters": ', "}", "; "),
    "mistral": CallForm('{{"name": "{}", "arguments": ', "}", ", ", "[TOOL_CALLS][", "]"),
}
