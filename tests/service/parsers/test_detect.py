"""Parsers from chat templates, cut down to what tells them apart."""

from __future__ import annotations

import pytest

from service.parsers import REASONING_PARSERS, TOOL_PARSERS, detect

HERMES = """{%- if tools %}{{- "<tools>" }}{%- for tool in tools %}{{- tool | tojson }}{%- endfor %}
{{- "</tools>\\n<tool_call>\\n{\\"name\\": <function-name>, \\"arguments\\": <args-json-object>}\\n</tool_call>" }}
{%- endif %}"""
QWEN3 = HERMES + "{%- if enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}"
QWEN3_CODER = "{% if tools %}<tool_call>\\n<function=example>\\n<parameter=example_1>\\nvalue\\n</parameter>{% endif %}"
LLAMA = """{%- if tools is not none %}Respond in the format {"name": function name, "parameters": dictionary of argument
name and its value}.{% endif %}{{- "<|python_tag|>" + tool_call.name + ".call(" }}"""
LLAMA_PYTHONIC = LLAMA + "Use exact format: [func_name1(param1=value1, param2=value2), func_name2(...)]"
PYTHONIC_BY_ITS_HISTORY = "{% for tool_call in tools %}[{{- tool_call.name + '(' -}}{% endfor %}"
LFM2 = "{% if tools %}List of tools: <|tool_list_start|>{% endif %}<|tool_call_start|>"
MISTRAL = "{% if tools %}[AVAILABLE_TOOLS]{% endif %}{{ '[TOOL_CALLS] [' }}"
MAGISTRAL = "{% if tools %}[AVAILABLE_TOOLS]{% endif %}{{ '[TOOL_CALLS]' + name + '[ARGS]' }}[THINK]{{ text }}[/THINK]"
DEEPSEEK_R1 = "{{'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>'}}{% if x %}<｜Assistant｜><think>\\n{% endif %}"
GLM = "{% if tools %}<tool_call>{function-name}\\n<arg_key>{arg-key-1}</arg_key>{% endif %}<think></think>"
SEED = "{% if tools %}<seed:tool_call>\\n<function=example>\\n<parameter=example_1>{% endif %}"
PLAIN = "{% for message in messages %}<|im_start|>{{ message.role }}\\n{{ message.content }}<|im_end|>{% endfor %}"
TOOLS_ONLY = "{% if tools %}{{ tools | tojson }}{% endif %}"


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (HERMES, ("hermes", None)),
        (QWEN3, ("hermes", "think")),
        (QWEN3_CODER, ("qwen3_coder", None)),
        (LLAMA, ("llama3_json", None)),
        (LLAMA_PYTHONIC, ("pythonic", None)),
        (PYTHONIC_BY_ITS_HISTORY, ("pythonic", None)),
        (LFM2, ("pythonic", None)),
        (MISTRAL, ("mistral", None)),
        (MAGISTRAL, ("mistral", "mistral")),
        (DEEPSEEK_R1, ("deepseek", "think")),
        (GLM, (None, "think")),
        (SEED, (None, None)),
        (PLAIN, (None, None)),
        (TOOLS_ONLY, (None, None)),
        ("", (None, None)),
    ],
)
def test_from_the_template(template: str, expected: tuple[str | None, str | None]) -> None:
    assert detect(template) == expected
    assert expected[0] is None or expected[0] in TOOL_PARSERS
    assert expected[1] is None or expected[1] in REASONING_PARSERS


def test_the_model_type_counts_where_the_template_shows_tools_in_no_known_shape() -> None:
    assert detect(TOOLS_ONLY, model_type="qwen2") == ("hermes", None)
    assert detect(TOOLS_ONLY, model_type="gpt2") == (None, None)
    assert detect(PLAIN, model_type="qwen2") == (None, None)
    assert detect(MISTRAL, model_type="llama") == ("mistral", None)


def test_tags_in_the_vocabulary_count_as_reasoning() -> None:
    assert detect(PLAIN, vocab={"<think>", "</think>"}) == (None, "think")
    assert detect(PLAIN, vocab={"[THINK]", "[/THINK]"}) == (None, "mistral")
    assert detect(PLAIN, vocab={"<think>"}) == (None, None)
