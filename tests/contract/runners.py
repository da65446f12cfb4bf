"""A model runner without a model, for EngineThread: every draw depends on seed, position and the whole context."""

from __future__ import annotations

import time
from array import array
from collections.abc import Sequence

from engine.api import EmbedRequest, SamplingParams, TokenLogprobs
from engine.config import EngineConfig
from engine.embedding import Embedder
from engine.fake import FakeEmbedder
from engine.plan import SampledToken, StepPlan
from engine.thread import EngineThread
from tests.contract.harness import FAILING_SEED
from tests.engine.support import CheckingRunner

STEP_SECONDS = 0.001


class SeededRunner(CheckingRunner):
    """Checks every plan as CheckingRunner does. is_broken: its next step raises."""

    is_broken = False

    def execute(self, plan: StepPlan) -> list[SampledToken]:
        if self.is_broken:
            raise RuntimeError("killed by a test")
        time.sleep(STEP_SECONDS)
        super().execute(plan)
        self.plans.clear()
        return [self._seeded_draw(plan, number) for number in range(len(plan.sampling_rows))]

    def _seeded_draw(self, plan: StepPlan, number: int) -> SampledToken:
        sampling = plan.sampling_rows[number]
        params = sampling.params
        if params.seed == FAILING_SEED and len(sampling.output_ids) == 2:
            return SampledToken(-1)
        row = plan.logit_rows[sampling.logits_row]
        token_id = self._hash(params, self.context(list(plan.segments), row, plan.positions[row]))
        token_id = next((forced for forced, bias in params.logit_bias if bias >= 100), token_id)
        while token_id in sampling.blocked_ids:
            token_id = (token_id + 1) % self.vocab_size
        if params.logprobs is None:
            return SampledToken(token_id)
        logprob = -(self._hash(params, [*sampling.prompt_ids, token_id]) % 100) / 10
        best = tuple((other, -1.0 - other) for other in range(params.logprobs))
        return SampledToken(token_id, TokenLogprobs(token_id, logprob, best))

    def _hash(self, params: SamplingParams, context: list[int]) -> int:
        value = params.seed if params.temperature > 0 else 0
        for token_id in context:
            value = (value * 31 + token_id + 1) % 1_000_003
        return value % (self.vocab_size - 2)


class BreakableEmbedder:
    """Another one. is_broken: its next batch raises; is_full: it raises MemoryError, and goes on after that."""

    is_broken = False
    is_full = False

    def __init__(self, embedder: Embedder) -> None:
        self._embedder = embedder
        self.info = embedder.info

    def embed(self, batch: Sequence[EmbedRequest]) -> Sequence[array[float] | None]:
        if self.is_broken:
            raise RuntimeError("killed by a test")
        if self.is_full:
            self.is_full = False
            raise MemoryError
        time.sleep(STEP_SECONDS)
        return self._embedder.embed(batch)


class SeededEngine(EngineThread):
    """An EngineThread whose runner and embedder a test can break."""

    def __init__(self, config: EngineConfig) -> None:
        self.runner = SeededRunner(num_pages=2048, max_model_len=config.max_model_len or 4096)
        self.embedder = BreakableEmbedder(FakeEmbedder(config.served_embedding_model_name))
        super().__init__(config, lambda _: self.runner, lambda _: self.embedder if config.embedding_model else None)
