"""Which parsers the served model's output needs: by the operator's word, or as its chat template shows."""

from __future__ import annotations

from dataclasses import dataclass

from service.call_forms import COMMON_FORM
from service.parsers import detect
from service.templates import knows
from service.tokenizer import Tokenizer

AUTO, NONE = "auto", "none"


@dataclass(frozen=True, slots=True)
class ModelParsers:
    """tools: a name in TOOL_PARSERS, None where calls are not looked for. reasoning: one in REASONING_PARSERS, None for
    a model that does not tell its reasoning apart.
    """

    tools: str | None = None
    reasoning: str | None = None


def parsers_of(tokenizer: Tokenizer, tool_parser: str, reasoning_parser: str) -> ModelParsers:
    """Each parser: a name, `auto` or `none`.

    A model whose template knows no tools has no form of its own: it is shown the common one (see plain_tools.py). One
    whose template writes calls in an unknown form would not keep to that.
    """
    tools, reasoning = detect(tokenizer.chat_template, tokenizer.model_type, tokenizer.special_spellings)
    if tools is None and not knows(tokenizer.chat_template, "tools"):
        tools = COMMON_FORM
    return ModelParsers(_chosen(tool_parser, tools), _chosen(reasoning_parser, reasoning))


def _chosen(setting: str, detected: str | None) -> str | None:
    return {AUTO: detected, NONE: None}.get(setting, setting)
