"""[TOOL_CALLS], with an array behind it or a name and [ARGS]."""

from __future__ import annotations

import pytest

from service.parsers import TOOL_PARSERS, ToolCallStart
from tests.service.parsers.support import TOOLS, Call, Recorded, check, counting_ids

PARIS = Call("get_weather", '{"city": "Paris"}')
NOW = Call("now", "{}")

RECORDED = [
    Recorded("plain text", "See [1], [TOOL] and [TOOL_CALL]s.", ["See [1], [TOOL] and [TOOL_CALL]s."]),
    Recorded("array", '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Paris"}}]', [PARIS]),
    Recorded(
        "array of two",
        '[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Paris"}}, {"name": "now", "arguments": {}}]',
        [PARIS, NOW],
    ),
    Recorded(
        "array with ids",
        '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Paris"}, "id": "abc123DEF"}]',
        [PARIS],
    ),
    Recorded("arguments first", '[TOOL_CALLS][{"arguments": {"city": "Paris"}, "name": "get_weather"}]', [PARIS]),
    Recorded("arguments missing", '[TOOL_CALLS][{"name": "now"}]', [NOW]),
    Recorded("an object alone", '[TOOL_CALLS]{"name": "now", "arguments": {}}', [NOW]),
    Recorded("named", '[TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}', [PARIS]),
    Recorded("named, two", '[TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}[TOOL_CALLS]now[ARGS]{}', [PARIS, NOW]),
    Recorded("named, with a call id", '[TOOL_CALLS]get_weather[CALL_ID]abc123DEF[ARGS]{"city": "Paris"}', [PARIS]),
    Recorded("named, without [ARGS]", '[TOOL_CALLS]get_weather{"city": "Paris"}', [PARIS]),
    Recorded("named, with spaces", '[TOOL_CALLS] get_weather [ARGS] {"city": "Paris"} \n', [PARIS]),
    Recorded("beginning of another name", '[TOOL_CALLS]get[ARGS]{"url": "x"}', [Call("get", '{"url": "x"}')]),
    Recorded("text before", "One moment.\n[TOOL_CALLS]now[ARGS]{}", ["One moment.", NOW]),
    Recorded(
        "text between",
        "A [TOOL_CALLS]now[ARGS]{} then\n[TOOL_CALLS]now[ARGS]{}\n\nend",
        ["A", NOW, " then", NOW, "\n\nend"],
    ),
    Recorded(
        "nested braces, quotes and unicode",
        r'[TOOL_CALLS]write_file[ARGS]{"content": "{[\"]}\\", "lines": [[{"é": "漢🎈"}], {}]}',
        [Call("write_file", r'{"content": "{[\"]}\\", "lines": [[{"é": "漢🎈"}], {}]}')],
    ),
    Recorded(
        "markers inside a string",
        '[TOOL_CALLS]write_file[ARGS]{"content": "[TOOL_CALLS]now[ARGS]{}"}',
        [Call("write_file", '{"content": "[TOOL_CALLS]now[ARGS]{}"}')],
    ),
    Recorded(
        "unknown tool",
        '[TOOL_CALLS]rm[ARGS]{"path": "[TOOL_CALLS]now[ARGS]{}"}',
        ['[TOOL_CALLS]rm[ARGS]{"path": "[TOOL_CALLS]now[ARGS]{}"}'],
    ),
    Recorded(
        "unknown tool, then a known one",
        "[TOOL_CALLS]rm[ARGS]{} [TOOL_CALLS]now[ARGS]{}",
        ["[TOOL_CALLS]rm[ARGS]{}", NOW],
    ),
    Recorded(
        "unknown tool first in the array",
        '[TOOL_CALLS][{"name": "rm", "arguments": {}}, {"name": "now", "arguments": {}}]',
        ['[TOOL_CALLS][{"name": "rm", "arguments": {}}', NOW],
    ),
    Recorded(
        "unknown tool last in the array",
        '[TOOL_CALLS][{"name": "now", "arguments": {}}, {"name": "rm", "arguments": {}}]',
        [NOW, ', {"name": "rm", "arguments": {}}]'],
    ),
    Recorded("a longer name", "[TOOL_CALLS]nowadays[ARGS]{}", ["[TOOL_CALLS]nowadays[ARGS]{}"]),
    Recorded("no name", "[TOOL_CALLS][ARGS]{}", ["[TOOL_CALLS][ARGS]{}"]),
    Recorded("empty array", "[TOOL_CALLS][]", ["[TOOL_CALLS][]"]),
    Recorded("arguments that are no object", '[TOOL_CALLS]now[ARGS]"x"', ['[TOOL_CALLS]now[ARGS]"x"']),
    Recorded("name broken by the marker", "[TOOL_CALLS]no[TOOL_CALLS]now[ARGS]{}", ["[TOOL_CALLS]no", NOW]),
    Recorded("marker in prose", "The [TOOL_CALLS] token starts it.", ["The [TOOL_CALLS] token starts it."]),
    Recorded(
        "malformed array",
        '[TOOL_CALLS][{"name": "now", "arguments": {}} {"name": "now", "arguments": {}}]',
        [NOW, '{"name": "now", "arguments": {}}]'],
    ),
    Recorded(
        "malformed inside the arguments",
        '[TOOL_CALLS]get_weather[ARGS]{"city": "Paris" "days"}',
        [Call("get_weather", '{"city": "Paris" ', complete=False), '"days"}'],
    ),
    Recorded("truncated in the marker", "Hm [TOOL_CALLS", ["Hm [TOOL_CALLS"]),
    Recorded("truncated in the name", "[TOOL_CALLS]get_wea", ["[TOOL_CALLS]get_wea"]),
    Recorded("truncated in [ARGS]", "[TOOL_CALLS]get_weather[AR", ["[TOOL_CALLS]get_weather[AR"]),
    Recorded(
        "truncated in the arguments",
        '[TOOL_CALLS]get_weather[ARGS]{"city": "Pa',
        [Call("get_weather", '{"city": "Pa', complete=False)],
    ),
    Recorded("truncated in the array", '[TOOL_CALLS][{"name": "now", "arguments": {}}, {"na', [NOW, ', {"na']),
]


@pytest.mark.parametrize("recorded", RECORDED, ids=str)
def test_streamed_equals_whole_and_the_written_result_at_every_cut(recorded: Recorded) -> None:
    check(lambda: TOOL_PARSERS["mistral"](TOOLS, counting_ids()), recorded)


def test_own_ids_are_of_the_only_form_that_these_templates_take_back() -> None:
    parser = TOOL_PARSERS["mistral"](TOOLS)
    starts = [piece for piece in parser.feed("[TOOL_CALLS]now[ARGS]{}") if isinstance(piece, ToolCallStart)]
    assert [(len(start.id), start.id.isalnum()) for start in starts] == [(9, True)]
