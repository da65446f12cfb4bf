"""{"name": ..., "parameters": {...}}, as Llama 3.1 to 4 write it."""

from __future__ import annotations

import pytest

from service.parsers import TOOL_PARSERS
from tests.service.parsers.support import TOOLS, Call, Recorded, check, counting_ids

PARIS = Call("get_weather", '{"city": "Paris"}')
NOW = Call("now", "{}")

RECORDED = [
    Recorded("plain text", "The weather is {fine}, [really].\n", ["The weather is {fine}, [really].\n"]),
    Recorded("one call", '{"name": "get_weather", "parameters": {"city": "Paris"}}', [PARIS]),
    Recorded("with tag", '<|python_tag|>{"name": "get_weather", "parameters": {"city": "Paris"}}', [PARIS]),
    Recorded("with a pair of tags", '<|python_start|>{"name": "now", "parameters": {}}<|python_end|>', [NOW]),
    Recorded(
        "several",
        '{"name": "get_weather", "parameters": {"city": "Paris"}}; {"name": "now", "parameters": {}};'
        '{"name": "get", "parameters": {"url": "a;b"}}',
        [PARIS, NOW, Call("get", '{"url": "a;b"}')],
    ),
    Recorded(
        "several with tag",
        '<|python_tag|>{"name": "now", "parameters": {}}; {"name": "get_weather", "parameters": {"city": "Paris"}}',
        [NOW, PARIS],
    ),
    Recorded(
        "one per line",
        '{"name": "now", "parameters": {}}\n{"name": "get_weather", "parameters": {"city": "Paris"}}\n',
        [NOW, PARIS],
    ),
    Recorded(
        "printed over several lines",
        '\n{\n    "name": "get_weather",\n    "parameters": {\n        "city": "Paris"\n    }\n}\n',
        [Call("get_weather", '{\n        "city": "Paris"\n    }')],
    ),
    Recorded("typed", '{"type": "function", "name": "get_weather", "parameters": {"city": "Paris"}}', [PARIS]),
    Recorded("the other key", '{"name": "get_weather", "arguments": {"city": "Paris"}}', [PARIS]),
    Recorded("parameters before the name", '{"parameters": {"city": "Paris"}, "name": "get_weather"}', [PARIS]),
    Recorded("parameters as a string", '{"name": "get_weather", "parameters": "{\\"city\\": \\"Paris\\"}"}', [PARIS]),
    Recorded("null parameters", '{"name": "now", "parameters": null}', [NOW]),
    Recorded("text before", 'I will call it.\n\n{"name": "now", "parameters": {}}', ["I will call it.", NOW]),
    Recorded(
        "text between",
        '{"name": "now", "parameters": {}} and then\n{"name": "now", "parameters": {}}\nBye',
        [NOW, "and then", NOW, "\nBye"],
    ),
    Recorded(
        "in the middle of a line",
        'Use {"name": "now", "parameters": {}} for it.',
        ['Use {"name": "now", "parameters": {}} for it.'],
    ),
    Recorded(
        "tag in the middle of a line",
        'Use <|python_tag|>{"name": "now", "parameters": {}} for it.',
        ["Use", NOW, " for it."],
    ),
    Recorded(
        "nested braces, quotes and unicode",
        r'{"name": "write_file", "parameters": {"content": "}{\"};\" é 漢 🎈", "lines": [{"a": {"b": "]"}}]}}',
        [Call("write_file", r'{"content": "}{\"};\" é 漢 🎈", "lines": [{"a": {"b": "]"}}]}')],
    ),
    Recorded(
        "a call inside a string",
        r'{"name": "write_file", "parameters": {"content": "; {\"name\": \"now\", \"parameters\": {}}<|python_tag|>"}}',
        [Call("write_file", r'{"content": "; {\"name\": \"now\", \"parameters\": {}}<|python_tag|>"}')],
    ),
    Recorded(
        "an answer in JSON",
        '{"city": "Paris", "name": "now", "parameters": {}}',
        ['{"city": "Paris", "name": "now", "parameters": {}}'],
    ),
    Recorded(
        "an answer in JSON with a call inside",
        '{"calls": [\n{"name": "now", "parameters": {}}\n]}',
        ['{"calls": [\n{"name": "now", "parameters": {}}\n]}'],
    ),
    Recorded("a tool without parameters is no call", '{"name": "now"}', ['{"name": "now"}']),
    Recorded("an empty object", "{}", ["{}"]),
    Recorded(
        "a description of a tool",
        '{"name": "now", "description": "the time", "parameters": {}}',
        ['{"name": "now", "description": "the time", "parameters": {}}'],
    ),
    Recorded(
        "unknown tool",
        '{"name": "rm", "parameters": {"path": "/"}}',
        ['{"name": "rm", "parameters": {"path": "/"}}'],
    ),
    Recorded(
        "unknown tool second",
        '{"name": "now", "parameters": {}}; {"name": "rm", "parameters": {}}',
        [NOW, '; {"name": "rm", "parameters": {}}'],
    ),
    Recorded(
        "code after the tag",
        '<|python_tag|>brave_search.call(query="x")',
        ['<|python_tag|>brave_search.call(query="x")'],
    ),
    Recorded("malformed", "{'name': 'now', 'parameters': {}}", ["{'name': 'now', 'parameters': {}}"]),
    Recorded(
        "malformed inside the parameters",
        '{"name": "get_weather", "parameters": {"city": Paris}}',
        [Call("get_weather", '{"city": ', complete=False), "Paris}}"],
    ),
    Recorded("truncated in the name", '{"name": "now', ['{"name": "now']),
    Recorded(
        "truncated in the parameters",
        '{"name": "get_weather", "parameters": {"city": "Pa\\',
        [Call("get_weather", '{"city": "Pa\\', complete=False)],
    ),
    Recorded("semicolon without a call", '{"name": "now", "parameters": {}}; bye', [NOW, "; bye"]),
    Recorded("a number where a name belongs", '{"name": 5, "parameters": {}}', ['{"name": 5, "parameters": {}}']),
]


@pytest.mark.parametrize("recorded", RECORDED, ids=str)
def test_streamed_equals_whole_and_the_written_result_at_every_cut(recorded: Recorded) -> None:
    check(lambda: TOOL_PARSERS["llama3_json"](TOOLS, counting_ids()), recorded)
