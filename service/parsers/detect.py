# ruff: noqa: RUF001 (the bars in DeepSeek's markers are not ASCII)
"""Which parsers a model's output needs, from its chat template: the template shows the model how calls are written."""

from __future__ import annotations

import re
from collections.abc import Collection

# The first that fits. A template of Qwen 3 Coder has hermes' marker too, Llama 3.2's pythonic one Llama's.
_TOOL_SHAPES: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("deepseek", re.compile("<｜tool▁calls?▁begin｜>")),
    ("mistral", re.compile(r"\[TOOL_CALLS\]")),
    ("qwen3_coder", re.compile("<tool_call>.*<function=.*<parameter=", re.DOTALL)),
    ("hermes", re.compile("<tool_call>(?!.*<arg_key>)", re.DOTALL)),  # GLM writes <arg_key> in it
    ("pythonic", re.compile(r"<\|tool_call_start\|>|\[func_name1?\(|name \+ '\('")),
    ("llama3_json", re.compile(r"<\|python_tag\|>|\"parameters\": dictionary|<\|python_start\|>")),
)
_TOOL_MODELS = {
    "deepseek_v3": "deepseek",
    "lfm2": "pythonic",
    "llama": "llama3_json",
    "llama4": "llama3_json",
    "mllama": "llama3_json",
    "mistral": "mistral",
    "mistral3": "mistral",
    "ministral": "mistral",
    "mixtral": "mistral",
    "qwen2": "hermes",
    "qwen2_moe": "hermes",
    "qwen3": "hermes",
    "qwen3_moe": "hermes",
}
_REASONING_TAGS = (("mistral", "[THINK]", "[/THINK]"), ("think", "<think>", "</think>"))


def detect(
    chat_template: str, model_type: str | None = None, vocab: Collection[str] = ()
) -> tuple[str | None, str | None]:
    """Names in TOOL_PARSERS and REASONING_PARSERS, None where the model has nothing to parse.

    model_type: of the model's configuration, for a template that renders tools in no known shape. vocab: spellings of
    its special tokens; both tags of a reasoning block among them count as much as one in the template.
    """
    return _tool_parser(chat_template, model_type), _reasoning_parser(chat_template, vocab)


def _tool_parser(template: str, model_type: str | None) -> str | None:
    for name, shape in _TOOL_SHAPES:
        if shape.search(template):
            return name
    # a template that does not know of tools cannot show any to the model
    return _TOOL_MODELS.get(model_type or "") if re.search(r"\btools\b", template) else None


def _reasoning_parser(template: str, vocab: Collection[str]) -> str | None:
    for name, opening, closing in _REASONING_TAGS:
        if opening in template or closing in template or (opening in vocab and closing in vocab):
            return name
    return None
