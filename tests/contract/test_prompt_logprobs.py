"""Log probabilities of prompts, and requests that want nothing else."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from engine.api import Capability, EndReason, Engine, PromptInfo, Request
from tests.contract.harness import EngineCase, read_all, request, running

pytestmark = pytest.mark.anyio

PROMPT = [11 + k % 60 for k in range(150)]


async def told(engine: Engine, asked: Request) -> tuple[PromptInfo, list[list[int]]]:
    async with engine.submit([asked]) as submission:
        tokens = [tokens for tokens, _ in await read_all(submission.choices)]
        return submission.prompts[0], tokens


async def test_each_token_but_the_first_has_one_whatever_was_cached(case: EngineCase) -> None:
    async with running(case, Capability.PROMPT_LOGPROBS) as engine:
        plain, answers = await told(engine, request(2, prompt=PROMPT))
        assert plain.logprobs == []
        for _ in range(2):
            info, same = await told(engine, replace(request(2, prompt=PROMPT), prompt_logprobs=3))
            assert same == answers
            assert info.num_cached_tokens == 0
            entries = [entry for entry in info.logprobs if entry is not None]
            assert [entry.token_id for entry in entries] == PROMPT[1:]
            assert all(math.isfinite(entry.logprob) and len(entry.top) == 3 for entry in entries)


async def test_a_prompt_of_one_token_has_none(case: EngineCase) -> None:
    async with running(case, Capability.PROMPT_LOGPROBS) as engine:
        info, _ = await told(engine, replace(request(prompt=[11]), prompt_logprobs=0))
        assert info.logprobs == []


@pytest.mark.parametrize("prompt_logprobs", [None, 0])
async def test_a_choice_of_no_tokens_ends_when_its_prompt_is_computed(
    case: EngineCase, prompt_logprobs: int | None
) -> None:
    needs = None if prompt_logprobs is None else Capability.PROMPT_LOGPROBS
    async with running(case, needs, max_model_len=len(PROMPT) + case.num_spare) as engine:
        asked = replace(request(3, prompt=PROMPT, max_tokens=0), prompt_logprobs=prompt_logprobs)
        async with engine.submit([asked]) as submission:
            for tokens, last in await read_all(submission.choices):
                assert (tokens, last.end_reason) == ([], EndReason.LENGTH)
            assert len(submission.prompts[0].logprobs) == (0 if prompt_logprobs is None else len(PROMPT) - 1)
