"""What only the vLLM engine does, or does in its own way. Runs where vllm is importable: see .ci/vllm."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from engine.api import (
    Capability,
    Choice,
    Constraint,
    EndReason,
    Engine,
    InvalidConstraint,
    JsonBlock,
    JsonBlocks,
    JsonObject,
    JsonSchema,
    Lark,
    OnlyTokens,
    Regex,
    TriggeredBlocks,
    UnsupportedByEngine,
    WithoutWords,
)
from engine.config import EngineConfig
from engine.thread import EngineThread
from tests.contract.conftest import CASES
from tests.contract.harness import LONG, EngineCase, answers, read, read_all, request, running, until

pytestmark = pytest.mark.anyio
if find_spec("vllm") is None:
    pytest.skip("vllm is not installed here: see .ci/vllm", allow_module_level=True)

(VLLM,) = (case for case in CASES if case.name == "vllm")


@pytest.fixture
async def engine() -> AsyncIterator[Engine]:
    async with running(VLLM, max_num_seqs=4) as running_engine:
        yield running_engine


def spelled(tokens: list[int]) -> str:
    from tokenizers import Tokenizer

    from tests.contract.vllm_engine import tiny_folder

    text: str = Tokenizer.from_file(str(tiny_folder() / "tokenizer.json")).decode(tokens)
    return text


async def test_greedy_tokens_are_those_of_the_torch_engine(anyio_backend: str) -> None:
    from engine.model import load_model
    from engine.runner import TorchRunner
    from tests.contract.vllm_engine import tiny_folder

    def load(config: EngineConfig) -> Any:
        from engine.attention import ATTENTION_NAME

        loaded = load_model(Path(tiny_folder()), "float32", "cpu", attn_implementation=ATTENTION_NAME)
        return TorchRunner(loaded, config)

    torch_case = EngineCase("torch", lambda config: EngineThread(config, load), lambda _: None)
    batch = [request(1, prompt=[11 + k, 40, 60 + k] * (1 + 9 * k), max_tokens=48, temperature=0.0) for k in range(4)]
    async with running(torch_case, kv_cache_bytes=32 << 20) as torch_engine:
        wanted = await answers(torch_engine, *batch)
    async with running(VLLM) as vllm_engine:
        assert await answers(vllm_engine, *batch) == wanted


SCHEMA = JsonSchema(
    '{"type":"object","properties":{"a":{"enum":["x","yy"]}},"required":["a"],"additionalProperties":false}',
    "response_format",
)
BLOCK = JsonBlock("<call>", SCHEMA, "</call>")


@pytest.mark.parametrize(
    ("constraint", "pattern"),
    [
        (Regex("[ab]{3,5}c", "r"), r"[ab]{3,5}c"),
        (Choice(("yes", "no", "perhaps"), "c"), r"yes|no|perhaps"),
        (SCHEMA, r'\{"a": "(x|yy)"\}'),
        (Lark('start: "(" start ")" | "x"', "g"), r"\(*x\)*"),
        (JsonBlocks((BLOCK,), "tools", max_blocks=1), r'<call>\{"a": "(x|yy)"\}</call>'),
    ],
    ids=["regex", "choice", "schema", "lark", "blocks"],
)
async def test_constraint_is_kept_whatever_the_seed(engine: Engine, constraint: Constraint, pattern: str) -> None:
    asked = request(4, max_tokens=100, constraint=constraint, ignore_eos=True)
    async with engine.submit([asked]) as submission:
        for tokens, last in await read_all(submission.choices):
            if last.end_reason is EndReason.STOP:
                assert re.fullmatch(pattern, spelled(tokens[:-1]), re.DOTALL), spelled(tokens)
                assert last.stop_reason is None
            else:
                assert (last.end_reason, len(tokens)) == (EndReason.LENGTH, 100)


async def test_json_object_is_one(engine: Engine) -> None:
    asked = request(2, max_tokens=80, constraint=JsonObject("response_format"), logit_bias=((5, 0.0),))
    async with engine.submit([asked]) as submission:
        for tokens, last in await read_all(submission.choices):
            text = spelled(tokens[:-1])
            assert text.lstrip().startswith("{")
            if last.end_reason is EndReason.STOP:
                assert isinstance(json.loads(text), dict)


async def test_only_the_tokens_that_are_allowed_are_drawn(engine: Engine) -> None:
    (tokens,) = await answers(engine, request(max_tokens=30, constraint=OnlyTokens((40, 41, 42), "allowed_token_ids")))
    assert set(tokens) == {40, 41, 42}


async def test_words_occur_in_no_answer(engine: Engine) -> None:
    plain = await answers(engine, request(4, max_tokens=60, ignore_eos=False))
    words = tuple({spelled(tokens)[k : k + 1] for tokens in plain for k in (1, 3, 5)} - {"", "\ufffd"})
    constraint = WithoutWords(words, "bad_words")
    held = await answers(engine, request(4, max_tokens=60, ignore_eos=False, constraint=constraint))
    assert not any(word in spelled(tokens) for tokens in held for word in words)


@pytest.mark.parametrize(
    ("params", "param"),
    [
        ({"constraint": Regex("(", "structured_outputs.regex")}, "structured_outputs.regex"),
        ({"constraint": JsonSchema("{", "response_format")}, "response_format"),
        ({"constraint": Choice((), "structured_outputs.choice")}, "structured_outputs.choice"),
        ({"constraint": Regex("a+", "r"), "min_tokens": 3}, "min_tokens"),
        ({"constraint": OnlyTokens((2,), "allowed_token_ids"), "min_tokens": 3}, "allowed_token_ids"),
        ({"constraint": WithoutWords(("a",), "bad_words"), "ignore_eos": True}, "ignore_eos"),
    ],
    ids=["regex", "schema", "choice", "least length", "only ends", "no end"],
)
async def test_what_cannot_be_kept_is_refused_by_its_field(engine: Engine, params: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidConstraint) as caught:
        async with engine.submit([request(2), request(1, **params)]):
            pass
    assert caught.value.param == param
    assert engine.health().num_running + engine.health().num_waiting == 0


async def test_blocks_in_free_text_are_kept_or_refused_by_name(engine: Engine) -> None:
    constraint = TriggeredBlocks((BLOCK,), "<call>", "tools")
    try:
        held = await answers(engine, request(2, max_tokens=60, constraint=constraint, ignore_eos=False))
    except InvalidConstraint as error:
        assert error.param == "tools"
    else:
        assert all("<call>" not in spelled(tokens) or "{" in spelled(tokens) for tokens in held)


async def test_reader_that_never_reads_loses_its_choice_and_no_other_does() -> None:
    async with running(VLLM, stream_credit=1) as engine:
        (alone,) = await answers(engine, request(1, seed=3, max_tokens=200))
        async with engine.submit([request(1, max_tokens=LONG), request(1, seed=3, max_tokens=200)]) as submission:
            lazy, eager = submission.choices
            assert (await read(eager))[0] == alone
            await until(lambda: engine.health().num_running == 0)
            tokens, last = await read(lazy)
            assert last.end_reason is EndReason.ERROR
            assert last.error is not None and "64 steps behind" in last.error
            assert 64 <= len(tokens) < 200


async def test_transfer_of_keys_needs_a_connector(engine: Engine) -> None:
    assert Capability.KV_TRANSFER not in engine.info.capabilities
    with pytest.raises(UnsupportedByEngine, match="kv_transfer"):
        async with engine.submit([replace(request(), kv_transfer_params={"do_remote_decode": True})]):
            pass


async def test_prefix_of_another_namespace_is_not_found(engine: Engine) -> None:
    prompt = [30 + k % 50 for k in range(300)]

    async def cached(namespace: str) -> int:
        async with engine.submit([replace(request(2, prompt=prompt), cache_namespace=namespace)]) as submission:
            await read_all(submission.choices)
            return submission.prompts[0].num_cached_tokens

    assert await cached("a") == 0
    assert await cached("a") >= 128
    assert await cached("b") == 0


@pytest.mark.parametrize("seed", [0, 2**63 - 1, 2**63, 2**64 - 1])
async def test_every_seed_draws_the_same_twice(engine: Engine, seed: int) -> None:
    assert await answers(engine, request(seed=seed)) == await answers(engine, request(seed=seed))
