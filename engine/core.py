"""One engine step: schedule, execute, book. No threads and no torch; the same for every runner."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterable
from typing import Protocol

from engine.api import ChoiceUpdate, EndReason, EngineHealth, EngineState, StepRecord
from engine.config import EngineConfig
from engine.kv_cache import KVCache
from engine.matchers import Matcher
from engine.plan import ModelRunner, SampledToken, StepPlan
from engine.planner import build_plan
from engine.schedule import Schedule
from engine.scheduler import Scheduler
from engine.sequence import Prefill, Sequence, Update
from engine.stats import EngineStats

logger = logging.getLogger("chorus.engine")

_NUM_STEPS_KEPT = 256

_MAX_FORCED = 64
"""Tokens that a constraint forces in one step; more come with the next."""

# Ends after which a choice is a likely start of the next request (the next turn of its chat).
_WORTH_CACHING = frozenset({EndReason.STOP, EndReason.LENGTH})


class StepCore(Protocol):
    """What an engine's thread steps. All methods run on that thread; anybody reads `steps`, oldest first."""

    @property
    def steps(self) -> Iterable[StepRecord]: ...

    @property
    def has_work(self) -> bool: ...

    def add(self, prefills: list[Prefill]) -> list[Update]:
        """Take on what was admitted; updates are of choices that failed at once."""
        ...

    def abort(self, sequence: Sequence, reason: EndReason) -> Update | None:
        """Take a choice out before the next step and free what it holds; None if it had ended already."""
        ...

    def abort_all(self) -> None: ...

    def step(self) -> list[Update] | None:
        """Run one step and return what it made; None when nothing could run."""
        ...

    def health(self) -> EngineHealth:
        """What is running, held and counted; the state is that of a healthy engine."""
        ...

    def close(self) -> None:
        """Let go of everything; nothing is stepped any more."""
        ...


class EngineCore:
    """Owns scheduler, cache and runner; used from one thread."""

    def __init__(self, config: EngineConfig, runner: ModelRunner) -> None:
        self.runner = runner
        self.cache = KVCache(runner.num_pages, prefix_caching=config.enable_prefix_caching)
        self.scheduler = Scheduler(
            self.cache,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            stream_credit=config.stream_credit,
            num_speculative_tokens=config.num_speculative_tokens if runner.bitwise else 0,
        )
        self.num_prompt_tokens = 0
        self.num_generation_tokens = 0
        self.num_draft_tokens = 0
        self.num_accepted_tokens = 0
        self.num_steps = 0
        self.stats = EngineStats()
        self._last_step_at = 0.0  # of time.monotonic(), at its end
        self.steps: deque[StepRecord] = deque(maxlen=_NUM_STEPS_KEPT)

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def add(self, prefills: list[Prefill]) -> list[Update]:
        for prefill in prefills:
            self.scheduler.add(prefill)
        return []

    def abort(self, sequence: Sequence, reason: EndReason) -> Update | None:
        if sequence.ended:
            return None
        self.scheduler.end(sequence, keep=reason in _WORTH_CACHING)
        self._check_idle()
        return sequence, ChoiceUpdate(end_reason=reason)

    def abort_all(self) -> None:
        scheduler = self.scheduler
        queued = [sequence for prefill in (*scheduler.prefilling, *scheduler.waiting) for sequence in prefill.sequences]
        for sequence in (*scheduler.running, *queued):
            self.abort(sequence, EndReason.CANCELLED)

    def health(self) -> EngineHealth:
        return EngineHealth(
            EngineState.READY,
            num_running=self.scheduler.num_running,
            pages_free=self.cache.num_free,
            pages_cached=self.cache.num_cached,
            pages_held=self.cache.num_held,
            num_steps=self.num_steps,
            prompt_tokens=self.num_prompt_tokens,
            generation_tokens=self.num_generation_tokens,
            num_preemptions=self.scheduler.num_preemptions,
            prefix_tokens_looked_up=self.scheduler.num_looked_up,
            prefix_tokens_found=self.scheduler.num_found,
            draft_tokens=self.num_draft_tokens,
            accepted_draft_tokens=self.num_accepted_tokens,
            stats=self.stats,
        )

    def close(self) -> None:
        """Memory goes with the process."""

    def step(self) -> list[Update] | None:
        schedule = self.scheduler.schedule()
        if schedule is None:
            return None
        started = time.monotonic()
        plan, drawn, scored = build_plan(schedule, self.runner.eos_token_ids)
        try:
            sampled = self.runner.execute(plan)
        except MemoryError:
            logger.exception("a step ran out of memory; its requests fail")
            return self._fail(schedule)
        self._record(plan, schedule, started)
        self.scheduler.advance(schedule)
        self.num_prompt_tokens += sum(chunk.num_tokens for chunk in schedule.chunks if not chunk.prefill.is_forced)
        for prompt, token in zip(scored, sampled[len(drawn) :], strict=True):
            prompt.info.logprobs.append(token.logprobs)
        if schedule.draft:
            updates = self._book_draft(drawn[0], schedule.draft, sampled)
        else:
            booked = (self._book(sequence, token) for sequence, token in zip(drawn, sampled[: len(drawn)], strict=True))
            updates = [update for made in booked for update in made]
        updates += [self._end_at_once(sequence) for sequence in schedule.not_drawing]
        self._check_idle()
        return updates

    def _fail(self, schedule: Schedule) -> list[Update]:
        update = ChoiceUpdate(end_reason=EndReason.ERROR, error="the server ran out of memory for this request")
        updates = [(sequence, update) for sequence in self.scheduler.discard(schedule)]
        self._check_idle()
        return updates

    def _record(self, plan: StepPlan, schedule: Schedule, started: float) -> None:
        now, last = time.monotonic(), self._last_step_at
        seconds, num_decodes = now - started, len(schedule.decodes)
        num_drawn = num_decodes + sum(len(chunk.drawing) for chunk in schedule.chunks)
        self.num_steps += 1
        self.stats.record_step(seconds, len(plan.token_ids), num_drawn, num_decodes, now - last)
        self._last_step_at = now
        self.steps.append(
            StepRecord(
                number=self.num_steps,
                seconds=seconds,
                num_decode_rows=len(schedule.decodes) + len(schedule.draft),
                num_prefill_rows=len(plan.token_ids) - len(schedule.decodes) - len(schedule.draft),
                segment_rows=tuple(segment.num_rows for segment in plan.segments),
                num_running=self.scheduler.num_running,
                num_waiting=sum(len(prefill.sequences) for prefill in self.scheduler.waiting),
            )
        )

    def _book_draft(self, sequence: Sequence, draft: tuple[int, ...], sampled: list[SampledToken]) -> list[Update]:
        """What was drawn, up to the first token that was not foreseen: the rows after it are of another text."""
        updates: list[Update] = []
        num_accepted = 0
        for token, guess in zip(sampled, (*draft, None), strict=True):
            updates += self._book(sequence, token)
            if sequence.ended or token.token_id != guess:
                break
            num_accepted += 1
        assert sequence.drafter is not None
        sequence.drafter.learn(len(draft), num_accepted, self.scheduler.num_speculative_tokens)
        self.num_draft_tokens += len(draft)
        self.num_accepted_tokens += num_accepted
        return updates

    def _book(self, sequence: Sequence, token: SampledToken) -> list[Update]:
        """The token that was drawn, and those that its constraint leaves no choice about."""
        error = _error_of(sequence.matcher, token.token_id)
        if error is not None:
            self.scheduler.end(sequence, keep=False)
            return [(sequence, ChoiceUpdate(end_reason=EndReason.ERROR, error=error))]
        updates = [self._append(sequence, token)]
        while len(updates) <= _MAX_FORCED and (forced := self._forced(sequence)) is not None:
            sequence.num_ahead += 1
            updates.append(self._append(sequence, SampledToken(forced)))
        if sequence.num_ahead and not sequence.ended:
            self.scheduler.fast_forward(sequence)
        return updates

    def _forced(self, sequence: Sequence) -> int | None:
        """The next token of a choice, where it is known without the model and nobody asks how likely it was."""
        matcher = sequence.matcher
        if sequence.ended or matcher is None or sequence.params.logprobs is not None:
            return None
        forced = matcher.forced() if self.scheduler.has_credit(sequence) else None
        return forced if forced is not None and matcher.accept(forced) else None

    def _append(self, sequence: Sequence, token: SampledToken) -> Update:
        sequence.output_ids.append(token.token_id)
        sequence.num_posted += 1
        self.num_generation_tokens += 1
        reason, stop_reason = self._end_of(sequence, token.token_id)
        if reason is not None:
            self.scheduler.end(sequence, keep=True)
        logprobs = () if token.logprobs is None else (token.logprobs,)
        return sequence, ChoiceUpdate((token.token_id,), "", logprobs, reason, stop_reason)

    def _end_at_once(self, sequence: Sequence) -> Update:
        """Of one whose prompt is all that was wanted."""
        self.scheduler.end(sequence, keep=True)
        return sequence, ChoiceUpdate(end_reason=EndReason.LENGTH)

    def _end_of(self, sequence: Sequence, token_id: int) -> tuple[EndReason | None, int | None]:
        params = sequence.params
        is_eos = token_id in self.runner.eos_token_ids
        if is_eos and sequence.matcher is not None and not sequence.matcher.is_open:
            return EndReason.STOP, None  # nothing may follow, not even where other choices would go on
        if len(sequence.output_ids) >= params.min_tokens:
            if is_eos and not params.ignore_eos:
                return EndReason.STOP, None
            if token_id in params.stop_token_ids:
                return EndReason.STOP, token_id
        if len(sequence.output_ids) >= sequence.max_tokens:
            return EndReason.LENGTH, None
        return None, None

    def _check_idle(self) -> None:
        """Leaks show at once: when nothing runs, no page may be held."""
        if not self.has_work:
            self.cache.check()
            assert self.cache.num_held == 0, f"{self.cache.num_held} KV pages are held although nothing runs"


def _error_of(matcher: Matcher | None, token_id: int) -> str | None:
    """Why a choice cannot go on with the token that was drawn for it; its matcher goes on with one that fits."""
    if matcher is not None and matcher.error is not None:
        return f"the constraint cannot be kept any further: {matcher.error}"
    if token_id < 0:
        return "the model produced non-finite logits for this choice"
    if matcher is not None and not matcher.accept(token_id):
        return "the model runner drew a token that the constraint does not allow"
    return None
