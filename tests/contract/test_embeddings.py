"""Embeddings, on engines that have them: the same vectors in whatever company, and no more work than is wanted."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import anyio
import pytest

from engine.api import (
    Capability,
    EmbedRequest,
    Engine,
    EngineDead,
    EngineNotReady,
    EngineOverloaded,
    RequestTooLarge,
    UnsupportedByEngine,
)
from tests.contract.harness import CONFIG, PATIENT, EngineCase, answers, occupied, request, running, until

pytestmark = pytest.mark.anyio

EMBEDDING: dict[str, Any] = {"embedding_model": "any", "served_embedding_model_name": "e"}
MANY = [EmbedRequest((11,) * 64)] * 4000
"""More batches than a test waits for."""


@asynccontextmanager
async def embedding(case: EngineCase, **config: Any) -> AsyncIterator[Engine]:
    """An engine with an embedding model. Once the test is done with it, no input may wait."""
    async with running(case, Capability.EMBEDDINGS, **EMBEDDING, **config) as engine:
        yield engine
        await until(lambda: engine.health().last_step_age is None)
        assert engine.health().num_embedding_inputs == 0


async def vectors(engine: Engine, batch: Sequence[EmbedRequest]) -> list[list[float]]:
    return [embedding.values.tolist() for embedding in await engine.embed(batch)]


def inputs(*lengths: int) -> list[EmbedRequest]:
    return [EmbedRequest(tuple(11 + (k * length) % 100 for k in range(length))) for length in lengths]


async def test_vectors_come_in_the_order_of_the_inputs_whoever_else_is_there(case: EngineCase) -> None:
    async with embedding(case, max_num_batched_tokens=128) as engine:
        batch = inputs(3, 100, 1, 40, 7, 100, 2)
        alone = [(await vectors(engine, [one]))[0] for one in batch]
        together: list[list[list[float]]] = []

        async def ask(owner: str) -> None:
            together.append(await vectors(engine, [replace(one, owner=owner) for one in batch]))

        async with anyio.create_task_group() as group:
            for owner in ("a", "a", "b"):
                group.start_soon(ask, owner)
        for made in together:
            for vector, expected in zip(made, alone, strict=True):
                assert vector == pytest.approx(expected, abs=1e-5)
        assert await engine.embed([]) == []


async def test_a_vector_has_the_models_dimensions_or_fewer(case: EngineCase) -> None:
    async with embedding(case) as engine:
        info = engine.info.embedding
        assert info is not None and info.model and info.dimensions and info.max_model_len
        (whole,) = await vectors(engine, inputs(9))
        assert len(whole) == info.dimensions and math.hypot(*whole) == pytest.approx(1, abs=1e-5)
        (same,) = await vectors(engine, [replace(inputs(9)[0], dimensions=info.dimensions)])
        assert same == pytest.approx(whole, abs=1e-6)
        for dimensions in info.smaller_dimensions[:3]:
            short, other = await vectors(engine, [replace(inputs(9)[0], dimensions=dimensions), *inputs(9)])
            length = math.hypot(*whole[:dimensions]) or 1.0
            assert short == pytest.approx([value / length for value in whole[:dimensions]], abs=1e-5)
            assert other == pytest.approx(whole, abs=1e-5)


async def test_input_that_can_never_be_embedded_names_its_field(case: EngineCase) -> None:
    async with embedding(case, max_queued_tokens=2000) as engine:
        info = engine.info.embedding
        assert info is not None
        bad = {
            "input": [(), (-1,), (info.vocab_size,), (11,) * (info.max_model_len + 1)],
            "dimensions": [(11,)],
        }
        for param, rows in bad.items():
            for row in rows:
                wrong = EmbedRequest(row, dimensions=info.dimensions + 1 if param == "dimensions" else None)
                with pytest.raises(RequestTooLarge) as caught:
                    await engine.embed([*inputs(3), wrong])
                assert caught.value.param == param
        assert len(await engine.embed(inputs(info.max_model_len))) == 1
        with pytest.raises(RequestTooLarge) as caught:
            await engine.embed(inputs(*[100] * 21))
        assert caught.value.param == "input"


async def test_queue_that_is_full_refuses_and_is_open_again_once_it_is_not(case: EngineCase) -> None:
    async with embedding(case, max_num_batched_tokens=64, max_queued_tokens=64 * len(MANY)) as engine:
        async with anyio.create_task_group() as group:
            group.start_soon(engine.embed, MANY)
            await until(lambda: engine.health().num_embedding_inputs > 0)
            with pytest.raises(EngineOverloaded) as caught:
                await engine.embed(MANY[:1])
            assert caught.value.retry_after > 0
            group.cancel_scope.cancel()
        assert len(await engine.embed(MANY[:1])) == 1


async def test_inputs_of_whoever_leaves_are_not_computed(case: EngineCase) -> None:
    async with embedding(case, max_num_batched_tokens=64) as engine:
        async with anyio.create_task_group() as group:
            group.start_soon(engine.embed, MANY)
            await until(lambda: engine.health().embedding_tokens > 0)
            group.cancel_scope.cancel()
        assert engine.health().num_embedding_inputs == 0
        await until(lambda: engine.health().last_step_age is None)
        assert engine.health().embedding_tokens < 64 * len(MANY)


async def test_a_short_input_does_not_wait_for_a_long_list(case: EngineCase) -> None:
    async with embedding(case, max_num_batched_tokens=64) as engine, anyio.create_task_group() as group:
        group.start_soon(engine.embed, MANY)
        await until(lambda: engine.health().num_embedding_inputs > 0)
        for owner in ("", "other"):
            assert len(await engine.embed([EmbedRequest((11, 12), owner=owner)])) == 1
        assert engine.health().num_embedding_inputs > 0
        group.cancel_scope.cancel()


async def test_generation_goes_on_beside_embeddings_and_they_beside_it(case: EngineCase) -> None:
    async with embedding(case, stream_credit=PATIENT) as engine:
        alone = await answers(engine, request(2, max_tokens=20))
        async with anyio.create_task_group() as group:
            group.start_soon(engine.embed, MANY)
            await until(lambda: engine.health().embedding_tokens > 0)
            assert await answers(engine, request(2, max_tokens=20)) == alone
            assert engine.health().num_embedding_inputs > 0, "the embeddings were to last longer"
            group.cancel_scope.cancel()
        async with occupied(engine):
            before = engine.health().generation_tokens
            await engine.embed(inputs(*range(1, 40)))
            assert engine.health().generation_tokens > before


async def test_drain_refuses_the_new_and_finishes_the_old(case: EngineCase) -> None:
    async with embedding(case) as engine, anyio.create_task_group() as group:
        made: list[list[list[float]]] = []

        async def ask() -> None:
            made.append(await vectors(engine, MANY[:20]))

        group.start_soon(ask)
        await until(lambda: engine.health().num_embedding_inputs > 0 or bool(made))
        engine.drain()
        with pytest.raises(EngineNotReady):
            await engine.embed(MANY[:1])
        await until(lambda: bool(made))
        assert len(made[0]) == 20


@pytest.mark.parametrize("end", ["stop", "death"])
async def test_the_engines_end_is_told_to_all_who_wait(case: EngineCase, end: str) -> None:
    engine = case.make(replace(CONFIG, **EMBEDDING))
    if Capability.EMBEDDINGS not in engine.info.capabilities:
        pytest.skip("has no embeddings")
    expected = EngineNotReady if end == "stop" else EngineDead
    told: list[str] = []

    async def hosted(*, task_status: Any) -> None:
        try:
            await engine.run(task_status=task_status)
        except EngineDead as error:
            told.append(str(error))

    async def ask() -> None:
        with pytest.raises(expected) as caught:
            await engine.embed(MANY[:2000])
        told.append(str(caught.value))

    async with anyio.create_task_group() as group:
        with anyio.fail_after(20):
            await group.start(hosted)
            await engine.wait_ready()
            async with anyio.create_task_group() as clients:
                clients.start_soon(ask)
                clients.start_soon(ask)
                await until(lambda: engine.health().embedding_tokens > 0)
                if end == "stop":
                    engine.stop()
                else:
                    case.kill(engine)
            with pytest.raises(expected):
                await engine.embed(MANY[:1])
    assert all(told) and len(told) == (2 if end == "stop" else 3)
    assert engine.health().num_embedding_inputs == 0


async def test_engine_without_an_embedding_model_says_so(case: EngineCase) -> None:
    async with running(case) as engine:
        assert Capability.EMBEDDINGS not in engine.info.capabilities and engine.info.embedding is None
        with pytest.raises(UnsupportedByEngine):
            await engine.embed(inputs(3))


async def test_nothing_is_embedded_before_the_models_are_loaded(case: EngineCase) -> None:
    engine = case.make(replace(CONFIG, **EMBEDDING))
    if Capability.EMBEDDINGS not in engine.info.capabilities:
        pytest.skip("has no embeddings")
    with pytest.raises(EngineNotReady):
        await engine.embed(inputs(3))
