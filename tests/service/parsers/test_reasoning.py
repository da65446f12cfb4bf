"""<think> and [THINK], alone and before tool calls."""

from __future__ import annotations

import pytest

from service.parsers import REASONING_PARSERS, TOOL_PARSERS, OutputParser
from tests.service.parsers.support import TOOLS, Call, Recorded, Thought, check, counting_ids

CALL_TEXT = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
NOW = Call("now", "{}")

RECORDED = [
    Recorded("plain text", "Four.\n", ["Four.\n"]),
    Recorded("block and answer", "<think>\n2 + 2...\n</think>\n\nFour.", [Thought("2 + 2..."), "Four."]),
    Recorded("compact", "<think>2 + 2</think>Four.", [Thought("2 + 2"), "Four."]),
    Recorded("space before", "\n <think>2 + 2</think> Four. \n", [Thought("2 + 2"), "Four. \n"]),
    Recorded("empty block", "<think>\n\n</think>\n\nFour.", ["Four."]),
    Recorded("nothing after", "<think>\nHm.\n</think>\n\n", [Thought("Hm.")]),
    Recorded("nothing", "", []),
    Recorded("only space", " \n", [" \n"]),
    Recorded("space inside", "<think>a\n\n  b\t</think>c\n\nd", [Thought("a\n\n  b"), "c\n\nd"]),
    Recorded("lines and unicode", "<think>é\n漢\n🎈</think>\nü", [Thought("é\n漢\n🎈"), "ü"]),
    Recorded("opening tag inside", "<think>a <think> b</think>c", [Thought("a <think> b"), "c"]),
    Recorded("closing tag again", "<think>a</think>b</think>c", [Thought("a"), "b</think>c"]),
    Recorded("block after content", "So <think>a</think> b", ["So <think>a</think> b"]),
    Recorded("second block", "<think>a</think>b<think>c</think>", [Thought("a"), "b<think>c</think>"]),
    Recorded("closing tag alone", "a</think>b", ["a</think>b"]),
    Recorded("parts of tags", "<think>a < b </thin </ think></think><", [Thought("a < b </thin </ think>"), "<"]),
    Recorded("another tag", "<thinking>a</thinking>", ["<thinking>a</thinking>"]),
    Recorded("truncated in the opening tag", " <thin", [" <thin"]),
    Recorded("truncated in the block", "<think>2 + \n", [Thought("2 + \n")]),
    Recorded("truncated in the closing tag", "<think>2 </thi", [Thought("2 </thi")]),
    Recorded("truncated behind the opening tag", "<think>\n", []),
    Recorded("call after the block", f"<think>\nTime?\n</think>\n\n{CALL_TEXT}", [Thought("Time?"), NOW]),
    Recorded("call and text", f"<think>T</think>\nOk.\n{CALL_TEXT}\nBye", [Thought("T"), "Ok.", NOW, "\nBye"]),
    Recorded("call inside the block", f"<think>{CALL_TEXT}</think>x", [Thought(CALL_TEXT), "x"]),
    Recorded("call without a block", CALL_TEXT, [NOW]),
    Recorded(
        "block inside an argument",
        '<tool_call>{"name": "get", "arguments": {"url": "<think>a</think>"}}</tool_call>',
        [Call("get", '{"url": "<think>a</think>"}')],
    ),
]

STARTS_INSIDE = [
    Recorded("block and answer", "\n2 + 2\n</think>\n\nFour.", [Thought("2 + 2"), "Four."]),
    Recorded("opening tag again", "<think>\n2 + 2\n</think>\n\nFour.", [Thought("2 + 2"), "Four."]),
    Recorded("opening tag later", "a <think> b</think>c", [Thought("a <think> b"), "c"]),
    Recorded("empty block", "\n</think>\n\nFour.", ["Four."]),
    Recorded("closed at once", "</think>Four.", ["Four."]),
    Recorded("never closed", "2 + 2 is\n", [Thought("2 + 2 is\n")]),
    Recorded("nothing", "", []),
    Recorded("then a call", f"Time?\n</think>\n{CALL_TEXT}", [Thought("Time?"), NOW]),
]


@pytest.mark.parametrize("recorded", RECORDED, ids=str)
def test_streamed_equals_whole_and_the_written_result_at_every_cut(recorded: Recorded) -> None:
    def make() -> OutputParser:
        return OutputParser(REASONING_PARSERS["think"](), TOOL_PARSERS["hermes"](TOOLS, counting_ids()))

    check(make, recorded)


@pytest.mark.parametrize("recorded", STARTS_INSIDE, ids=str)
def test_a_block_that_the_template_opened(recorded: Recorded) -> None:
    def make() -> OutputParser:
        return OutputParser(
            REASONING_PARSERS["think"](starts_inside=True), TOOL_PARSERS["hermes"](TOOLS, counting_ids())
        )

    check(make, recorded)


@pytest.mark.parametrize("recorded", [case for case in RECORDED if "tool_call" not in case.text], ids=str)
def test_mistral_blocks(recorded: Recorded) -> None:
    text, expected = recorded.text, recorded.expected

    def other(text: str) -> str:
        return text.replace("</think>", "[/THINK]").replace("<think>", "[THINK]")

    items = [Thought(other(item.text)) if isinstance(item, Thought) else other(str(item)) for item in expected]
    check(lambda: OutputParser(REASONING_PARSERS["mistral"](), None), Recorded("", other(text), items))


def test_whether_the_prompt_has_opened_the_block() -> None:
    think = REASONING_PARSERS["think"]
    assert think.opened_by("<|im_start|>assistant\n<think>\n")
    assert not think.opened_by("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert not think.opened_by("What does <think> mean?<|im_end|>\n<|im_start|>assistant\n")


def test_whether_an_answer_that_goes_on_is_inside_the_block() -> None:
    think = REASONING_PARSERS["think"]
    assert think.left_open_by("<think>") and think.left_open_by("\n<think>\nSo the")
    assert not think.left_open_by("<think>a</think>b")
    assert not think.left_open_by("") and not think.left_open_by("what <think> means")


def test_without_parsers_text_is_content() -> None:
    check(
        lambda: OutputParser(None, None),
        Recorded("", f"<think>a</think>{CALL_TEXT}\n", [f"<think>a</think>{CALL_TEXT}\n"]),
    )
