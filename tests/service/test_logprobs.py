"""Log probabilities: one finite entry for every token, with the text that it belongs to, streamed and not."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from engine.api import ChoiceUpdate, EndReason, TokenLogprobs
from engine.fake import FakeEngine
from service.choice_text import ChoiceEvent, ChoiceText, TextRules
from service.detokenizer import StopStrings
from service.parsers import REASONING_PARSERS, TOOL_PARSERS, OutputParser, Tool
from service.shown_logprobs import completion_logprobs
from service.token_entries import TokenEntry
from service.tokenizer import ByteTokenizer

from .apps import SETTINGS, Client, check_error, serving
from .folding import chunks_of, same_both_ways, whole

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
CHAT_BODY = {"model": "org/m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 9, "seed": 1, "n": 2}
COMPLETION_BODY = {"model": "org/m", "prompt": "hi", "max_tokens": 9, "seed": 1, "n": 2}


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    engine = FakeEngine(SETTINGS.engine_config(), logprob_rule=lambda seed, position: -0.5 * (position + 1))
    with serving(engine=engine) as client:
        yield client


@pytest.mark.parametrize("stop", [None, ["zzzz"], ["zzzz", "\n\n"], ["ab"], ["c"]])
def test_a_chat_has_one_entry_for_each_token_of_each_choice(client: Client, stop: list[str] | None) -> None:
    body = CHAT_BODY | {"logprobs": True, "top_logprobs": 3, "stop": stop}
    choices = same_both_ways(client, CHAT, body)
    entries = [choice["logprobs"]["content"] for choice in choices]
    assert sum(map(len, entries)) == whole(client, CHAT, body)["usage"]["completion_tokens"]
    for choice, own in zip(choices, entries, strict=True):
        assert "".join(entry["token"] for entry in own).startswith(choice["message"]["content"])
        for entry in own:
            assert bytes(entry["bytes"]).decode() == entry["token"]
            assert [top["logprob"] - entry["logprob"] for top in entry["top_logprobs"]] == [0, -1, -2]
            assert entry["top_logprobs"][0] == {key: entry[key] for key in ("token", "logprob", "bytes")}


def test_logprobs_alone_are_those_of_the_drawn_tokens(client: Client) -> None:
    for fields in ({"logprobs": True}, {"logprobs": True, "top_logprobs": 0}):
        for choice in same_both_ways(client, CHAT, CHAT_BODY | fields):
            assert [entry["top_logprobs"] for entry in choice["logprobs"]["content"]] == [[]] * 9
            assert [entry["logprob"] for entry in choice["logprobs"]["content"]] == [-0.5 * k for k in range(1, 10)]
    for given in (False, None):
        choices = same_both_ways(client, CHAT, CHAT_BODY | {"logprobs": given})
        assert [choice["logprobs"] for choice in choices] == [None, None]


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (CHAT, {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        (CHAT, {"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        (CHAT, {"logprobs": True, "top_logprobs": True}, "top_logprobs"),
        (CHAT, {"logprobs": False, "top_logprobs": 3}, "top_logprobs"),
        (CHAT, {"top_logprobs": 3}, "top_logprobs"),
        (CHAT, {"top_logprobs": 0}, "top_logprobs"),
        (CHAT, {"logprobs": 1}, "logprobs"),
        (COMPLETIONS, {"logprobs": 6}, "logprobs"),
        (COMPLETIONS, {"logprobs": -1}, "logprobs"),
        (COMPLETIONS, {"logprobs": True}, "logprobs"),
    ],
)
def test_what_is_no_count_is_refused_by_name(client: Client, path: str, fields: dict[str, Any], param: str) -> None:
    body = CHAT_BODY if path == CHAT else COMPLETION_BODY
    for stream in ({}, {"stream": True}):
        check_error(client.post(path, json=body | fields | stream), 400, param)


@pytest.mark.parametrize("k", [0, 1, 5])
def test_a_completion_has_lists_of_equal_length(client: Client, k: int) -> None:
    for choice in same_both_ways(client, COMPLETIONS, COMPLETION_BODY | {"logprobs": k, "stop": "kl"}):
        logprobs = choice["logprobs"]
        num_tokens = len(logprobs["tokens"])
        assert logprobs["token_logprobs"] == [-0.5 * n for n in range(1, num_tokens + 1)]
        # each token is one character; those of the hidden stop string are at the text's end
        assert logprobs["text_offset"] == [min(n, len(choice["text"])) for n in range(num_tokens)]
        if k == 0:
            assert logprobs["top_logprobs"] is None
        else:
            assert [len(top) for top in logprobs["top_logprobs"]] == [k] * num_tokens
            assert all(max(top, key=top.get) == token for top, token in zip(logprobs["top_logprobs"], logprobs["tokens"], strict=True))  # fmt: skip  # noqa: E501
    for choice in same_both_ways(client, COMPLETIONS, COMPLETION_BODY | {"logprobs": None}):
        assert choice["logprobs"] is None


def test_infinite_logprobs_are_bounded_and_the_certain_token_is_not_above_0() -> None:
    values = itertools.cycle([float("-inf"), 1e-7, -1e30])
    engine = FakeEngine(SETTINGS.engine_config(), logprob_rule=lambda seed, position: next(values))
    with serving(engine=engine) as client:
        for choice in whole(client, CHAT, CHAT_BODY | {"logprobs": True, "top_logprobs": 20})["choices"]:
            entries = choice["logprobs"]["content"]
            numbers = [number["logprob"] for entry in entries for number in (entry, *entry["top_logprobs"])]
            assert all(-9999 <= number <= 0 for number in numbers)
        for choice in whole(client, COMPLETIONS, COMPLETION_BODY | {"logprobs": 5})["choices"]:
            assert all(-9999 <= number <= 0 for number in choice["logprobs"]["token_logprobs"])


def test_a_part_of_a_character_keeps_its_bytes() -> None:
    entries = [TokenEntry(b"\xe2\x82", -1.0, ((b"\xe2\x82", -1.0), (b"\xe2", -2.0)), 0)]
    shown = completion_logprobs(entries, 2)
    assert shown.tokens == ["bytes:\\xe2\\x82"]
    assert shown.top_logprobs == [{"bytes:\\xe2\\x82": -1.0, "bytes:\\xe2": -2.0}]


TOOLS = [Tool("f", {})]
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'


def events_of(text: str, end: EndReason | None = None, *, stop: Sequence[str] = (), parser: Any = None) -> list[Any]:
    """One event for each byte, the engine's end with the last."""
    rules = TextRules(stop=tuple(stop), **({} if parser is None else {"new_parser": parser}))
    choice = ChoiceText(0, ByteTokenizer(), rules, StopStrings(stop), 0)
    events: list[ChoiceEvent] = []
    data = text.encode()
    for position, byte in enumerate(data):
        reason = end or EndReason.LENGTH if position == len(data) - 1 else None
        events.append(choice.advance(ChoiceUpdate((byte,), logprobs=(TokenLogprobs(byte, -1.0),), end_reason=reason)))
        if events[-1].end_reason is not None:
            break
    return events


PARSERS: dict[str, Any] = {
    "none": None,
    "tools": lambda: OutputParser(None, TOOL_PARSERS["hermes"](TOOLS)),
    "both": lambda: OutputParser(REASONING_PARSERS["think"](), TOOL_PARSERS["hermes"](TOOLS)),
}


@pytest.mark.parametrize("parser", PARSERS)
@pytest.mark.parametrize(
    "text",
    [
        "plain text, no more",
        "a <tool_cake",
        "a🧪b<",
        "<think> hm </think> so\n",
        f"<think>x</think>{CALL}",
        CALL + "\n x ",
    ],
)
@pytest.mark.parametrize("stop", [(), ("zz", "\n\n"), ("mor", "ma"), ("b<",)])
def test_every_entry_comes_once_in_order_and_not_before_the_end_of_its_text(
    parser: str, text: str, stop: tuple[str, ...]
) -> None:
    events = events_of(text, stop=stop, parser=PARSERS[parser])
    entries = [entry for event in events for entry in event.entries]
    counted = b"".join(bytes(event.token_ids) for event in events)
    assert b"".join(entry.token for entry in entries) == counted == text.encode()[: len(counted)]
    shown, spoken = "", b""
    for event in events[:-1]:
        shown += event.reasoning + event.text
        spoken += b"".join(entry.token for entry in event.entries)
        if parser == "none" and not event.entries:
            assert not event.text, "no text without its entries"
        if parser == "none":
            assert len(spoken.decode(errors="ignore")) <= len(shown), "no entry before its text"


def test_tokens_of_a_held_call_wait_for_it() -> None:
    events = events_of("ok " + CALL, parser=PARSERS["tools"])
    released = [b"".join(entry.token for entry in event.entries) for event in events]
    assert released[:3] == [b"o", b"k", b""]  # the space may stand before a call
    first = next(number for number, event in enumerate(events) if event.calls)
    assert not any(released[3:first])
    assert released[first].startswith(b" <tool_call>")


def test_reasoning_tokens_are_counted_with_the_tags_around_them() -> None:
    tags_and_thought = "<think>ab</think>"
    events = events_of(f"{tags_and_thought}cd", parser=PARSERS["both"])
    # the opening tag is known for one when it is complete
    assert sum(event.num_reasoning_tokens for event in events) == len(tags_and_thought) - len("<think")


def test_no_chunk_of_a_choice_repeats_or_invents_entries(client: Client) -> None:
    chunks = chunks_of(client, CHAT, CHAT_BODY | {"logprobs": True, "stop": ["efghijk"]})
    for chunk in chunks:
        (choice,) = chunk["choices"]
        if (content := choice["delta"].get("content")) and choice["logprobs"]:
            assert "".join(entry["token"] for entry in choice["logprobs"]["content"]) == content
