"""DeepSeek V3, R1 and V3.1."""

from __future__ import annotations

import pytest

from service.parsers import TOOL_PARSERS, Tool
from tests.service.parsers.support import TOOLS, Call, Recorded, check, counting_ids

BEGIN, END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, SEP, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"


def v3(name: str, arguments: str) -> str:
    return f"{CALL}function{SEP}{name}\n```json\n{arguments}\n```{CALL_END}"


def v31(name: str, arguments: str) -> str:
    return f"{CALL}{name}{SEP}{arguments}{CALL_END}"


PARIS = Call("get_weather", '{"city": "Paris"}')
NOW = Call("now", "{}")
V3_PARIS = v3("get_weather", '{"city": "Paris"}')
V31_PARIS = v31("get_weather", '{"city": "Paris"}')
HARD = r'{"content": "{\"a\": [\"```\"]}\\ é 漢 🎈", "lines": [{"b": [{}, []]}], "n": -1.5e+3}'

RECORDED = [
    Recorded("plain text", "a <b <｜ c", ["a <b <｜ c"]),
    Recorded("v3", BEGIN + V3_PARIS + END, [PARIS]),
    Recorded("v3, two calls", f"{BEGIN}{V3_PARIS}\n{v3('now', '{}')}{END}", [PARIS, NOW]),
    Recorded("v3, text before", f"Let me see.\n\n{BEGIN}{V3_PARIS}{END}", ["Let me see.", PARIS]),
    Recorded("v3, hard arguments", BEGIN + v3("write_file", HARD) + END, [Call("write_file", HARD)]),
    Recorded("v3, no fence at the end", f"{BEGIN}{CALL}function{SEP}now\n```json\n{{}}{CALL_END}{END}", [NOW]),
    Recorded("v3, no markers at the end", f"{BEGIN}{CALL}function{SEP}now\n```json\n{{}}\n```", [NOW]),
    Recorded("v3, spaces", f"{BEGIN} {CALL} function {SEP} now \n\n```json {{}} \n``` {CALL_END} {END} ", [NOW]),
    Recorded("v3, without the outer markers", V3_PARIS, [PARIS]),
    Recorded("v3, unknown tool", BEGIN + v3("rm", '{"p": "/"}') + END, [BEGIN + v3("rm", '{"p": "/"}') + END]),
    Recorded(
        "v3, unknown between known",
        BEGIN + V3_PARIS + v3("rm", "{}") + v3("now", "{}") + END,
        [PARIS, v3("rm", "{}"), NOW],
    ),
    Recorded("v3, no fence", f"{CALL}function{SEP}now\n{{}}{CALL_END}", [f"{CALL}function{SEP}now\n{{}}{CALL_END}"]),
    Recorded("v3, another kind", f"{CALL}tool{SEP}now\n```json\n{{}}```", [f"{CALL}tool{SEP}now\n```json\n{{}}```"]),
    Recorded(
        "v3, malformed inside the arguments",
        BEGIN + v3("get_weather", "{'city': 1}") + END,
        [Call("get_weather", "{", complete=False), f"'city': 1}}\n```{CALL_END}{END}"],
    ),
    Recorded(
        "v3, truncated in the arguments",
        f'{BEGIN}{CALL}function{SEP}get_weather\n```json\n{{"city": "Pa',
        [Call("get_weather", '{"city": "Pa', complete=False)],
    ),
    Recorded(
        "v3, truncated in the fence", f"{BEGIN}{CALL}function{SEP}now\n```js", [f"{BEGIN}{CALL}function{SEP}now\n```js"]
    ),
    Recorded(
        "v3, markers inside a string",
        BEGIN + v3("write_file", f'{{"content": "{CALL_END}{END}```"}}') + END,
        [Call("write_file", f'{{"content": "{CALL_END}{END}```"}}')],
    ),
    Recorded("v3.1", BEGIN + V31_PARIS + END, [PARIS]),
    Recorded("v3.1, two calls", BEGIN + V31_PARIS + v31("now", "{}") + END, [PARIS, NOW]),
    Recorded("v3.1, text around", f"Hm: {BEGIN}{V31_PARIS}{END}\n\nSo.", ["Hm:", PARIS, "\n\nSo."]),
    Recorded("v3.1, text between", f"{BEGIN}{V31_PARIS} and {v31('now', '{}')}{END}", [PARIS, "and", NOW]),
    Recorded("v3.1, hard arguments", BEGIN + v31("write_file", HARD) + END, [Call("write_file", HARD)]),
    Recorded("v3.1, beginning of another name", v31("get", '{"url": ""}'), [Call("get", '{"url": ""}')]),
    Recorded("v3.1, beginning of a known name", v31("get_w", "{}"), [v31("get_w", "{}")]),
    Recorded(
        "v3.1, unknown tool with a call inside",
        BEGIN + v31("rm", f'{{"x": "{CALL}now{SEP}{{}}"}}'),
        [BEGIN + v31("rm", f'{{"x": "{CALL}now{SEP}{{}}"}}')],
    ),
    Recorded(
        "v3.1, unknown, then known", BEGIN + v31("rm", "{}") + v31("now", "{}") + END, [BEGIN + v31("rm", "{}"), NOW]
    ),
    Recorded("v3.1, arguments that are no object", v31("now", "[]"), [v31("now", "[]")]),
    Recorded("v3.1, a tool that nobody gave called function", v31("function", "{}"), [v31("function", "{}")]),
    Recorded(
        "v3.1, malformed inside the arguments",
        BEGIN + v31("now", '{"a": tru}') + END,
        [Call("now", '{"a": tru', complete=False), "}" + CALL_END + END],
    ),
    Recorded("truncated in the marker", "Hm <｜tool▁calls", ["Hm <｜tool▁calls"]),
    Recorded("truncated in the name", f"Hm {BEGIN}{CALL}get_we", [f"Hm {BEGIN}{CALL}get_we"]),
    Recorded("truncated before the end", BEGIN + V31_PARIS.removesuffix(CALL_END), [PARIS]),
    Recorded("no call inside", f"{BEGIN}nothing{END}", [f"{BEGIN}nothing{END}"]),
    Recorded("a name over two lines", f"{CALL}get\n{SEP}{{}}", [f"{CALL}get\n{SEP}{{}}"]),
]


@pytest.mark.parametrize("recorded", RECORDED, ids=str)
def test_streamed_equals_whole_and_the_written_result_at_every_cut(recorded: Recorded) -> None:
    check(lambda: TOOL_PARSERS["deepseek"](TOOLS, counting_ids()), recorded)


@pytest.mark.parametrize("text", [v3("function", "{}"), v31("function", "{}")], ids=["v3", "v3.1"])
def test_a_tool_may_be_called_function(text: str) -> None:
    recorded = Recorded("", text, [Call("function", "{}")])
    check(lambda: TOOL_PARSERS["deepseek"]([Tool("function")], counting_ids()), recorded)
