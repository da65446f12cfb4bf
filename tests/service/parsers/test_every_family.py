"""What holds for all tool parsers alike."""

from __future__ import annotations

import json
import random

import pytest

from service.parsers import TOOL_PARSERS, ContentDelta, Tool, ToolCallArguments, ToolCallStart, fold
from tests.service.parsers import (
    test_deepseek,
    test_hermes,
    test_llama,
    test_mistral,
    test_pythonic,
    test_qwen3_coder,
)
from tests.service.parsers.support import TOOLS, Call, Recorded, counting_ids, random_cuts, read

RECORDED: dict[str, list[Recorded]] = {
    "deepseek": test_deepseek.RECORDED,
    "hermes": test_hermes.RECORDED,
    "llama3_json": test_llama.RECORDED,
    "mistral": test_mistral.RECORDED,
    "pythonic": test_pythonic.RECORDED,
    "qwen3_coder": test_qwen3_coder.RECORDED,
}
FAMILIES = sorted(TOOL_PARSERS)
OF_ALL = [(family, recorded) for family in FAMILIES for recorded in RECORDED[family]]
each_family = pytest.mark.parametrize("family", FAMILIES)


def test_each_family_has_its_recorded_outputs() -> None:
    assert sorted(RECORDED) == FAMILIES
    assert all(len(cases) >= 20 for cases in RECORDED.values())


@each_family
def test_text_is_never_lost_when_no_tool_is_named_in_it(family: str) -> None:
    for recorded in RECORDED[family]:
        parser = TOOL_PARSERS[family]([Tool("unheard_of")])
        message = fold(read(parser, list(recorded.text)))
        assert (message.content, message.tool_calls) == (recorded.text, ())


@each_family
def test_any_mixture_of_outputs_reads_the_same_however_it_is_cut(family: str) -> None:
    """Halves of recorded outputs put together: grammars broken off and begun again in every state."""
    draw = random.Random(family)
    for _ in range(80):
        texts = [recorded.text for recorded in draw.choices(RECORDED[family], k=3)]
        text = "".join(part[draw.randint(0, len(part)) :][: draw.randint(1, 80)] for part in texts)
        whole = read(TOOL_PARSERS[family](TOOLS, counting_ids()), [text])
        for cuts in [list(text), *random_cuts(text, 4, draw)]:
            assert read(TOOL_PARSERS[family](TOOLS, counting_ids()), cuts) == whole, cuts


@each_family
def test_prose_is_not_held_back(family: str) -> None:
    parser = TOOL_PARSERS[family](TOOLS)
    for character in "It's sunny in Paris: 22 degrees, wind 3 m/s (light).":
        sent = parser.feed(character)
        assert bool(sent) == (character != " ")


@each_family
def test_a_start_comes_before_the_arguments_and_tells_id_and_name_once(family: str) -> None:
    for recorded in RECORDED[family]:
        started = -1
        for piece in (piece for text in recorded.text for piece in TOOL_PARSERS[family](TOOLS).feed(text)):
            if isinstance(piece, ToolCallStart):
                started += 1
                assert piece.index == started
            elif isinstance(piece, ToolCallArguments):
                assert piece.index == started
                assert piece.json_fragment


@each_family
def test_own_ids_differ(family: str) -> None:
    two_calls = next(
        recorded.text for recorded in RECORDED[family] if [type(item) for item in recorded.expected] == [Call, Call]
    )
    calls = fold(read(TOOL_PARSERS[family](TOOLS), [two_calls])).tool_calls
    assert len({call.id for call in calls}) == 2
    if family != "mistral":
        assert all(call.id.startswith("call_") and len(call.id) == 29 for call in calls)


@pytest.mark.parametrize(
    ("family", "before", "pieces"),
    [
        ("hermes", '<tool_call>{"name": "get", "arguments": ', ['{"url": "', "x y", ' z"', "}"]),
        ("llama3_json", '{"name": "get", "parameters": ', ['{"url": "', "x y", ' z"', "}"]),
        ("mistral", "[TOOL_CALLS]get[ARGS]", ['{"url": "', "x y", ' z"', "}"]),
        ("deepseek", "<｜tool▁call▁begin｜>get<｜tool▁sep｜>", ['{"url": "', "x y", ' z"', "}"]),
    ],
)
def test_json_arguments_are_sent_as_they_come(family: str, before: str, pieces: list[str]) -> None:
    parser = TOOL_PARSERS[family](TOOLS)
    parser.feed(before)
    fragments = [[piece for piece in parser.feed(text) if isinstance(piece, ToolCallArguments)] for text in pieces]
    assert fragments == [[ToolCallArguments(0, text)] for text in pieces]


@each_family
@pytest.mark.parametrize("repeated", ["[", "{", "<tool_call>{", '{"name":"get","arguments":', "\n", "[get(", '"', "-"])
def test_a_model_in_a_loop_needs_no_stack(family: str, repeated: str) -> None:
    text = repeated * 2000
    whole = read(TOOL_PARSERS[family](TOOLS, counting_ids()), [text])
    pieces = [text[start : start + 7] for start in range(0, len(text), 7)]
    assert read(TOOL_PARSERS[family](TOOLS, counting_ids()), pieces) == whole


def test_deeply_nested_arguments_need_no_stack() -> None:
    arguments = '{"a": ' + "[" * 50_000 + "]" * 50_000 + "}"
    text = f'<tool_call>{{"arguments": {arguments}, "name": "now"}}</tool_call>'
    assert fold(read(TOOL_PARSERS["hermes"](TOOLS), [text])).tool_calls[0].arguments == arguments


def test_content_deltas_are_never_empty() -> None:
    for family, recorded in OF_ALL:
        parser = TOOL_PARSERS[family](TOOLS)
        pieces = [piece for text in recorded.text for piece in parser.feed(text)] + parser.finish()
        assert all(piece.text for piece in pieces if isinstance(piece, ContentDelta))


def test_complete_calls_have_arguments_that_the_client_can_read() -> None:
    for family, recorded in OF_ALL:
        complete = [item.complete for item in recorded.expected if isinstance(item, Call)]
        calls = fold(read(TOOL_PARSERS[family](TOOLS), [recorded.text])).tool_calls
        assert all(
            isinstance(json.loads(call.arguments), dict) for call, whole in zip(calls, complete, strict=True) if whole
        )
