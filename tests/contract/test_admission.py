"""Who gets in: all choices of a batch or none."""

from __future__ import annotations

import anyio
import pytest

from engine.api import (
    Capability,
    ChatPrompt,
    Engine,
    EngineNotReady,
    EngineOverloaded,
    EngineState,
    Request,
    RequestRejected,
    RequestTooLarge,
    SamplingParams,
    TextPrompt,
    UnsupportedByEngine,
)
from tests.contract.harness import (
    CONFIG,
    LONG,
    PATIENT,
    EngineCase,
    answers,
    occupied,
    read_all,
    request,
    running,
    until,
)

pytestmark = pytest.mark.anyio


def num_admitted(engine: Engine) -> int:
    health = engine.health()
    return health.num_running + health.num_waiting


async def test_batch_that_does_not_fit_the_queue_leaves_no_part_of_it_behind(case: EngineCase) -> None:
    async with running(case, max_num_seqs=2, max_queued_seqs=2) as engine:
        async with engine.submit([request(3, max_tokens=LONG)]):
            await until(lambda: num_admitted(engine) == 3)
            with pytest.raises(EngineOverloaded) as caught:
                async with engine.submit([request(1), request(1)]):
                    pass
            assert caught.value.retry_after > 0
            assert num_admitted(engine) == 3
            async with engine.submit([request(1, max_tokens=LONG)]):
                assert num_admitted(engine) == 4
        # refused is not forgotten: the same batch gets in once there is room
        assert len(await answers(engine, request(1), request(1))) == 2


async def test_of_two_batches_that_race_for_the_last_places_one_gets_them_all(case: EngineCase) -> None:
    async with running(case, max_num_seqs=2, max_queued_seqs=2) as engine:
        outcomes: list[str] = []

        async def enter() -> None:
            try:
                async with engine.submit([request(1, max_tokens=LONG), request(2, max_tokens=LONG)]):
                    outcomes.append("admitted")
                    await until(lambda: len(outcomes) == 4)
                    assert num_admitted(engine) == 3
            except EngineOverloaded:
                outcomes.append("refused")

        async with anyio.create_task_group() as group:
            for _ in range(4):
                group.start_soon(enter)
        assert sorted(outcomes) == ["admitted", "refused", "refused", "refused"]


async def test_batch_that_could_never_fit_is_refused_for_good(case: EngineCase) -> None:
    async with running(case, max_num_seqs=2, max_queued_seqs=2) as engine:
        with pytest.raises(RequestTooLarge) as caught:
            async with engine.submit([request(3), request(2)]):
                pass
        assert caught.value.param == "n"


@pytest.mark.parametrize(
    ("too_large", "param"),
    [
        (request(prompt=[11] * 512), "prompt"),
        (request(prompt=[11] * 500, max_tokens=13), "max_tokens"),
        (request(prompt=[]), "prompt"),
        (request(prompt=[11, 2**31]), "prompt"),
        (request(prompt=[-1]), "prompt"),
    ],
    ids=["long prompt", "long answer", "no tokens", "unknown token", "negative token"],
)
async def test_request_that_can_never_run_names_its_field(case: EngineCase, too_large: Request, param: str) -> None:
    async with running(case, max_model_len=512) as engine:
        with pytest.raises((RequestTooLarge, RequestRejected)) as caught:
            # the good part of the batch must not get in either
            async with engine.submit([request(2), too_large]):
                pass
        assert caught.value.param == param
        assert num_admitted(engine) == 0


async def test_request_of_exactly_the_context_runs(case: EngineCase) -> None:
    async with running(case, max_model_len=512) as engine:
        (tokens,) = await answers(engine, request(prompt=[11] * 500, max_tokens=12))
        assert len(tokens) == 12
        (open_ended,) = await answers(engine, Request("m", request(prompt=[11] * 500).prompt, (endless(),)))
        assert len(open_ended) == 12


def endless() -> SamplingParams:
    return SamplingParams(seed=1, max_tokens=None, ignore_eos=True)


@pytest.mark.parametrize(
    "prompt", [TextPrompt("hi"), ChatPrompt(({"role": "user", "content": "hi"},))], ids=["text", "chat"]
)
async def test_prompt_that_an_engine_cannot_read_is_refused_by_name(
    case: EngineCase, prompt: TextPrompt | ChatPrompt
) -> None:
    async with running(case) as engine:
        reads_text = Capability.TEXT_IN in engine.info.capabilities
        if not reads_text:
            with pytest.raises(UnsupportedByEngine):
                async with engine.submit([Request("m", prompt, (SamplingParams(seed=1),))]):
                    pass
    if reads_text:  # said outside of the task group, which would make a failure of it
        pytest.skip("reads text itself")


async def test_nothing_gets_in_before_the_model_is_loaded(case: EngineCase) -> None:
    engine = case.make(CONFIG)
    assert engine.health().state is EngineState.LOADING
    assert engine.health().reason
    with pytest.raises(EngineNotReady) as caught:
        async with engine.submit([request()]):
            pass
    assert caught.value.retry_after > 0


async def test_info_is_complete_once_ready(case: EngineCase) -> None:
    async with running(case) as engine:
        info = engine.info
        assert (info.max_model_len, info.max_num_seqs) == (CONFIG.max_model_len, CONFIG.max_num_seqs)
        assert info.vocab_size >= 128 or Capability.TOKENS_OUT not in info.capabilities
        assert info.backend
        assert engine.health().state is EngineState.READY
        assert engine.health().reason is None


async def test_more_urgent_request_leaves_the_queue_first(case: EngineCase) -> None:
    if not case.has_steps:
        pytest.skip("the queue is elsewhere")
    async with running(case, max_num_seqs=1, stream_credit=PATIENT) as engine:
        order: list[str] = []

        async def ask(name: str, priority: int) -> None:
            async with engine.submit([request(priority=priority)]) as submission:
                await read_all(submission.choices)
                order.append(name)

        async with anyio.create_task_group() as group, occupied(engine):
            group.start_soon(ask, "patient", 5)
            await until(lambda: engine.health().num_waiting == 1)
            group.start_soon(ask, "urgent", 1)
            await until(lambda: engine.health().num_waiting == 2)
        assert order == ["urgent", "patient"]
