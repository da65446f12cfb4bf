from __future__ import annotations

from collections.abc import Sequence

import anyio
import pytest

from engine.api import ChoiceFailed, ChoiceUpdate, EndReason, EngineDead, Request, SamplingParams, TokenPrompt
from engine.config import EngineConfig
from engine.fake import FakeEngine, TokenRule
from service.choice_text import ChoiceEvent, ChoiceText, TextRules
from service.detokenizer import StopStrings
from service.fan_out import FanOut
from service.generation import Batch, generate
from service.job import GenerationJob
from service.tokenizer import ByteTokenizer

pytestmark = pytest.mark.anyio


def script(*answers: bytes) -> TokenRule:
    """The choice with seed s says answers[s], then ends."""
    return lambda seed, position, _: [*answers[seed], 256][position]


def make_job(n: int = 1, *, stop: Sequence[str] = (), prompts: int = 1, **params: object) -> GenerationJob:
    choices = tuple(SamplingParams(seed=k, **params) for k in range(n))  # type: ignore[arg-type]
    request = Request("m", TokenPrompt((1, 2, 3)), choices)
    return GenerationJob(
        "chat", "chatcmpl-1", 1, "m", (request,) * prompts, n, TextRules(stop=tuple(stop)), True, False, None
    )


async def events_of(engine: FakeEngine, job: GenerationJob) -> list[ChoiceEvent]:
    """Run a job on its own; whatever comes of it, the engine must be idle afterwards."""
    events: list[ChoiceEvent] = []
    async with anyio.create_task_group() as group:
        with anyio.fail_after(20):
            await group.start(lambda task_status: engine.run(task_status=task_status))
            await engine.wait_ready()
            try:
                async with engine.submit(job.batch) as submission:
                    sender, receiver = anyio.create_memory_object_stream[Batch](1)
                    with receiver:
                        async with anyio.create_task_group() as choices:
                            fan_out = FanOut(job, submission.prompts)
                            choices.start_soon(generate, job, submission, ByteTokenizer(), sender, fan_out, lambda: 0)
                            async for batch in receiver:
                                events += batch
            finally:
                health = engine.health()
                engine.stop()
    assert (health.num_running, health.num_waiting, health.pages_held) == (0, 0, 0)
    return events


def text_of(events: Sequence[ChoiceEvent], index: int = 0) -> str:
    return "".join(event.text for event in events if event.index == index)


def end_of(events: Sequence[ChoiceEvent], index: int = 0) -> tuple[EndReason | None, int | str | None]:
    (end,) = [event for event in events if event.index == index and event.end_reason is not None]
    assert end is [event for event in events if event.index == index][-1]
    return end.end_reason, end.stop_reason


async def test_each_choice_has_its_own_events_in_order() -> None:
    events = await events_of(FakeEngine(EngineConfig()), make_job(3, prompts=2, max_tokens=4))
    assert {event.index for event in events} == set(range(6))
    # by hand: prompt of 3 tokens, so seed s starts at letter s + 3; choice j of every prompt is alike
    assert [text_of(events, index) for index in range(6)] == ["defg", "efgh", "fghi"] * 2
    assert all(end_of(events, index) == (EndReason.LENGTH, None) for index in range(6))


async def test_stop_string_over_several_tokens_ends_the_choice_and_frees_it() -> None:
    engine = FakeEngine(EngineConfig(), rule=script(b"alpha beta gamma" * 50))
    events = await events_of(engine, make_job(stop=["ta ga"]))
    assert text_of(events) == "alpha be"
    assert end_of(events) == (EndReason.STOP, "ta ga")
    # counted up to the token that completed the match, whatever the engine made meanwhile
    assert sum(event.num_tokens for event in events) == len("alpha beta ga")


async def test_stop_string_in_the_first_token_gives_empty_text_and_one_token() -> None:
    events = await events_of(FakeEngine(EngineConfig(), rule=script(b"abc")), make_job(stop=["a"]))
    assert [(event.text, event.num_tokens) for event in events] == [("", 1)]


async def test_choices_stop_apart_and_others_go_on() -> None:
    engine = FakeEngine(EngineConfig(), rule=script(b"one.two", b"three", b"four\n\nfive"))
    events = await events_of(engine, make_job(3, stop=[".", "\n\n"]))
    assert [text_of(events, index) for index in range(3)] == ["one", "three", "four"]
    assert [end_of(events, index)[1] for index in range(3)] == [".", None, "\n\n"]


async def test_held_text_comes_out_when_the_choice_ends_otherwise() -> None:
    events = await events_of(FakeEngine(EngineConfig(), rule=script(b"abc")), make_job(stop=["bcd"]))
    assert text_of(events) == "abc"
    assert end_of(events) == (EndReason.STOP, None)


async def test_stop_strings_wait_for_min_tokens() -> None:
    engine = FakeEngine(EngineConfig(), rule=script(b"aXbXc"))
    events = await events_of(engine, make_job(stop=["X"], min_tokens=2))
    assert text_of(events) == "aXb"


async def test_stop_token_is_counted_but_is_not_text() -> None:
    events = await events_of(FakeEngine(EngineConfig(), rule=script(b"abc")), make_job(stop_token_ids=(ord("c"),)))
    assert text_of(events) == "ab"
    assert end_of(events) == (EndReason.STOP, ord("c"))
    assert sum(event.num_tokens for event in events) == 3


@pytest.mark.parametrize("max_tokens", range(1, 9))
async def test_cut_inside_a_character_drops_its_bytes(max_tokens: int) -> None:
    whole = "a🧪界".encode()
    events = await events_of(FakeEngine(EngineConfig(), rule=script(whole)), make_job(max_tokens=max_tokens))
    assert text_of(events) == whole[:max_tokens].decode("utf-8", "ignore")
    assert sum(event.num_tokens for event in events) == max_tokens


async def test_failing_choice_ends_its_siblings_and_is_raised_as_itself() -> None:
    engine = FakeEngine(EngineConfig(), rule=lambda seed, position, _: -1 if (seed, position) == (1, 3) else 97)
    with pytest.raises(ExceptionGroup) as caught:
        await events_of(engine, make_job(3))
    assert caught.group_contains(ChoiceFailed, match="not finite")


async def test_dead_engine_is_raised_as_itself() -> None:
    def dies(seed: int, position: int, num_prompt_tokens: int) -> int:
        if position == 2:
            raise RuntimeError("out of memory")
        return 97

    with pytest.raises(ExceptionGroup) as caught:
        await events_of(FakeEngine(EngineConfig(), rule=dies), make_job(2))
    assert caught.group_contains(EngineDead, match="out of memory")


def test_plain_text_has_the_same_events_as_text_with_stop_strings_that_never_come() -> None:
    tokens = [*"grün, ".encode(), 257, *"日本".encode(), 0xFF, *b"x", 256]
    updates = [ChoiceUpdate((token,)) for token in tokens[:-3]] + [
        ChoiceUpdate(tuple(tokens[-3:-1])),
        ChoiceUpdate((tokens[-1],), end_reason=EndReason.STOP),
    ]
    both = []
    for stop in ((), ("\0",)):
        choice = ChoiceText(0, ByteTokenizer(), TextRules(stop=stop), StopStrings(stop), 0)
        both.append([choice.advance(update) for update in updates])
    assert both[0] == both[1]
    assert "".join(event.text for event in both[0]) == "grün, 日本\ufffdx"
