"""Model runners that fail as a test says. The engine's thread around them is the real one."""

from __future__ import annotations

import threading
from collections.abc import Callable

from engine.config import EngineConfig
from engine.plan import SampledToken, StepPlan
from engine.thread import EngineThread
from tests.engine.support import CheckingRunner

FAULTY_SEED = 13
"""The choice whose draw is at fault."""


class LetterRunner(CheckingRunner):
    """Draws letters that follow from the context, so that a wrong page shows in the answer."""

    def _draw(self, plan: StepPlan, logits_row: int, position: int) -> SampledToken:
        return SampledToken(ord("a") + super()._draw(plan, logits_row, position).token_id % 26)


class FaultyRunner(LetterRunner):
    """Does `fault` in each step that draws the given number of tokens into the faulty choice's answer."""

    def __init__(self, fault: Callable[[], None], at: int = 3) -> None:
        super().__init__()
        self._fault = fault
        self._at = at

    def execute(self, plan: StepPlan) -> list[SampledToken]:
        if any(row.params.seed == FAULTY_SEED and len(row.output_ids) == self._at for row in plan.sampling_rows):
            self._fault()
        return super().execute(plan)


class NotANumberRunner(LetterRunner):
    """The faulty choice's logits are NaN from its fourth token on; runners say -1 then."""

    def execute(self, plan: StepPlan) -> list[SampledToken]:
        tokens = super().execute(plan)
        bad = [row.params.seed == FAULTY_SEED and len(row.output_ids) == 3 for row in plan.sampling_rows]
        return [SampledToken(-1) if is_bad else token for is_bad, token in zip(bad, tokens, strict=True)]


class GatedRunner(LetterRunner):
    """Every step waits until the test lets it go on. entered: a step has begun and waits."""

    def __init__(self) -> None:
        super().__init__()
        self.is_open = False
        self._changed = threading.Condition()
        self._entered, self._released = 0, 0

    @property
    def entered(self) -> bool:
        return self._entered > self._released

    def release(self, *, for_good: bool = False) -> None:
        with self._changed:
            self._released += 1
            self.is_open |= for_good
            self._changed.notify()

    def execute(self, plan: StepPlan) -> list[SampledToken]:
        with self._changed:
            self._entered += 1
            own = self._entered
            assert self._changed.wait_for(lambda: self.is_open or self._released >= own, 60)
        return super().execute(plan)


def engine_of(runner: CheckingRunner, **options: float) -> EngineThread:
    return EngineThread(EngineConfig(served_model_name="org/m", **options), lambda _: runner)  # type: ignore[arg-type]
