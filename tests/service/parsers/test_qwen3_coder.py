"""<function=name><parameter=key>, as Qwen 3 Coder writes it."""

from __future__ import annotations

import json

import pytest

from service.parsers import TOOL_PARSERS, Tool, ToolCallArguments, fold
from service.parsers.schema_types import parameter_types
from tests.service.parsers.support import TOOLS, Call, Recorded, check, counting_ids


def call(name: str, *parameters: tuple[str, str]) -> str:
    body = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in parameters)
    return f"<tool_call>\n<function={name}>\n{body}</function>\n</tool_call>"


def file(**arguments: object) -> Call:
    return Call("write_file", json.dumps(arguments, ensure_ascii=False))


PARIS = Call("get_weather", '{"city": "Paris"}')
NOW = Call("now", "{}")
PARIS_TEXT = call("get_weather", ("city", "Paris"))

RECORDED = [
    Recorded("plain text", "a < b, <function>, <param", ["a < b, <function>, <param"]),
    Recorded("one call", PARIS_TEXT, [PARIS]),
    Recorded("no arguments", call("now"), [NOW]),
    Recorded("no arguments, compact", "<tool_call><function=now></function></tool_call>", [NOW]),
    Recorded(
        "compact",
        "<tool_call><function=get_weather><parameter=city>Paris</parameter></function></tool_call>",
        [PARIS],
    ),
    Recorded("two calls", PARIS_TEXT + "\n" + call("now"), [PARIS, NOW]),
    Recorded("text before", "I'll look.\n\n" + PARIS_TEXT, ["I'll look.", PARIS]),
    Recorded("text between and after", f"A\n{PARIS_TEXT}\nB\n{call('now')}\n\nC", ["A", PARIS, "\nB", NOW, "\n\nC"]),
    Recorded("first marker missing", PARIS_TEXT.removeprefix("<tool_call>\n"), [PARIS]),
    Recorded("last marker missing", PARIS_TEXT.removesuffix("</tool_call>"), [PARIS]),
    Recorded("function not closed", PARIS_TEXT.replace("</function>\n", ""), [PARIS]),
    Recorded(
        "types from the schema",
        call(
            "write_file",
            ("append", "true"),
            ("mode", "7"),
            ("ratio", "-0.5e3"),
            ("lines", '["a", {"b": 1}]'),
            ("place", '{"x": 1.5}'),
            ("level", "2"),
        ),
        [
            Call(
                "write_file",
                '{"append": true, "mode": 7, "ratio": -0.5e3, "lines": ["a", {"b": 1}], "place": {"x": 1.5}, '
                '"level": 2}',
            )
        ],
    ),
    Recorded(
        "Python's words", call("write_file", ("append", "False"), ("mode", "None")), [file(append=False, mode=None)]
    ),
    Recorded(
        "words for a string stay a string",
        call("write_file", ("path", "5"), ("content", "null")),
        [file(path="5", content="null")],
    ),
    Recorded("either type", call("write_file", ("either", "5")), [file(either=5)]),
    Recorded("either type, a string", call("write_file", ("either", "5 o'clock")), [file(either="5 o'clock")]),
    Recorded("not of its type", call("get_weather", ("days", "two")), [Call("get_weather", '{"days": "two"}')]),
    Recorded(
        "a number where an object belongs",
        call("get_weather", ("options", "5")),
        [Call("get_weather", '{"options": "5"}')],
    ),
    Recorded("a parameter that the schema lacks", call("now", ("zone", "1")), [Call("now", '{"zone": "1"}')]),
    Recorded(
        "code",
        call("write_file", ("path", "a.py"), ("content", "def f():\n    return \"a\\n\" < 'b'  # </param>\n\n")),
        [file(path="a.py", content="def f():\n    return \"a\\n\" < 'b'  # </param>\n\n")],
    ),
    Recorded(
        "markers inside a value",
        call("write_file", ("content", "<tool_call><function=now></function></tool_call>\n<parameter=x>\n")),
        [file(content="<tool_call><function=now></function></tool_call>\n<parameter=x>\n")],
    ),
    Recorded(
        "unicode",
        call("get_weather", ("city", "Zürich 東京 🌧️\t\x07")),
        [Call("get_weather", '{"city": "Zürich 東京 🌧️\\t\\u0007"}')],
    ),
    Recorded("empty values", call("write_file", ("path", ""), ("content", "\n")), [file(path="", content="\n")]),
    Recorded(
        "empty value, compact",
        "<function=write_file><parameter=path></parameter></function>",
        [file(path="")],
    ),
    Recorded(
        "spaces around a value are part of it",
        "<function=write_file><parameter=path> a </parameter><parameter=append> true </parameter></function>",
        [file(path=" a ", append=True)],
    ),
    Recorded(
        "nested JSON",
        call("write_file", ("lines", '[\n  {"a": "]\\"}"},\n  [1, [2]]\n]')),
        [Call("write_file", '{"lines": [\n  {"a": "]\\"}"},\n  [1, [2]]\n]}')],
    ),
    Recorded("JSON that is none", call("write_file", ("lines", "[1, 2,]")), [file(lines="[1, 2,]")]),
    Recorded("unknown tool", call("rm", ("path", "/")), [call("rm", ("path", "/"))]),
    Recorded(
        "unknown tool with a call inside",
        call("rm", ("path", "<function=now></function>")) + call("now"),
        [call("rm", ("path", "<function=now></function>")), NOW],
    ),
    Recorded("beginning of a known name", call("get_weath"), [call("get_weath")]),
    Recorded(
        "JSON instead", '<tool_call>\n{"name": "now"}\n</tool_call>', ['<tool_call>\n{"name": "now"}\n</tool_call>']
    ),
    Recorded("malformed before a parameter", "<function=now>\nx</function>", ["<function=now>\nx</function>"]),
    Recorded(
        "malformed between parameters",
        "<function=write_file><parameter=path>a</parameter> x </function>",
        [Call("write_file", '{"path": "a"', complete=False), "x </function>"],
    ),
    Recorded(
        "malformed key",
        "<function=now><parameter=a<b>c</parameter></function>",
        ["<function=now><parameter=a<b>c</parameter></function>"],
    ),
    Recorded("truncated in the name", "Hm <tool_call>\n<function=get_wea", ["Hm <tool_call>\n<function=get_wea"]),
    Recorded(
        "truncated in a key",
        "<tool_call>\n<function=now>\n<parameter=ci",
        ["<tool_call>\n<function=now>\n<parameter=ci"],
    ),
    Recorded(
        "truncated in a value",
        "<tool_call>\n<function=write_file>\n<parameter=path>\na.py\n</param",
        [Call("write_file", '{"path": "a.py\\n</param', complete=False)],
    ),
    Recorded(
        "truncated in a value that is no string",
        "<tool_call>\n<function=write_file>\n<parameter=path>\na\n</parameter>\n<parameter=mode>\n12",
        [Call("write_file", '{"path": "a"', complete=False), "<parameter=mode>\n12"],
    ),
    Recorded(
        "truncated between parameters",
        "<tool_call>\n<function=write_file>\n<parameter=path>\na\n</parameter>\n",
        [Call("write_file", '{"path": "a"', complete=False)],
    ),
]


@pytest.mark.parametrize("recorded", RECORDED, ids=str)
def test_streamed_equals_whole_and_the_written_result_at_every_cut(recorded: Recorded) -> None:
    check(lambda: TOOL_PARSERS["qwen3_coder"](TOOLS, counting_ids()), recorded)


def test_a_long_string_is_sent_while_it_is_written() -> None:
    parser = TOOL_PARSERS["qwen3_coder"](TOOLS)
    parser.feed("<tool_call>\n<function=write_file>\n<parameter=content>\n")
    assert parser.feed("line one\nline ") == [ToolCallArguments(0, "line one\\nline ")]


def test_types_of_a_schema_that_goes_in_circles() -> None:
    alternatives = [{"$ref": f"#/$defs/{name}"} for name in "abcdefgh"]
    schema = {
        "properties": {"x": {"$ref": "#/$defs/a"}, "y": {"const": None}, "z": True, "out": {"$ref": "http://x"}},
        "$defs": {name: {"anyOf": [*alternatives, {"type": "integer"}]} for name in "abcdefgh"},
    }
    assert parameter_types(schema, "x") == {"number"}
    assert parameter_types(schema, "y") == {"null"}
    assert parameter_types(schema, "z") == parameter_types(schema, "out") == parameter_types({}, "x") == frozenset()


def test_keys_are_json_too() -> None:
    parser = TOOL_PARSERS["qwen3_coder"]([Tool("f")])
    pieces = parser.feed('<function=f><parameter=a"b\\>x</parameter></function>')
    assert json.loads(fold(pieces).tool_calls[0].arguments) == {'a"b\\': "x"}
