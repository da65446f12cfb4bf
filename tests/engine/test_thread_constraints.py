"""Constraints through EngineThread: compiled in `submit`, off the loop, and never by the engine's thread."""

from __future__ import annotations

import json
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest

from engine.api import (
    Capability,
    EndReason,
    Engine,
    EngineNotReady,
    InvalidConstraint,
    Regex,
    Request,
    SamplingParams,
    TokenPrompt,
    UnsupportedByEngine,
)
from engine.config import EngineConfig
from engine.fake import FakeEngine
from engine.grammar import GrammarCompiler
from engine.thread import EngineThread
from tests.engine.constrained import VOCAB_SIZE, RandomRunner, constrained, schema_of, token_texts, violations
from tests.engine.families import byte_tokenizer
from tests.engine.support import CheckingRunner

pytestmark = pytest.mark.anyio

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "y"]}}, "required": ["a", "b"]}
SCHEMA |= {"additionalProperties": False}


@asynccontextmanager
async def hosted(engine: Engine) -> AsyncIterator[Engine]:
    async def host(*, task_status: anyio.abc.TaskStatus[None]) -> None:
        await engine.run(task_status=task_status)

    async with anyio.create_task_group() as group:
        await group.start(host)
        with anyio.fail_after(60):
            await engine.wait_ready()
            yield engine
        engine.stop()


@pytest.fixture
def engine(tmp_path: Path) -> EngineThread:
    byte_tokenizer().save_pretrained(tmp_path)
    runner = RandomRunner(num_pages=256, model_path=str(tmp_path))
    return EngineThread(EngineConfig(), lambda _: runner)


def request(*choices: SamplingParams) -> Request:
    return Request("m", TokenPrompt((1, 2, 3)), choices)


async def outcomes(engine: Engine, *requests: Request) -> list[tuple[bytes, EndReason | None]]:
    async def read(index: int) -> None:
        async for update in submission.choices[index]:
            texts[index] += b"".join(token_texts()[t] for t in update.token_ids if t != 2)
            reasons[index] = update.end_reason

    async with engine.submit(requests) as submission:
        texts = [b""] * len(submission.choices)
        reasons: list[EndReason | None] = [None] * len(submission.choices)
        async with anyio.create_task_group() as group:
            for index in range(len(submission.choices)):
                group.start_soon(read, index)
    return list(zip(texts, reasons, strict=True))


async def test_four_choices_with_a_schema_beside_choices_without(engine: EngineThread) -> None:
    free = [constrained(None, seed, max_tokens=30, ignore_eos=True) for seed in (5, 6)]
    async with hosted(engine):
        assert Capability.CONSTRAINTS in engine.info.capabilities
        alone = await outcomes(engine, request(*free))
        choices = [constrained(schema_of(SCHEMA), seed) for seed in range(3)]
        cut = constrained(schema_of(SCHEMA), 3, max_tokens=3)
        made = await outcomes(engine, request(*choices, cut), request(*free))
        assert made[4:] == alone
        assert made[3][1] is EndReason.LENGTH
        assert any(reason is EndReason.STOP for _, reason in made[:3])
        assert all(violations(SCHEMA, text) == [] for text, reason in made[:3] if reason is EndReason.STOP)
        assert [await outcomes(engine, request(choice)) for choice in choices] == [[outcome] for outcome in made[:3]]
        assert engine.health().pages_held == 0


@pytest.mark.parametrize("schema", [{"type": "str"}, {"enum": []}, {"not": {}}, {"$ref": "http://x/y"}], ids=json.dumps)
async def test_a_bad_schema_is_refused_before_anything_is_queued(engine: EngineThread, schema: object) -> None:
    async with hosted(engine):
        with pytest.raises(InvalidConstraint) as refusal:
            async with engine.submit([request(constrained(None)), request(constrained(schema_of(schema)))]):
                pass
        assert refusal.value.param == "response_format"
        assert engine.health().num_waiting == engine.health().num_steps == 0
        [(text, reason)] = await outcomes(engine, request(constrained(Regex("ab", "r"))))
        assert (text, reason) == (b"ab", EndReason.STOP)


async def test_compiling_happens_once_a_batch_and_in_neither_the_loop_nor_the_engine(
    engine: EngineThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = []
    compile_one = GrammarCompiler.compile

    def spy(compiler: GrammarCompiler, constraint: Regex) -> object:
        threads.append(threading.current_thread())
        return compile_one(compiler, constraint)

    monkeypatch.setattr(GrammarCompiler, "compile", spy)
    async with hosted(engine):
        choices = [constrained(Regex("ab", "r"), seed) for seed in range(5)]
        assert await outcomes(engine, request(*choices)) == [(b"ab", EndReason.STOP)] * 5
    assert len(threads) == 1
    assert threads[0] is not threading.current_thread() and threads[0].name != "chorus-engine"


async def test_an_engine_that_drains_compiles_nothing(engine: EngineThread, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GrammarCompiler, "compile", lambda *_: pytest.fail("compiled for nothing"))
    async with hosted(engine):
        engine.drain()
        with pytest.raises(EngineNotReady):
            async with engine.submit([request(constrained(Regex("ab", "r")))]):
                pass


async def test_an_engine_without_grammars_refuses_them_by_name() -> None:
    without = EngineThread(EngineConfig(), lambda _: CheckingRunner(vocab_size=VOCAB_SIZE))
    for engine in (without, FakeEngine(EngineConfig())):
        async with hosted(engine):
            assert Capability.CONSTRAINTS not in engine.info.capabilities
            with pytest.raises(UnsupportedByEngine, match="constraints"):
                async with engine.submit([request(constrained(Regex("ab", "r")))]):
                    pass
