"""Tools: what the template is shown, what is enforced, and how calls come out, whole and streamed alike for every n."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from engine.api import JsonBlocks, TokenPrompt
from engine.fake import TokenRule
from service.call_forms import CALL_FORMS
from service.model_parsers import parsers_of
from service.tokenizer import ByteTokenizer

from .apps import SETTINGS, Client, check_error, serving
from .constrained import ConstrainedEngine
from .folding import chunks_of, same_both_ways, whole

PATH = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hi"}]
WEATHER = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "description": "so", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "now"}},
]
BODY: dict[str, Any] = {"model": "org/m", "messages": HELLO, "seed": 0, "tools": TOOLS}
NAMED = {"type": "function", "function": {"name": "now"}}


def script(*answers: str) -> TokenRule:
    """The choice with seed s says answers[s], then ends."""
    return lambda seed, position, _: [*answers[seed].encode(), 256][position]


@contextmanager
def model(*answers: str, tool_parser: str = "hermes", reasoning_parser: str = "none") -> Iterator[Client]:
    settings = replace(SETTINGS, tool_parser=tool_parser, reasoning_parser=reasoning_parser, max_model_len=2048)
    with serving(settings, engine=ConstrainedEngine(settings.engine_config(), rule=script(*answers))) as client:
        yield client


def engine_of(client: Client) -> ConstrainedEngine:
    engine: ConstrainedEngine = client.app.state.services.engine
    return engine


def prompt_of(client: Client) -> str:
    prompt = engine_of(client).batch[0].prompt
    assert isinstance(prompt, TokenPrompt)
    return bytes(token_id if token_id < 256 else ord("|") for token_id in prompt.token_ids).decode()


CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln \\"x\\"", "n": [1, {}]}}\n</tool_call>'
NO_ARGUMENTS = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'


def test_calls_come_out_alike_both_ways_for_every_choice() -> None:
    with model(CALL, f"Let me see.\n{CALL}\n{NO_ARGUMENTS}", "No tool needed <tool_cake>", NO_ARGUMENTS) as client:
        choices = same_both_ways(client, PATH, BODY | {"n": 4, "logprobs": True})
    messages = [choice["message"] for choice in choices]
    assert [message["content"] for message in messages] == [None, "Let me see.", "No tool needed <tool_cake>", None]
    assert [choice["finish_reason"] for choice in choices] == ["tool_calls", "tool_calls", "stop", "tool_calls"]
    names = [[call["function"]["name"] for call in message.get("tool_calls", [])] for message in messages]
    assert names == [["get_weather"], ["get_weather", "now"], [], ["now"]]
    arguments = [call["function"]["arguments"] for message in messages for call in message.get("tool_calls", [])]
    assert [json.loads(text) for text in arguments] == [{"city": 'Köln "x"', "n": [1, {}]}] * 2 + [{}] * 2
    ids = [call["id"] for message in messages for call in message.get("tool_calls", [])]
    assert len(set(ids)) == 4


def test_a_stream_of_calls_has_the_deltas_of_openai() -> None:
    with model(CALL + NO_ARGUMENTS) as client:
        chunks = chunks_of(client, PATH, BODY)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0] == {"role": "assistant", "content": None}
    calls = [call for delta in deltas for call in delta.get("tool_calls", [])]
    assert [call["index"] for call in calls if "id" in call] == [0, 1]
    assert all(call["function"].keys() == {"arguments"} for call in calls if "id" not in call)
    assert deltas[-1] == {} and chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"


def test_the_template_is_shown_all_tools_unless_none_may_be_called() -> None:
    with model("x") as client:
        whole(client, PATH, BODY)
        shown = json.loads(prompt_of(client).removeprefix("|").partition("|")[0])
        bare = {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}
        assert shown == [TOOLS[0], bare]
        whole(client, PATH, BODY | {"tool_choice": "none"})
        assert "get_weather" not in prompt_of(client)


def test_choice_none_leaves_calls_in_the_text() -> None:
    with model(CALL) as client:
        (choice,) = same_both_ways(client, PATH, BODY | {"tool_choice": "none"})
        assert choice["message"]["content"] == CALL and choice["finish_reason"] == "stop"


@pytest.mark.parametrize("family", [*CALL_FORMS, "qwen3_coder", "pythonic", "none"])
@pytest.mark.parametrize(
    ("fields", "names", "max_blocks"),
    [
        ({"tool_choice": "required"}, ["get_weather", "now"], None),
        ({"tool_choice": "required", "parallel_tool_calls": False}, ["get_weather", "now"], 1),
        ({"tool_choice": NAMED}, ["now"], 1),
        (
            {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [NAMED]}}},
            ["now"],
            None,
        ),
    ],
)
def test_forced_calls_are_a_constraint_in_the_family_s_own_form_that_its_parser_reads(
    family: str, fields: dict[str, Any], names: list[str], max_blocks: int | None
) -> None:
    with model("x", tool_parser=family) as client:
        whole(client, PATH, BODY | fields)
        (constraint,) = engine_of(client).constraints
    assert isinstance(constraint, JsonBlocks)
    assert constraint.max_blocks == max_blocks
    schemas = [json.loads(block.value.schema) for block in constraint.blocks]
    assert schemas == [{"get_weather": WEATHER, "now": {"type": "object", "properties": {}}}[name] for name in names]
    # what the grammar allows, as a model would write it
    values = ['{"city": "x"}', "{}"] if len(names) == 2 else ["{}"]
    blocks = [block.before + value + block.after for block, value in zip(constraint.blocks, values, strict=True)]
    texts = blocks[:max_blocks]
    with model(constraint.start + constraint.separator.join(texts) + constraint.end, tool_parser=family) as client:
        (choice,) = same_both_ways(client, PATH, BODY | fields)
    calls = [call["function"] for call in choice["message"]["tool_calls"]]
    assert [(call["name"], call["arguments"]) for call in calls] == list(zip(names, values, strict=True))[:max_blocks]
    assert choice["message"]["content"] is None
    assert choice["finish_reason"] == ("stop" if fields["tool_choice"] is NAMED else "tool_calls")


def test_a_call_cut_short_is_length() -> None:
    with model(CALL) as client:
        (choice,) = same_both_ways(client, PATH, BODY | {"max_tokens": len(CALL.encode()) - 20})
    assert choice["finish_reason"] == "length"
    assert CALL.partition('"arguments": ')[2].startswith(choice["message"]["tool_calls"][0]["function"]["arguments"])


@pytest.mark.parametrize("rest", ["", "\n", " and more"])
def test_without_parallel_calls_a_choice_ends_behind_its_first(rest: str) -> None:
    with model(f"{CALL}\n{NO_ARGUMENTS}{rest}", CALL) as client:
        choices = same_both_ways(client, PATH, BODY | {"parallel_tool_calls": False, "n": 2})
    assert [len(choice["message"]["tool_calls"]) for choice in choices] == [1, 1]
    assert [choice["finish_reason"] for choice in choices] == ["tool_calls"] * 2


def test_allowed_tools_are_shown_all_and_called_some() -> None:
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [NAMED]}}
    with model(CALL, NO_ARGUMENTS) as client:
        choices = same_both_ways(client, PATH, BODY | {"tool_choice": allowed, "n": 2})
        assert "get_weather" in prompt_of(client)
    assert choices[0]["message"]["content"] == CALL
    assert choices[1]["message"]["tool_calls"][0]["function"]["name"] == "now"


BAD = [
    ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools[0].type"),
    ({"tools": [TOOLS[0], TOOLS[0]]}, "tools[1].function.name"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]}, "tools[0].function.parameters"),
    ({"tools": TOOLS * 65}, "tools"),
    ({"tool_choice": "any"}, "tool_choice"),
    ({"tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
    ({"tool_choice": "required", "tools": []}, "tool_choice"),
    ({"tool_choice": NAMED, "tools": None}, "tool_choice"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"structured_outputs": {"regex": "x"}}, "structured_outputs"),
    (
        {
            "tool_choice": "required",
            "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}],
        },
        "tools[0].function.parameters",
    ),
]


@pytest.mark.parametrize(("fields", "param"), BAD)
def test_tools_that_make_no_sense_are_refused_by_name(fields: dict[str, Any], param: str) -> None:
    with model("x") as client:
        for stream in ({}, {"stream": True}):
            check_error(client.post(PATH, json=BODY | fields | stream), 400, param)


def test_a_model_without_tools_refuses_those_that_it_may_call_and_no_others() -> None:
    with model("x", tool_parser="none") as client:
        check_error(client.post(PATH, json=BODY), 400, "tools", "unsupported_parameter")
        assert client.post(PATH, json=BODY | {"tool_choice": "none"}).status_code == 200
        assert client.post(PATH, json=BODY | {"tool_choice": "required"}).status_code == 200


def test_a_conversation_with_calls_reaches_the_template_with_arguments_as_objects() -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "now", "arguments": '{"zone": ["x"]}'}}
    history = [
        *HELLO,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "noon"}]},
        {"role": "assistant", "content": "so", "function_call": {"name": "now", "arguments": ""}},
        {"role": "function", "name": "now", "content": "one"},
    ]
    with model("x") as client:
        whole(client, PATH, {"model": "org/m", "messages": history, "seed": 0})
        prompt = prompt_of(client)
        assert '"arguments": {"zone": ["x"]}' in prompt and '"arguments": {}' in prompt
        assert "|tool\nnoon|" in prompt and "|tool\none|" in prompt
        for arguments in ("[]", "{", "1", "null", "[" * 100_000):
            bad = [
                *HELLO,
                {"role": "assistant", "tool_calls": [call | {"function": {"name": "f", "arguments": arguments}}]},
            ]
            response = client.post(PATH, json={"model": "org/m", "messages": bad})
            check_error(response, 400, "messages[1].tool_calls[0].function.arguments")


@pytest.mark.parametrize("family", CALL_FORMS)
def test_a_template_that_knows_no_calls_gets_them_as_the_model_writes_them(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the history of a conversation with tools has no content, which such templates cannot render."""
    monkeypatch.setattr(ByteTokenizer, "chat_template", "{{ messages }}")
    calls = [
        {"id": str(place), "type": "function", "function": {"name": name, "arguments": arguments}}
        for place, (name, arguments) in enumerate([("get_weather", '{"city": "Köln"}'), ("now", "{}")])
    ]
    text = CALL_FORMS[family].written([("get_weather", '{"city": "Köln"}'), ("now", "{}")])
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "x"} for call in calls]
    with model(text, tool_parser=family) as client:
        for content, expected in ((None, text), ("Let me see.", f"Let me see.\n{text}")):
            history = [*HELLO, {"role": "assistant", "content": content, "tool_calls": calls}, *results]
            answer = whole(client, PATH, BODY | {"messages": history})
            assert f"|assistant\n{expected}|" in prompt_of(client)
        found = answer["choices"][0]["message"]["tool_calls"]
    assert [call["function"]["name"] for call in found] == ["get_weather", "now"]


@pytest.mark.parametrize("family", CALL_FORMS)
@pytest.mark.parametrize(
    ("first", "shape"),
    [
        ([], "|user\n{tools}\n\nhi|"),
        ([{"role": "system", "content": "Be brief."}], "|system\nBe brief.\n\n{tools}||user\nhi|"),
        ([{"role": "assistant", "content": "Hello."}], "|user\n{tools}||assistant\nHello.||user\nhi|"),
    ],
)
def test_a_template_that_knows_no_tools_gets_them_as_text_and_calls_are_found(
    family: str, first: list[dict[str, str]], shape: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else agents get a 400 from a model whose template is a plain one, the default model's among them."""
    monkeypatch.setattr(ByteTokenizer, "chat_template", "{{ messages }}")
    text = CALL_FORMS[family].written([("get_weather", '{"city": "Köln"}')])
    with model(text, tool_parser=family) as client:
        (choice,) = same_both_ways(client, PATH, BODY | {"messages": [*first, *HELLO]})
        prompt = prompt_of(client)
    before, after = shape.split("{tools}")
    assert prompt.startswith(before) and after in prompt
    shown = [json.loads(line) for line in prompt.split("<tools>\n")[1].split("\n</tools>")[0].splitlines()]
    assert [function["name"] for function in shown] == ["get_weather", "now"] and shown[0]["parameters"] == WEATHER
    assert CALL_FORMS[family].before.format("name of the function") in prompt
    (call,) = choice["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"city": "Köln"}


def test_a_template_that_knows_no_tools_gets_their_results_from_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    """Templates without tools refuse the role, or leave such messages out."""
    monkeypatch.setattr(ByteTokenizer, "chat_template", "{{ messages }}")
    calls = [{"id": key, "type": "function", "function": {"name": "now", "arguments": "{}"}} for key in "ab"]
    results = [{"role": "tool", "tool_call_id": key, "content": f"noon {key}"} for key in "ab"]
    history = [*HELLO, {"role": "assistant", "content": None, "tool_calls": calls}, *results]
    with model("x") as client:
        for tools in (TOOLS, None):
            whole(client, PATH, BODY | {"messages": [*history, *HELLO], "tools": tools})
            told = "<tool_response>\nnoon a\n</tool_response>\n<tool_response>\nnoon b\n</tool_response>"
            assert f"|user\n{told}||user\nhi|" in prompt_of(client)


@pytest.mark.parametrize(
    ("template", "setting", "expected"),
    [
        ("{{ messages }}", "auto", "hermes"),
        ("{{ messages }}", "none", None),
        ("{{ messages }}", "mistral", "mistral"),
        ("{{ messages }} {{ tools }}", "auto", None),
    ],
)
def test_the_common_form_is_for_templates_that_know_no_tools(
    template: str, setting: str, expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ByteTokenizer, "chat_template", template)
    assert parsers_of(ByteTokenizer(), setting, "none").tools == expected


def test_an_answer_with_calls_is_taken_back_as_it_came() -> None:
    with model(CALL) as client:
        message = whole(client, PATH, BODY)["choices"][0]["message"]
        result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "rain"}
        assert client.post(PATH, json=BODY | {"messages": [*HELLO, message, result]}).status_code == 200


THOUGHT = "<think>\nHm, so.\n</think>\n\n"


def test_reasoning_is_told_apart_both_ways_for_every_choice() -> None:
    answers = (f"{THOUGHT}Yes.", "No thought.", f"{THOUGHT}{CALL}", "<think>unended")
    with model(*answers, reasoning_parser="think") as client:
        choices = same_both_ways(client, PATH, BODY | {"n": 4, "logprobs": True, "top_logprobs": 2})
        usage = whole(client, PATH, BODY | {"n": 4})["usage"]
    messages = [choice["message"] for choice in choices]
    assert [message.get("reasoning_content") for message in messages] == ["Hm, so.", None, "Hm, so.", "unended"]
    assert [message["content"] for message in messages] == ["Yes.", "No thought.", None, None]
    assert messages[2]["tool_calls"][0]["function"]["name"] == "get_weather"
    for answer, choice in zip(answers, choices, strict=True):
        assert len(choice["logprobs"]["content"]) == len(answer.encode()) + 1  # and the end of sequence
    thought = len(">\nHm, so.\n</think>")
    assert usage["completion_tokens_details"]["reasoning_tokens"] == 2 * thought + len(">unended") + 1


def test_reasoning_that_the_prompt_has_opened_needs_no_tag() -> None:
    opened = [*HELLO, {"role": "user", "content": "<think>"}]

    with model("so</think>Yes.", reasoning_parser="think") as client:
        body = {"model": "org/m", "messages": opened, "seed": 0}
        (closed,) = same_both_ways(client, PATH, body)
        assert "reasoning_content" not in closed["message"], "a user's own tag opens nothing"


def test_a_model_without_reasoning_keeps_its_text() -> None:
    with model(f"{THOUGHT}Yes.") as client:
        (choice,) = same_both_ways(client, PATH, BODY | {"tools": None})
    assert choice["message"]["content"] == f"{THOUGHT}Yes."


def test_constrained_text_is_no_reasoning() -> None:
    with model('{"a": 1}', reasoning_parser="think") as client:
        (choice,) = same_both_ways(client, PATH, BODY | {"tools": None, "response_format": {"type": "json_object"}})
    assert choice["message"]["content"] == '{"a": 1}'


@pytest.mark.parametrize("stop", ['"city"', "</tool_call>", "see"])
def test_stop_strings_cut_before_the_parsers_read(stop: str) -> None:
    with model(f"Let me see.\n{CALL}") as client:
        (choice,) = same_both_ways(client, PATH, BODY | {"stop": stop, "logprobs": True})
    assert choice["stop_reason"] == stop
    shown = json.dumps(choice["message"], ensure_ascii=False)
    assert stop not in shown
