"""vLLM's `LLMEngine` as what the engine's thread steps. Imports vllm inside functions only."""

from __future__ import annotations

import logging
import time
from collections import deque
from typing import Any

from engine.api import (
    ChoiceUpdate,
    EndReason,
    EngineHealth,
    EngineState,
    InvalidConstraint,
    StepRecord,
)
from engine.sequence import Prefill, Sequence, Update
from engine.stats import EngineStats
from engine.vllm_params import SpecialToken, end_of, logprobs_of, prompt_logprobs_of, vllm_sampling

logger = logging.getLogger("chorus.engine")

_NUM_STEPS_KEPT = 256

CREDITS_BEFORE_FAILURE = 64
"""A reader may be this many times `stream_credit` updates behind: vLLM cannot wait for it, and memory is bounded."""

_EMPTY_STEP_SECONDS = 0.001
"""Pause after a step that made nothing: something else is waited for, such as a grammar or another machine's keys."""


class SchedulerStats:
    """Stands in for vLLM's own logger manager, and keeps what its scheduler says."""

    def __init__(self) -> None:
        self.num_running = 0
        self.usage = 0.0
        self.looked_up = 0
        self.found = 0
        self.preempted = 0
        self.prompt_tokens = 0

    def record(self, scheduler_stats: Any, iteration_stats: Any, **_: object) -> None:
        if scheduler_stats is not None:
            self.num_running = scheduler_stats.num_running_reqs
            self.usage = scheduler_stats.kv_cache_usage
            self.looked_up += scheduler_stats.prefix_cache_stats.queries
            self.found += scheduler_stats.prefix_cache_stats.hits
        if iteration_stats is not None:
            self.preempted += iteration_stats.num_preempted_reqs
            self.prompt_tokens += iteration_stats.prompt_token_stats.computed

    def log(self) -> None:
        """vLLM asks for a line every few seconds."""


class Copies:
    """The copies of the model that data parallel makes, each a core in a process of its own.

    vLLM's client talks to the one that it is turned to. The choices of a prompt go to one together, and share it there.
    """

    def __init__(self, client: Any) -> None:
        self._client = client
        self._cores: list[bytes] = list(getattr(client, "core_engines", ()))
        self._load = dict.fromkeys(self._cores, 0)
        self._places: dict[Sequence, bytes] = {}

    @property
    def is_one(self) -> bool:
        return len(self._cores) < 2

    def place(self, sequences: list[Sequence]) -> None:
        if self.is_one:
            return
        core = min(self._cores, key=self._load.__getitem__)
        self._load[core] += len(sequences)
        self._places.update(dict.fromkeys(sequences, core))

    def turn_to(self, sequence: Sequence) -> None:
        """Before anything is said of it."""
        if sequence in self._places:
            self._client.core_engine = self._places[sequence]

    def forget(self, sequence: Sequence) -> None:
        core = self._places.pop(sequence, None)
        if core is not None:
            self._load[core] -= 1


class VllmCore:
    """llm: an LLMEngine that logs stats. eos_token_ids: what ends a choice unless it ignores them."""

    def __init__(
        self, llm: Any, *, eos_token_ids: frozenset[int], special_token: SpecialToken, stream_credit: int
    ) -> None:
        self._llm = llm
        self._eos_token_ids = eos_token_ids
        self._special_token = special_token
        self._max_behind = stream_credit * CREDITS_BEFORE_FAILURE
        self._live: dict[str, Sequence] = {}  # by the id that vLLM was given
        self._held: dict[Sequence, list[Sequence]] = {}  # siblings of one that tells of the prompt, until it has
        self._begun: set[str] = set()
        self._copies = Copies(llm.engine_core)
        self._counts = SchedulerStats()
        llm.logger_manager = self._counts
        self._num_blocks: int = max(1, (llm.vllm_config.cache_config.num_gpu_blocks or 1) - 1)  # one is never used
        inner = getattr(llm.engine_core, "engine_core", None)  # the engine itself, where it is in this process
        self._scheduler: Any = getattr(inner, "scheduler", None)
        self.steps: deque[StepRecord] = deque(maxlen=_NUM_STEPS_KEPT)
        self.stats = EngineStats()
        self._num_steps = 0
        self._num_generated = 0
        self._last_step_at = 0.0

    @property
    def has_work(self) -> bool:
        return bool(self._live)

    def add(self, prefills: list[Prefill]) -> list[Update]:
        for prefill in prefills:
            self._copies.place(prefill.sequences)
        return [update for prefill in prefills for update in self._begin(prefill.sequences)]

    def _begin(self, sequences: list[Sequence]) -> list[Update]:
        """Of one prompt. Where its log probabilities are wanted the first tells them, before the others say a word."""
        if not sequences:
            return []
        first, *others = sequences
        if first.prompt.num_logprobs is None:
            return [update for sequence in sequences for update in self._add(sequence, None)]
        self._held[first] = others
        failed = self._add(first, first.prompt.num_logprobs)
        return failed + self._release(first) if failed else []

    def _release(self, first: Sequence) -> list[Update]:
        """Its siblings may come; where it could not tell of the prompt the next one does."""
        others = [sequence for sequence in self._held.pop(first, []) if not sequence.ended]
        if first.prompt.is_scored:
            return self._begin(others)
        return [update for sequence in others for update in self._add(sequence, None)]

    def _add(self, sequence: Sequence, prompt_logprobs: int | None) -> list[Update]:
        from vllm.exceptions import VLLMClientError
        from vllm.inputs.engine import tokens_input

        prompt = sequence.prompt
        salt = prompt.namespace or None
        try:
            params = vllm_sampling(
                sequence.params,
                max(1, sequence.max_tokens),
                self._eos_token_ids,
                self._special_token,
                prompt_logprobs=prompt_logprobs,
                kv_transfer_params=prompt.kv_transfer_params,
            )
            inputs = tokens_input(list(prompt.token_ids), cache_salt=salt)
            self._copies.turn_to(sequence)
            self._llm.add_request(_name(sequence), inputs, params, priority=prompt.order[0])
        except (VLLMClientError, ValueError, InvalidConstraint) as error:
            sequence.ended = True
            self._copies.forget(sequence)
            return [(sequence, ChoiceUpdate(end_reason=EndReason.ERROR, error=f"vLLM refuses this choice: {error}"))]
        self._live[_name(sequence)] = sequence
        return []

    def abort(self, sequence: Sequence, reason: EndReason) -> Update | None:
        """vLLM says nothing more of a request that is aborted: the last update is made here."""
        if sequence.ended:
            return None
        self._forget(sequence)
        return sequence, ChoiceUpdate(end_reason=reason)

    def _forget(self, sequence: Sequence) -> None:
        sequence.ended = True
        self._begun.discard(_name(sequence))
        if self._live.pop(_name(sequence), None) is not None:
            self._copies.turn_to(sequence)
            self._llm.abort_request([_name(sequence)])
        self._copies.forget(sequence)

    def abort_all(self) -> None:
        for sequence in [*self._live.values(), *(other for others in self._held.values() for other in others)]:
            self.abort(sequence, EndReason.CANCELLED)
        self._held.clear()

    def step(self) -> list[Update] | None:
        updates = [update for first in [*self._held] if first.ended for update in self._release(first)]
        if not self._live:  # in a process of its own vLLM would wait for ever
            return updates or None
        started, num_prompt_tokens = time.monotonic(), self._counts.prompt_tokens
        outputs = self._llm.step()
        made = [update for output in outputs if (update := self._update(output)) is not None]
        for first in [sequence for sequence, _ in made if sequence in self._held]:
            updates += self._release(first)
        if made or time.monotonic() - started >= _EMPTY_STEP_SECONDS:
            self._record(started, made, self._counts.prompt_tokens - num_prompt_tokens)
        else:
            time.sleep(_EMPTY_STEP_SECONDS)
        return updates + made + self._left_behind(made)

    def _update(self, output: Any) -> Update | None:
        sequence = self._live.get(output.request_id)
        if sequence is None:
            return None
        self._tell_of_prompt(sequence, output)
        (completion,) = output.outputs
        token_ids = tuple(completion.token_ids) if sequence.max_tokens else ()
        update = ChoiceUpdate(token_ids)
        num_best = sequence.params.logprobs
        if num_best is not None and token_ids:
            update.logprobs = logprobs_of(token_ids, completion.logprobs, num_best)
        if completion.finish_reason is not None:
            self._end(sequence, update, completion, output.kv_transfer_params)
        elif not token_ids:
            return None
        sequence.num_posted += 1
        self._num_generated += len(token_ids)
        return sequence, update

    def _tell_of_prompt(self, sequence: Sequence, output: Any) -> None:
        if output.request_id in self._begun:
            return
        self._begun.add(output.request_id)
        prompt, info = sequence.prompt, sequence.prompt.info
        if info.started_at is None:
            info.started_at = output.metrics.scheduled_ts if output.metrics else time.monotonic()
            info.num_cached_tokens = output.num_cached_tokens or 0
        if prompt.is_scored and output.prompt_logprobs and prompt.num_logprobs is not None:
            info.logprobs += prompt_logprobs_of(prompt.token_ids, output.prompt_logprobs, prompt.num_logprobs)

    def _end(self, sequence: Sequence, update: ChoiceUpdate, completion: Any, transfer: Any) -> None:
        sequence.ended = True
        self._begun.discard(_name(sequence))
        self._copies.forget(sequence)
        del self._live[_name(sequence)]
        update.kv_transfer_params = transfer
        if sequence.max_tokens == 0:
            update.end_reason = EndReason.LENGTH
            return
        update.end_reason, update.stop_reason, update.error = end_of(
            completion.finish_reason, completion.stop_reason, sequence.params, self._eos_token_ids
        )

    def _left_behind(self, made: list[Update]) -> list[Update]:
        """Choices whose readers are too far behind to be waited for."""
        late = [sequence for sequence, _ in made if not sequence.ended and not sequence.has_credit(self._max_behind)]
        message = f"the answer was not read: its reader is {self._max_behind} steps behind, and vLLM cannot wait for it"
        for sequence in late:
            self._forget(sequence)
        return [(sequence, ChoiceUpdate(end_reason=EndReason.ERROR, error=message)) for sequence in late]

    def _record(self, started: float, made: list[Update], num_prompt_rows: int) -> None:
        """num_prompt_rows: of the prompts that are complete now, although earlier steps may have computed some."""
        now, last = time.monotonic(), self._last_step_at
        self._num_steps += 1
        self._last_step_at = now
        num_drawn = sum(len(update.token_ids) for _, update in made)
        num_decodes = sum(sequence.num_posted > 1 for sequence, update in made if update.token_ids)
        self.stats.record_step(now - started, num_prompt_rows + num_decodes, num_drawn, num_decodes, now - last)
        record = StepRecord(
            number=self._num_steps,
            seconds=now - started,
            num_decode_rows=num_decodes,
            num_prefill_rows=num_prompt_rows,
            segment_rows=(),
            num_running=len(self._begun),
            num_waiting=len(self._live) - len(self._begun),
        )
        self.steps.append(record)

    def health(self) -> EngineHealth:
        counts, is_idle = self._counts, not self._live
        usage = counts.usage if self._scheduler is None else self._scheduler.kv_cache_manager.usage
        held = 0 if is_idle and self._scheduler is None else round(usage * self._num_blocks)
        return EngineHealth(
            EngineState.READY,
            # of several copies nobody knows which one has told its numbers
            num_running=min(len(self._live), counts.num_running if self._copies.is_one else len(self._begun)),
            pages_free=self._num_blocks - held,
            pages_held=held,
            num_steps=self._num_steps,
            prompt_tokens=counts.prompt_tokens,
            generation_tokens=self._num_generated,
            num_preemptions=counts.preempted,
            prefix_tokens_looked_up=counts.looked_up,
            prefix_tokens_found=counts.found,
            stats=self.stats,
        )

    def close(self) -> None:
        self._llm.engine_core.shutdown()


def _name(sequence: Sequence) -> str:
    return str(sequence.id)
