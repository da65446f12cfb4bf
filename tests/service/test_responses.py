"""POST /v1/responses, nothing stored: what an answer has, streamed and not, and what of a request counts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from engine.api import JsonBlocks, JsonObject, JsonSchema, TokenPrompt
from service.tokenizer import ByteTokenizer

from .apps import SETTINGS, Client, check_error, serving
from .constrained import ConstrainedEngine
from .response_folding import PATH, events_of, folded, parsed, same_both_ways, whole_response

BODY: dict[str, Any] = {"model": "org/m", "input": "hi", "seed": 0}
THOUGHT = "<think>Hm.</think>"
CALL = '<tool_call>{"name": "f", "arguments": {"x": "ö"}}</tool_call>'
TOOLS = [{"type": "function", "name": "f", "parameters": {"type": "object"}}]
LOGPROBS = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}

ANSWERS = {
    "text": "Grüße!",
    "nothing": "",
    "reasoning": f"{THOUGHT}So be it.",
    "only reasoning": THOUGHT,
    "call": CALL,
    "text, then calls": f"Well: {CALL}\n{CALL}",
    "a call, then text": f"{CALL} That is all.",
    "all of it": f"{THOUGHT}Well: {CALL} And: {CALL} Done.",
}


@contextmanager
def answering(answer: str) -> Iterator[tuple[Client, ConstrainedEngine]]:
    settings = replace(SETTINGS, tool_parser="hermes", reasoning_parser="think", max_model_len=1024)

    tokens: list[int] = [*answer.encode(), 256]

    def rule(_: int, position: int, __: int) -> int:
        return tokens[position]

    engine = ConstrainedEngine(settings.engine_config(), rule=rule)
    with serving(settings, engine=engine) as client:
        yield client, engine


@pytest.fixture(scope="module", params=["asyncio", "trio"])
def client(request: pytest.FixtureRequest) -> Iterator[Client]:
    """The choice says letters, without an end."""
    with serving(backend=request.param) as client:
        yield client


@pytest.fixture(scope="module")
def engine() -> ConstrainedEngine:
    return ConstrainedEngine(replace(SETTINGS, tool_parser="hermes").engine_config())


@pytest.fixture(scope="module")
def seeing(engine: ConstrainedEngine) -> Iterator[Client]:
    """`engine` shows what was asked of it."""
    with serving(replace(SETTINGS, tool_parser="hermes"), engine=engine) as client:
        yield client


def prompt_of(engine: ConstrainedEngine) -> str:
    """Its messages as `role: text`, one a line."""
    prompt, tokenizer = engine.batch[0].prompt, ByteTokenizer()
    assert isinstance(prompt, TokenPrompt)
    text = b"".join(map(tokenizer.token_bytes, prompt.token_ids)).decode()
    return text.replace("<|end|>", "").replace("\n", ": ").removeprefix("<|start|>").replace("<|start|>", "\n")


@pytest.mark.parametrize("more", [{}, LOGPROBS, {"max_streaming_response_tokens": 7}], ids=["-", "logprobs", "chunks"])
@pytest.mark.parametrize("name", ANSWERS)
def test_a_stream_says_what_the_body_says(name: str, more: dict[str, Any]) -> None:
    with answering(ANSWERS[name]) as (client, _):
        body = BODY | {"tools": TOOLS, **more}
        streamed = folded(events_of(client, body))
        body.pop("max_streaming_response_tokens", None)
        answer = same_both_ways(client, body)
        assert [item["type"] for item in streamed["output"]] == [item["type"] for item in answer["output"]]
    assert (answer["status"], answer["end_reason"]) == ("completed", "stop")
    texts = [item["content"][0]["text"] for item in answer["output"] if item["type"] == "message"]
    expected = {
        "text": ["Grüße!"],
        "nothing": [""],
        "reasoning": ["So be it."],
        "only reasoning": [""],
        "call": [],
        "text, then calls": ["Well:"],
        "a call, then text": ["That is all."],
        "all of it": ["Well:", "And:", "Done."],
    }
    assert texts == expected[name]
    calls = [item for item in answer["output"] if item["type"] == "function_call"]
    assert [(call["name"], call["arguments"]) for call in calls] == [("f", '{"x": "ö"}')] * ANSWERS[name].count(CALL)
    assert answer["usage"]["output_tokens"] == len(ANSWERS[name].encode()) + 1


def test_every_token_has_its_logprob(client: Client) -> None:
    answer = whole_response(client, BODY | LOGPROBS | {"max_output_tokens": 5})
    (message,) = answer["output"]
    logprobs = message["content"][0]["logprobs"]
    assert "".join(entry["token"] for entry in logprobs) == message["content"][0]["text"]
    assert [len(entry["top_logprobs"]) for entry in logprobs] == [2] * 5
    assert answer["top_logprobs"] == 2


def test_an_answer_that_is_cut_short_is_incomplete(client: Client) -> None:
    answer = same_both_ways(client, BODY | {"max_output_tokens": 3})
    assert answer["status"] == "incomplete"
    assert answer["incomplete_details"] == {"reason": "max_output_tokens"}
    assert answer["end_reason"] == "length"
    assert [item["status"] for item in answer["output"]] == ["incomplete"]


def test_a_call_that_is_cut_short_is_incomplete() -> None:
    num_tokens = CALL.index(":", CALL.index("x"))
    with answering(CALL) as (client, _):
        answer = same_both_ways(client, BODY | {"tools": TOOLS, "max_output_tokens": num_tokens})
    (call,) = answer["output"]
    assert (call["status"], call["arguments"]) == ("incomplete", '{"x"')


def test_the_answer_repeats_the_request(client: Client) -> None:
    asked = {
        "instructions": "be brief",
        "max_output_tokens": 2,
        "metadata": {"a": "b"},
        "parallel_tool_calls": False,
        "temperature": 0.5,
        "top_p": 0.9,
        "truncation": "auto",
        "user": "u",
        "safety_identifier": "s",
        "prompt_cache_key": "k",
        "store": False,
    }
    answer = same_both_ways(client, BODY | asked)
    assert {name: answer[name] for name in asked} == asked
    assert answer["text"] == {"format": {"type": "text"}, "verbosity": "medium"}
    assert (answer["tool_choice"], answer["tools"], answer["service_tier"]) == ("auto", [], "default")
    assert (answer["object"], answer["background"], answer["previous_response_id"]) == ("response", False, None)


def test_the_id_is_the_headers(client: Client) -> None:
    response = client.post(PATH, json=BODY | {"max_output_tokens": 1}, headers={"X-Request-Id": "r"})
    assert response.json()["id"] == response.headers["x-chorus-response-id"]
    assert response.headers["x-request-id"] == "r"


def test_nothing_is_stored_without_a_store(client: Client) -> None:
    answer = whole_response(client, BODY | {"store": True, "max_output_tokens": 1})
    assert answer["store"] is False
    body = BODY | {"previous_response_id": answer["id"]}
    check_error(client.post(PATH, json=body), 404, "previous_response_id", "previous_response_not_found")


ITEMS = [
    {"role": "developer", "content": "Rules."},
    {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
    {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "t"}]},
    {
        "type": "message",
        "id": "msg_1",
        "role": "assistant",
        "status": "completed",
        "content": [{"type": "output_text", "text": "yes", "annotations": []}],
    },
    {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c", "output": "7"},
]


def test_items_are_the_conversation(seeing: Client, engine: ConstrainedEngine) -> None:
    """Text and calls of one turn are one message."""
    whole_response(seeing, BODY | {"input": ITEMS, "max_output_tokens": 1})
    call = '[{"id": "c", "type": "function", "function": {"name": "f", "arguments": {}}}]'
    assert prompt_of(engine).split("\n") == [
        "system: Rules.",
        "user: a: b",
        f"assistant: yes{call}",
        "tool: 7",
        "assistant: ",
    ]


def test_instructions_and_a_system_message_are_one(seeing: Client, engine: ConstrainedEngine) -> None:
    """Templates take a system message at the start only."""
    whole_response(seeing, BODY | {"instructions": "Be brief.", "input": ITEMS[:2], "max_output_tokens": 1})
    assert prompt_of(engine).split("\n")[0] == "system: Be brief.: : Rules."


def test_an_output_can_be_sent_back() -> None:
    with answering(ANSWERS["all of it"]) as (client, engine):
        answer = whole_response(client, BODY | {"tools": TOOLS, **LOGPROBS})
        call = next(item for item in answer["output"] if item["type"] == "function_call")
        given = {"type": "function_call_output", "call_id": call["call_id"], "output": "7"}
        whole_response(client, BODY | {"input": [{"role": "user", "content": "hi"}, *answer["output"], given]})
        assert prompt_of(engine).split("\n")[0] == "user: hi"


def test_truncation_leaves_out_the_oldest_items(seeing: Client, engine: ConstrainedEngine) -> None:
    """Instructions stay, and what a call gave goes with the call."""
    old = [item for number in range(20) for item in ({"role": "user", "content": f"question {number}"}, *ITEMS[3:])]
    items = [*old, {"role": "user", "content": "last"}]
    body = BODY | {"instructions": "Be brief.", "input": items, "max_output_tokens": 9}
    check_error(seeing.post(PATH, json=body), 400, "input", "context_length_exceeded")
    whole_response(seeing, body | {"truncation": "auto"})
    first, *rest = prompt_of(engine).split("\n")
    assert first == "system: Be brief."
    assert rest[-2:] == ["user: last", "assistant: "]
    assert not rest[0].startswith("tool")
    prompt = engine.batch[0].prompt
    assert isinstance(prompt, TokenPrompt)
    assert SETTINGS.max_model_len is not None
    assert SETTINGS.max_model_len - 9 - 120 < len(prompt.token_ids) <= SETTINGS.max_model_len - 9


def test_what_cannot_be_shortened_is_refused(seeing: Client) -> None:
    body = BODY | {"input": "x" * 300, "truncation": "auto"}
    check_error(seeing.post(PATH, json=body), 400, "input", "context_length_exceeded")


def test_a_format_is_enforced_and_repeated(seeing: Client, engine: ConstrainedEngine) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string"}}}
    format_ = {"type": "json_schema", "name": "n", "schema": schema}
    answer = whole_response(seeing, BODY | {"text": {"format": format_}, "max_output_tokens": 2})
    (constraint,) = engine.constraints
    assert isinstance(constraint, JsonSchema) and constraint.param == "text.format.schema"
    assert answer["text"]["format"] | format_ == answer["text"]["format"]
    whole_response(seeing, BODY | {"text": {"format": {"type": "json_object"}}, "max_output_tokens": 2})
    assert engine.constraints == [JsonObject("text.format")]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "f"}])
def test_a_wanted_call_is_enforced(seeing: Client, engine: ConstrainedEngine, choice: object) -> None:
    answer = whole_response(seeing, BODY | {"tools": TOOLS, "tool_choice": choice, "max_output_tokens": 2})
    (constraint,) = engine.constraints
    assert isinstance(constraint, JsonBlocks)
    assert answer["tool_choice"] == choice


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"n": 2}, "n"),
        ({"fan_out": {"stop_after": 1}}, "fan_out"),
        ({"background": True}, "background"),
        ({"max_tokens": 5}, "max_tokens"),
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": [{"role": "user", "content": []}]}, "input[0].content"),
        ({"input": [{"role": "user", "content": "x", "mood": "y"}]}, "input[0].mood"),
        ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0].text"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role"),
        ({"input": [{"type": "riddle"}]}, "input[0].type"),
        ({"input": [{"type": 5}]}, "input[0].type"),
        ({"input": ["x"]}, "input[0]"),
        ({"input": [ITEMS[1], {"type": "web_search_call", "id": "x"}]}, "input[1].type"),
        ({"input": [ITEMS[1], {"id": "msg_1"}]}, "input[1].id"),
        ({"input": [ITEMS[1], {"type": "item_reference", "id": "msg_1"}]}, "input[1].id"),
        ({"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "["}]}, "input[0].arguments"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "name": "f", "defer_loading": True}]}, "tools[0].defer_loading"),
        ({"tools": [*TOOLS, *TOOLS]}, "tools[1].name"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "g"}}, "tool_choice"),
        ({"tools": TOOLS, "text": {"format": {"type": "json_object"}}}, "text"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"include": ["file_search_call.results"]}, "include[0]"),
        ({"metadata": {str(number): "x" for number in range(17)}}, "metadata"),
        ({"metadata": {"x": "y" * 513}}, "metadata[...]"),
        ({"metadata": {"x" * 65: "y"}}, "metadata"),
        ({"reasoning": {"effort": "high"}}, "reasoning.effort"),
        ({"reasoning": {"mode": "pro"}}, "reasoning.mode"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"max_output_tokens": 300}, "max_output_tokens"),
        ({"stream": True, "stream_options": {"continuous_usage_stats": True}}, "stream_options.continuous_usage_stats"),
    ],
)
def test_what_cannot_be_had_is_refused_by_name(seeing: Client, more: dict[str, Any], param: str) -> None:
    error = check_error(seeing.post(PATH, json=BODY | more), 400)
    assert error["param"] == param.removesuffix("[...]")


def test_a_stream_that_fails_ends_in_an_error_and_a_failed_response() -> None:
    settings = replace(SETTINGS, max_model_len=1024)

    def rule(_: int, position: int, __: int) -> int:
        return ord("a") if position < 3 else -1

    with serving(settings, engine=ConstrainedEngine(settings.engine_config(), rule=rule)) as client:
        response = client.post(PATH, json=BODY | {"stream": True})
        check_error(client.post(PATH, json=BODY), 500, code="choice_failed")
    *before, error, failed = parsed(response.text)
    assert [event["sequence_number"] for event in (*before, error, failed)] == list(range(len(before) + 2))
    assert (error["type"], error["code"]) == ("error", "choice_failed")
    assert failed["type"] == "response.failed"
    assert failed["response"]["status"] == "failed"
    assert failed["response"]["error"]["code"] == "server_error"
    (message,) = failed["response"]["output"]
    assert (message["status"], message["content"][0]["text"]) == ("incomplete", "aaa")


def test_requests_of_this_kind_are_counted(client: Client) -> None:
    whole_response(client, BODY | {"max_output_tokens": 2})
    metrics = client.get("/metrics").text
    assert 'gen_ai_operation_name="response"' in metrics
