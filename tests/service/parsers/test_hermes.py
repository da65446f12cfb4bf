"""<tool_call>{...}</tool_call>, as Qwen 2.5, Qwen 3 and Hermes write it."""

from __future__ import annotations

import pytest

from service.parsers import TOOL_PARSERS
from tests.service.parsers.support import TOOLS, Call, Recorded, check, counting_ids

PARIS = Call("get_weather", '{"city": "Paris"}')
OSLO = Call("get_weather", '{"city": "Oslo"}')

RECORDED = [
    Recorded("plain text", "It is sunny in Paris.\n\n  Enjoy! ", ["It is sunny in Paris.\n\n  Enjoy! "]),
    Recorded("nothing", "", []),
    Recorded(
        "one call",
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>',
        [PARIS],
    ),
    Recorded(
        "compact",
        '<tool_call>{"name":"get_weather","arguments":{"city":"Paris","days":3}}</tool_call>',
        [Call("get_weather", '{"city":"Paris","days":3}')],
    ),
    Recorded(
        "text before",
        'Let me look that up.\n\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>\n',
        ["Let me look that up.", PARIS],
    ),
    Recorded(
        "two calls",
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>',
        [PARIS, OSLO],
    ),
    Recorded(
        "text between and after",
        'First Paris: <tool_call>{"name": "get_weather", "arguments": {"city": "Paris"}}</tool_call>\n\nThen Oslo:\n'
        '<tool_call>{"name": "get_weather", "arguments": {"city": "Oslo"}}</tool_call> Done.\n',
        ["First Paris:", PARIS, "\n\nThen Oslo:", OSLO, " Done.\n"],
    ),
    Recorded(
        "text after only",
        '<tool_call>{"name": "get_weather", "arguments": {"city": "Oslo"}}</tool_call>\n\nThat was it.',
        [OSLO, "That was it."],
    ),
    Recorded("no arguments", '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>', [Call("now", "{}")]),
    Recorded("arguments missing", '<tool_call>\n{"name": "now"}\n</tool_call>', [Call("now", "{}")]),
    Recorded("arguments null", '<tool_call>{"name": "now", "arguments": null}</tool_call>', [Call("now", "{}")]),
    Recorded(
        "nested braces, quotes and escapes",
        r'<tool_call>{"name": "write_file", "arguments": {"path": "a\\b.json", "content": "{\"k\": [1, {\"}\": '
        r'\"]\"}]}", "deep": {"a": [{}, [], {"b": [[1.5e-3, -0, true, false, null]]}]}}}</tool_call>',
        [
            Call(
                "write_file",
                r'{"path": "a\\b.json", "content": "{\"k\": [1, {\"}\": \"]\"}]}", '
                r'"deep": {"a": [{}, [], {"b": [[1.5e-3, -0, true, false, null]]}]}}',
            )
        ],
    ),
    Recorded(
        "unicode, raw and escaped",
        r'<tool_call>{"name": "get_weather", "arguments": {"city": "Zürich 東京 🌧️ \ud83c\udf27 \u00e9"}}</tool_call>',
        [Call("get_weather", r'{"city": "Zürich 東京 🌧️ \ud83c\udf27 \u00e9"}')],
    ),
    Recorded(
        "markers inside a string",
        '<tool_call>{"name": "write_file", "arguments": {"content": "</tool_call><tool_call>{\\"name\\": \\"now\\"}"}}'
        "</tool_call>",
        [Call("write_file", '{"content": "</tool_call><tool_call>{\\"name\\": \\"now\\"}"}')],
    ),
    Recorded(
        "a newline inside a string, which JSON forbids",
        '<tool_call>{"name": "write_file", "arguments": {"content": "one\ntwo\tthree"}}</tool_call>',
        [Call("write_file", '{"content": "one\\ntwo\\tthree"}')],
    ),
    Recorded(
        "arguments before the name",
        '<tool_call>{"arguments": {"city": "Paris"}, "name": "get_weather"}</tool_call>',
        [PARIS],
    ),
    Recorded(
        "arguments as a string",
        '<tool_call>{"name": "get_weather", "arguments": "{\\"city\\": \\"Paris\\"}"}</tool_call>',
        [PARIS],
    ),
    Recorded(
        "other keys",
        '<tool_call>{"id": 7, "thought": ["x"], "name": "get_weather", "arguments": {"city": "Paris"}, "n": -1.5}'
        "</tool_call>",
        [PARIS],
    ),
    Recorded(
        "llama's key",
        '<tool_call>{"name": "get_weather", "parameters": {"city": "Paris"}}</tool_call>',
        [PARIS],
    ),
    Recorded(
        "a name that is the beginning of another",
        '<tool_call>{"name": "get", "arguments": {"url": "http://x/?a=1&b={2}"}}</tool_call>',
        [Call("get", '{"url": "http://x/?a=1&b={2}"}')],
    ),
    Recorded(
        "unknown tool",
        'So: <tool_call>\n{"name": "rm", "arguments": {"x": "<tool_call>{\\"name\\""}}\n</tool_call> ok',
        ['So: <tool_call>\n{"name": "rm", "arguments": {"x": "<tool_call>{\\"name\\""}}\n</tool_call> ok'],
    ),
    Recorded(
        "unknown tool, then a known one",
        '<tool_call>{"name": "rm", "arguments": {}}</tool_call>\n<tool_call>{"name": "now", "arguments": {}}'
        "</tool_call>",
        ['<tool_call>{"name": "rm", "arguments": {}}</tool_call>', Call("now", "{}")],
    ),
    Recorded(
        "unknown tool, arguments first",
        '<tool_call>{"arguments": {"a": 1}, "name": "rm"}</tool_call>',
        ['<tool_call>{"arguments": {"a": 1}, "name": "rm"}</tool_call>'],
    ),
    Recorded("not JSON", "<tool_call>get_weather(Paris)</tool_call>", ["<tool_call>get_weather(Paris)</tool_call>"]),
    Recorded(
        "malformed before the arguments",
        '<tool_call>{"name": "now", arguments: {}}</tool_call>',
        ['<tool_call>{"name": "now", arguments: {}}</tool_call>'],
    ),
    Recorded(
        "arguments that are no object",
        '<tool_call>{"name": "now", "arguments": [1]}</tool_call>',
        ['<tool_call>{"name": "now", "arguments": [1]}</tool_call>'],
    ),
    Recorded(
        "malformed inside the arguments",
        '<tool_call>{"name": "get_weather", "arguments": {"city": "Paris",}}</tool_call>',
        [Call("get_weather", '{"city": "Paris",', complete=False), "}}</tool_call>"],
    ),
    Recorded(
        "numbers that JSON forbids",
        '<tool_call>{"name": "get_weather", "arguments": {"days": 01}}</tool_call>',
        [Call("get_weather", '{"days": 0', complete=False), "1}}</tool_call>"],
    ),
    Recorded(
        "NaN",
        '<tool_call>{"name": "get_weather", "arguments": {"days": NaN}}</tool_call>',
        [Call("get_weather", '{"days": ', complete=False), "NaN}}</tool_call>"],
    ),
    Recorded("truncated in the marker", "Well, <tool_ca", ["Well, <tool_ca"]),
    Recorded("truncated in the name", 'Well, <tool_call>\n{"name": "get_w', ['Well, <tool_call>\n{"name": "get_w']),
    Recorded(
        "truncated in the arguments",
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Par',
        [Call("get_weather", '{"city": "Par', complete=False)],
    ),
    Recorded(
        "truncated after the arguments",
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}',
        [PARIS],
    ),
    Recorded(
        "end marker missing",
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n'
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}',
        [PARIS, OSLO],
    ),
    Recorded(
        "one brace too many",
        '<tool_call>{"name": "get_weather", "arguments": {"city": "Paris"}}}</tool_call>',
        [PARIS, "}</tool_call>"],
    ),
    Recorded(
        "marker twice",
        '<tool_call><tool_call>{"name": "get_weather", "arguments": {"city": "Paris"}}</tool_call>',
        ["<tool_call>", PARIS],
    ),
    Recorded("markers in prose", "Write <tool_call> and </tool_call>.", ["Write <tool_call> and </tool_call>."]),
    Recorded("less-than signs", "if a < b << c <tool> <t", ["if a < b << c <tool> <t"]),
]


@pytest.mark.parametrize("recorded", RECORDED, ids=str)
def test_streamed_equals_whole_and_the_written_result_at_every_cut(recorded: Recorded) -> None:
    check(lambda: TOOL_PARSERS["hermes"](TOOLS, counting_ids()), recorded)
