"""Steering the choices of one request while they run, over the fake engine, whole and streamed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from anyio.lowlevel import checkpoint

from engine.api import EndReason
from engine.config import EngineConfig
from engine.fake import EOS_TOKEN_ID, FakeEngine, TokenRule
from service.fan_out import fan_out_rules
from service.job import GenerationJob
from service.schemas.fan_out import FanOutOptions

from .apps import check_error, serving
from .asgi import Kind, answer, folded, make_job, outcomes, services_of

pytestmark = pytest.mark.anyio
both_modes = pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
both_kinds = pytest.mark.parametrize("kind", ["chat", "completion"])


def script(*answers: str) -> TokenRule:
    """The choice with seed s says answers[s], then ends."""
    return lambda seed, position, _: [*answers[seed].encode(), EOS_TOKEN_ID][position]


async def settle() -> None:
    """A step of a real engine takes so long that all readers have taken the last one's updates before it ends."""
    for _ in range(20):
        await checkpoint()


def engine_of(*, max_num_seqs: int = 64, **options: Any) -> FakeEngine:
    return FakeEngine(EngineConfig(max_num_seqs=max_num_seqs), pause=settle, **options)


def steered(options: dict[str, Any], n: int, **job: Any) -> GenerationJob:
    made = make_job(n, **job)
    rules = fan_out_rules(msgspec.convert(options, FanOutOptions), n, stream=made.stream)
    batch = tuple(
        replace(request, choices=tuple(replace(params, logprobs=0) for params in request.choices))
        for request in made.batch
    )
    return replace(made, fan_out=rules, batch=batch if rules.needs_logprobs else made.batch)


async def ask(engine: FakeEngine, options: dict[str, Any], n: int, **job: Any) -> dict[str, Any]:
    """The answer in one shape for both modes: `choices` with text and all facts, `usage`, `fan_out`."""
    async with services_of(engine) as services:
        client = await answer(services, steered(options, n, usage=True, **job))
        assert outcomes(services) == {"ok": 1}
    if job["stream"]:
        chunks = [json.loads(data) for data in client.data[:-1]]
        whole = folded(client.data)
        assert all("fan_out" not in chunk for chunk in chunks[:-1])
        ends = {c["index"]: c for chunk in chunks for c in chunk["choices"] if c["finish_reason"]}
        choices = [
            {**{k: v for k, v in ends[i].items() if k != "delta"}, "text": choice["text"]}
            for i, choice in enumerate(whole["choices"])
        ]
        return {"choices": choices, "usage": chunks[-1]["usage"], "fan_out": chunks[-1].get("fan_out")}
    body = json.loads(client.bodies[0])
    for choice in body["choices"]:
        if "message" in choice:
            choice["text"] = choice.pop("message")["content"]
    return {"choices": body["choices"], "usage": body["usage"], "fan_out": body.get("fan_out")}


def reasons(body: dict[str, Any]) -> list[str]:
    return [choice["end_reason"] for choice in body["choices"]]


@both_modes
@both_kinds
async def test_stop_after_cancels_the_rest_within_a_step_and_gives_what_they_had(kind: Kind, stream: bool) -> None:
    engine = engine_of()
    body = await ask(engine, {"stop_after": 2}, 4, kind=kind, stream=stream, max_tokens=(3, 7, 900, 900))
    assert reasons(body) == ["length", "length", "cancelled", "cancelled"]
    assert {choice["finish_reason"] for choice in body["choices"]} == {"length"}
    # by hand: a prompt of 3 tokens, so seed s begins at letter s + 3; the second end is that of step 7
    assert [choice["text"] for choice in body["choices"]][:2] == ["def", "efghijk"]
    assert all(7 <= len(choice["text"]) <= 8 for choice in body["choices"][2:])
    assert body["choices"][2]["text"].startswith("fghijkl")
    tokens = sum(len(choice["text"]) for choice in body["choices"])
    assert body["usage"]["completion_tokens"] == tokens
    assert engine.health().generation_tokens <= 3 + 7 + 2 * 8


@both_modes
async def test_those_that_end_in_the_same_step_keep_their_own_reason(stream: bool) -> None:
    engine = engine_of(rule=script("abc", "xyz", "a" * 90, "x!c" + "a" * 80))
    body = await ask(engine, {"stop_after": 1}, 4, stream=stream, max_tokens=(90,), stop=("c",))
    # "c" matches on the loop in the step in which choice 0's and choice 3's tokens arrive together
    assert reasons(body) == ["stop", "cancelled", "cancelled", "stop"]
    engine = engine_of(rule=script("abc", "xyz", "a" * 90))
    body = await ask(engine, {"stop_after": 1}, 3, stream=stream, max_tokens=(90,))
    assert reasons(body) == ["stop", "stop", "cancelled"]


@both_modes
async def test_choices_that_still_wait_for_a_place_come_back_empty(stream: bool) -> None:
    engine = engine_of(max_num_seqs=1)
    body = await ask(engine, {"stop_after": 1}, 3, stream=stream, max_tokens=(5,))
    assert reasons(body) == ["length", "cancelled", "cancelled"]
    assert [choice["text"] for choice in body["choices"]] == ["defgh", "", ""]
    assert engine.health().generation_tokens <= 6


async def test_keep_unfinished_false_leaves_out_what_was_cancelled_but_counts_it() -> None:
    options = {"stop_after": 1, "keep_unfinished": False}
    body = await ask(engine_of(), options, 3, stream=False, max_tokens=(900, 4, 900))
    assert [choice["index"] for choice in body["choices"]] == [1]
    assert body["usage"]["completion_tokens"] >= 12


@both_modes
async def test_each_prompt_stops_after_its_own_choices(stream: bool) -> None:
    engine = engine_of()
    body = await ask(engine, {"stop_after": 1}, 2, prompts=2, stream=stream, kind="completion", max_tokens=(3, 900))
    assert reasons(body) == ["length", "cancelled"] * 2
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]


@both_kinds
async def test_ranked_choices_come_best_first_and_keep_takes_the_best(kind: Kind) -> None:
    engine = engine_of(logprob_rule=lambda seed, position: [-3.0, -1.0, -2.0, -0.5][seed])
    options = {"rank_by": "logprob"}
    body = await ask(engine, options, 4, kind=kind, stream=False, prompts=1 if kind == "chat" else 2)
    assert [c["index"] for c in body["choices"]] == ([3, 1, 2, 0] if kind == "chat" else [3, 1, 2, 0, 7, 5, 6, 4])
    engine = engine_of(logprob_rule=lambda seed, position: [-3.0, -1.0, -2.0, -0.5][seed])
    body = await ask(engine, options | {"keep": 2}, 4, kind=kind, stream=False)
    assert [choice["index"] for choice in body["choices"]] == [3, 1]
    assert body["usage"]["completion_tokens"] == 20


async def test_a_mean_is_over_the_tokens_so_that_length_does_not_decide() -> None:
    engine = engine_of(logprob_rule=lambda seed, position: [-0.2, -0.5][seed])
    body = await ask(engine, {"rank_by": "logprob", "details": True}, 2, stream=False, max_tokens=(90, 2))
    assert [choice["index"] for choice in body["choices"]] == [0, 1]
    assert [choice["details"]["mean_logprob"] for choice in body["choices"]] == [pytest.approx(-0.2), -0.5]


LONG = "z" * 200
AGREEMENTS: list[tuple[dict[str, Any], Sequence[str], Any, list[int]]] = [
    ({"on": "text"}, ["Yes", "no", " yes\n", LONG], "Yes", [0, 2]),
    ({"on": "text"}, ["\ufb01ne", "fine", "x" * 100, LONG], "\ufb01ne", [0, 1]),
    ({"on": "regex", "value": r"answer is (\d+)"}, ["answer is 42.", "42", "so answer is 42", LONG], "42", [0, 2]),
    ({"on": "regex", "value": "[0-9]+"}, ["a 7", "07", "it is 7", LONG], "7", [0, 2]),
    ({"on": "json_pointer", "value": "/a/0"}, ['{"a":[1]}', "no", '{"b":0,"a":[1.0,2]}', LONG], 1, [0, 2]),
    ({"on": "json_pointer", "value": ""}, ['{"a":1,"b":2}', '{}', '{"b":2, "a":1}', LONG], {"a": 1, "b": 2}, [0, 2]),
    ({"on": "json_pointer", "value": "/x~1y"}, ['{"x/y":"A"}', '{"x":{}}', '{"x/y":"a "}', LONG], "A", [0, 2]),
]  # fmt: skip


@both_modes
@pytest.mark.parametrize(("agree", "answers", "shown", "indices"), AGREEMENTS)
async def test_as_soon_as_enough_agree_the_rest_is_cancelled(
    agree: dict[str, Any], answers: Sequence[str], shown: Any, indices: list[int], stream: bool
) -> None:
    engine = engine_of(rule=script(*answers))
    body = await ask(engine, {"agree": agree | {"count": 2}}, 4, stream=stream, max_tokens=(300,))
    assert body["fan_out"] == {"agree": {"answer": shown, "count": 2, "reached": True, "indices": indices}}
    assert reasons(body)[-1] == "cancelled"
    assert all(reasons(body)[index] == "stop" for index in indices)


@both_modes
async def test_without_agreement_the_most_frequent_answer_is_told_but_not_reached(stream: bool) -> None:
    engine = engine_of(rule=script("b", "a", "b", "c", "a"))
    body = await ask(engine, {"agree": {"on": "text", "count": 3}}, 5, stream=stream, max_tokens=(9,))
    assert body["fan_out"]["agree"] == {"answer": "b", "count": 2, "reached": False, "indices": [0, 2]}
    assert reasons(body) == ["stop"] * 5
    engine = engine_of(rule=script("b", "a"))
    agree = {"on": "json_pointer", "value": "/a", "count": 2}
    body = await ask(engine, {"agree": agree}, 2, stream=stream, max_tokens=(9,))
    assert body["fan_out"]["agree"] == {"answer": None, "count": 0, "reached": False, "indices": []}


@both_modes
async def test_each_of_several_prompts_has_its_own_agreement(stream: bool) -> None:
    engine = engine_of(rule=script("b", "b", "c" * 50))
    options = {"agree": {"on": "text", "count": 2}}
    body = await ask(engine, options, 3, prompts=2, stream=stream, kind="completion", max_tokens=(90,))
    assert [one["indices"] for one in body["fan_out"]["agree"]] == [[0, 1], [3, 4]]
    assert reasons(body) == ["stop", "stop", "cancelled"] * 2


async def test_without_usage_the_agreement_is_on_the_last_chunk_of_a_choice() -> None:
    """C08: a chunk without choices, that nobody asked for, breaks clients that read choices[0]."""
    engine = engine_of(rule=script("b", "b", "c" * 50))
    async with services_of(engine) as services:
        client = await answer(services, steered({"agree": {"on": "text", "count": 2}}, 3, max_tokens=(90,)))
    chunks = [json.loads(data) for data in client.data[:-1]]
    assert all(len(chunk["choices"]) == 1 for chunk in chunks)
    assert ["fan_out" in chunk for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert chunks[-1]["fan_out"]["agree"]["answer"] == "b"


def fails(seed: int, position: int, num_prompt_tokens: int) -> int:
    return -1 if (seed, position) == (1, 3) else ord("a") + position % 26


@both_modes
@both_kinds
async def test_an_isolated_failure_ends_its_choice_alone(kind: Kind, stream: bool) -> None:
    engine = engine_of(rule=fails)
    body = await ask(engine, {"on_error": "isolate"}, 3, kind=kind, stream=stream, max_tokens=(6,))
    assert reasons(body) == ["length", "error", "length"]
    failed = body["choices"][1]
    assert failed["error"]["code"] == "choice_failed" and failed["error"]["message"]
    assert failed["text"] == "abc" and failed["finish_reason"] == "length"
    assert all("error" not in body["choices"][index] for index in (0, 2))
    assert body["usage"]["completion_tokens"] == 6 + 3 + 6


@both_modes
async def test_a_failed_choice_is_no_end_by_itself_and_ranks_last(stream: bool) -> None:
    engine = engine_of(rule=fails)
    body = await ask(engine, {"on_error": "isolate", "stop_after": 1}, 3, stream=stream, max_tokens=(6, 90, 9))
    assert reasons(body) == ["length", "error", "cancelled"]
    if not stream:
        engine = engine_of(rule=fails, logprob_rule=lambda seed, _: [-2.0, 0.0, -1.0][seed])
        body = await ask(engine, {"on_error": "isolate", "rank_by": "logprob"}, 3, stream=False, max_tokens=(6,))
        assert [choice["index"] for choice in body["choices"]] == [2, 0, 1]


@both_modes
async def test_an_isolated_bug_says_nothing_of_itself(stream: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of()
    from service.detokenizer import IncrementalDetokenizer

    feed = IncrementalDetokenizer.feed

    def broken(self: IncrementalDetokenizer, token_id: int) -> str:
        if token_id == ord("f"):
            raise ValueError("the secret word")
        return feed(self, token_id)

    monkeypatch.setattr(IncrementalDetokenizer, "feed", broken)
    body = await ask(engine, {"on_error": "isolate"}, 2, stream=stream, max_tokens=(2,))
    assert reasons(body) == ["length", "error"]
    assert "secret" not in json.dumps(body)


@both_modes
async def test_details_tell_seed_times_and_mean_logprob(stream: bool) -> None:
    engine = engine_of(logprob_rule=lambda seed, position: -1.0 - position)
    body = await ask(engine, {"details": True}, 2, stream=stream, max_tokens=(3,))
    for seed, choice in enumerate(body["choices"]):
        details = choice["details"]
        assert details["seed"] == seed and details["cached_tokens"] == 0
        assert details["mean_logprob"] == -2.0
        assert 0 <= details["queue_ms"] <= details["first_token_ms"] <= details["total_ms"]


@both_modes
async def test_without_fan_out_an_answer_has_none_of_it(stream: bool) -> None:
    body = await ask(engine_of(), {}, 2, stream=stream, max_tokens=(3,))
    assert body["fan_out"] is None
    assert all(not {"details", "error"} & set(choice) for choice in body["choices"])
    assert reasons(body) == [EndReason.LENGTH.value] * 2


REFUSED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"stop_after": 4}, {}, "fan_out.stop_after"),
    ({"stop_after": 0}, {}, "fan_out.stop_after"),
    ({"keep": 4, "rank_by": "logprob"}, {}, "fan_out.keep"),
    ({"keep": 1}, {}, "fan_out.keep"),
    ({"keep": 1, "rank_by": "logprob"}, {"stream": True}, "fan_out.rank_by"),
    ({"keep": 1}, {"stream": True}, "fan_out.keep"),
    ({"rank_by": "length"}, {}, "fan_out.rank_by"),
    ({"stop_after": 1, "keep_unfinished": False}, {"stream": True}, "fan_out.keep_unfinished"),
    ({"keep_unfinished": False}, {}, "fan_out.keep_unfinished"),
    ({"on_error": "ignore"}, {}, "fan_out.on_error"),
    ({"agree": {"on": "text"}}, {}, "fan_out.agree.count"),
    ({"agree": {"on": "text", "count": 4}}, {}, "fan_out.agree.count"),
    ({"agree": {"on": "text", "count": 2, "value": "x"}}, {}, "fan_out.agree.value"),
    ({"agree": {"on": "regex", "count": 2}}, {}, "fan_out.agree.value"),
    ({"agree": {"on": "regex", "count": 2, "value": "("}}, {}, "fan_out.agree.value"),
    ({"agree": {"on": "regex", "count": 2, "value": r"(a)\1"}}, {}, "fan_out.agree.value"),
    ({"agree": {"on": "regex", "count": 2, "value": "(?i)(\\w{0,200}){0,4}~"}}, {}, "fan_out.agree.value"),
    ({"agree": {"on": "regex", "count": 2, "value": "a" * 257}}, {}, "fan_out.agree.value"),
    ({"agree": {"on": "json_pointer", "count": 2}}, {}, "fan_out.agree.value"),
    ({"agree": {"on": "json_pointer", "count": 2, "value": "a"}}, {}, "fan_out.agree.value"),
    ({"agree": {"on": "json_pointer", "count": 2, "value": "/~2"}}, {}, "fan_out.agree.value"),
    ({"agree": {"on": "mood", "count": 2}}, {}, "fan_out.agree.on"),
    ({"details": 1}, {}, "fan_out.details"),
    ({"best": 1}, {}, "fan_out.best"),
]


def test_what_cannot_be_is_refused_by_name_before_anything_runs() -> None:
    body = {"model": "org/m", "n": 3, "max_tokens": 2}
    with serving() as client:
        for fan_out, more, param in REFUSED:
            for path, prompt in (
                ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
                ("/v1/completions", {"prompt": "hi"}),
            ):
                check_error(client.post(path, json=body | prompt | more | {"fan_out": fan_out}), 400, param)
        assert client.app.state.services.engine.health().num_steps == 0


def test_over_http_rank_asks_the_engine_for_logprobs_without_showing_them() -> None:
    with serving() as client:
        body = {"model": "org/m", "prompt": "hi", "n": 3, "max_tokens": 2, "seed": 5}
        options = {"rank_by": "logprob", "keep": 2, "details": True}
        choices = client.post("/v1/completions", json=body | {"fan_out": options}).json()["choices"]
        assert [choice["details"]["seed"] for choice in choices] == [5, 6]
        assert all(choice["logprobs"] is None and choice["details"]["mean_logprob"] == 0 for choice in choices)
