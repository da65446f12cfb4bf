"""[name(key=value)], as Llama 3.2, Llama 4, ToolACE and LFM2 write it."""

from __future__ import annotations

import json

import pytest

from service.parsers import TOOL_PARSERS
from service.parsers.python_text import arguments_json
from tests.service.parsers.support import TOOLS, Call, Recorded, check, counting_ids

PARIS = Call("get_weather", '{"city": "Paris"}')
NOW = Call("now", "{}")

RECORDED = [
    Recorded("plain text", "[1] A list: [a, b].\n[2] now() is [x]\n", ["[1] A list: [a, b].\n[2] now() is [x]\n"]),
    Recorded("one call", '[get_weather(city="Paris")]', [PARIS]),
    Recorded("no arguments", "[now()]", [NOW]),
    Recorded("two calls", "[get_weather(city='Paris'), now()]", [PARIS, NOW]),
    Recorded("spread over lines", '\n[\n  get_weather(\n    city="Paris",\n  ),\n  now( ),\n]\n', [PARIS, NOW]),
    Recorded(
        "values of every kind",
        "[write_file(a=1, b=-2.5, c=True, d=False, e=None, f=[1, (2, 'x')], g={'k': {'l': []}}, h=true, i=null)]",
        [
            Call(
                "write_file",
                '{"a": 1, "b": -2.5, "c": true, "d": false, "e": null, "f": [1, [2, "x"]], "g": {"k": {"l": []}}, '
                '"h": true, "i": null}',
            )
        ],
    ),
    Recorded(
        "quotes, brackets and commas in strings",
        """[write_file(path='a)],"(', content="it's [\\"]\\", ok)")]""",
        [Call("write_file", json.dumps({"path": 'a)],"(', "content": 'it\'s ["]", ok)'}))],
    ),
    Recorded(
        "triple quotes",
        '[write_file(content="""one\n"two", \'three\'\n""", path=\'\'\'p\'\'\', x="")]',
        [Call("write_file", '{"content": "one\\n\\"two\\", \'three\'\\n", "path": "p", "x": ""}')],
    ),
    Recorded(
        "escapes",
        r"[write_file(path='C:\\x\dir\n\t\x41\u00e9', content=r'\d+\w')]",
        [Call("write_file", r'{"path": "C:\\x\\dir\n\tAé", "content": "\\d+\\w"}')],
    ),
    Recorded("unicode", '[get_weather(city="Zürich 東京 🌧️")]', [Call("get_weather", '{"city": "Zürich 東京 🌧️"}')]),
    Recorded("half a surrogate pair", r'[get_weather(city="\ud83c")]', [Call("get_weather", r'{"city": "\ud83c"}')]),
    Recorded("strings next to each other", '[get_weather(city="Pa" "ris")]', [PARIS]),
    Recorded("text before", "I will.\n[now()]", ["I will.", NOW]),
    Recorded("text after", "[now()] Done.", [NOW, "Done."]),
    Recorded("text between", "A\n[now()]\nB\n\n[now()]\nC", ["A", NOW, "\nB", NOW, "\nC"]),
    Recorded("two lists", "[now()]\n[now()]", [NOW, NOW]),
    Recorded("in the middle of a line", "Call [now()] for it.", ["Call [now()] for it."]),
    Recorded("in its own markers", '<|tool_call_start|>[get_weather(city="Paris")]<|tool_call_end|>', [PARIS]),
    Recorded("in Llama 4's markers", "Ok <|python_start|> [now()] <|python_end|>", ["Ok", NOW]),
    Recorded("markers around nothing", "<|python_start|>x<|python_end|>", ["<|python_start|>x<|python_end|>"]),
    Recorded("a call inside a string", '[write_file(content="\n[now()]")]', ['[write_file(content="', NOW, '")]']),
    Recorded(
        "a call inside a string of one line",
        r'[write_file(content="\n[now()], now()")]',
        [Call("write_file", r'{"content": "\n[now()], now()"}')],
    ),
    Recorded("unknown tool", '[rm(path="/")]', ['[rm(path="/")]']),
    Recorded("unknown tool second", '[now(), rm(path="/")]', [NOW, ', rm(path="/")]'.removeprefix(", ")]),
    Recorded("a longer name", "[nowadays()]", ["[nowadays()]"]),
    Recorded("without brackets", "now()", ["now()"]),
    Recorded("positional arguments", '[get_weather("Paris")]', ['[get_weather("Paris")]']),
    Recorded("a call as a value", "[get_weather(city=now())]", ["[get_weather(city=now())]"]),
    Recorded("an expression", "[get_weather(days=1+1)]", ["[get_weather(days=1+1)]"]),
    Recorded("an f-string", '[get_weather(city=f"{x}")]', ['[get_weather(city=f"{x}")]']),
    Recorded("bytes", '[get_weather(city=b"x")]', ['[get_weather(city=b"x")]']),
    Recorded("spread", '[get_weather(**{"city": "x"})]', ['[get_weather(**{"city": "x"})]']),
    Recorded("the same key twice", "[get_weather(city='a', city='b')]", ["[get_weather(city='a', city='b')]"]),
    Recorded("keys that are not strings", "[now(a={1: 2})]", ["[now(a={1: 2})]"]),
    Recorded("infinite", "[now(a=1e999)]", ["[now(a=1e999)]"]),
    Recorded("brackets that do not match", "[now(a=[1)]", ["[now(a=[1)]"]),
    Recorded("a comment", "[now(# )\n)]", ["[now(# )\n)]"]),
    Recorded("not followed by a comma", "[now() now()]", ["[now() now()]"]),
    Recorded("truncated in the name", "[get_wea", ["[get_wea"]),
    Recorded("truncated in a value", '[now(), get_weather(city="Pa', [NOW, 'get_weather(city="Pa']),
    Recorded("truncated after a call", "[now() ", [NOW]),
    Recorded("truncated after a comma", "[now(), ", [NOW]),
    Recorded("an empty list", "[]", ["[]"]),
]


@pytest.mark.parametrize("recorded", RECORDED, ids=str)
def test_streamed_equals_whole_and_the_written_result_at_every_cut(recorded: Recorded) -> None:
    check(lambda: TOOL_PARSERS["pythonic"](TOOLS, counting_ids()), recorded)


@pytest.mark.parametrize(
    "source",
    ["a=" + "[" * 5000 + "]" * 5000, "a=" + "-" * 100_000 + "1", "a=" + "9" * 5000, "a='\x00'", "a=(lambda: 1)", "x"],
    ids=["deep", "signs", "long number", "null character", "lambda", "name"],
)
def test_arguments_that_would_break_python_are_no_call(source: str) -> None:
    assert arguments_json(source) is None
