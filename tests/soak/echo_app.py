"""The server whose model says back the word that its prompt hides, read through the real engine's KV pages.

`python -m tests.soak.echo_app` instead of `python -m service`. A page that is handed to the wrong request shows as
another's word. SIGUSR1 writes the number of living coroutines to standard error.
"""

from __future__ import annotations

import gc
import inspect
import signal
import sys

import service.backends
from engine.api import Engine
from engine.plan import SampledToken, StepPlan
from engine.thread import EngineThread
from service.settings import Settings
from tests.engine.support import CheckingRunner

WORD_LENGTH = 8
NUM_PAGES = 64  # so few that choices give way to each other


class EchoRunner(CheckingRunner):
    """Token k of an answer is letter k of the word before the prompt's first ">", over and over."""

    def execute(self, plan: StepPlan) -> list[SampledToken]:
        tokens = super().execute(plan)
        self.plans.clear()  # a record for tests, which would be the growth that is looked for here
        return tokens

    def _draw(self, plan: StepPlan, logits_row: int, position: int) -> SampledToken:
        row = plan.logit_rows[logits_row]
        context = self.context(plan.segments, row, plan.positions[row])
        end = context.index(ord(">"))
        return SampledToken(context[end - WORD_LENGTH + (len(context) - end - 1) % WORD_LENGTH])


def _build_engine(settings: Settings) -> Engine:
    return EngineThread(settings.engine_config(), lambda _: EchoRunner(num_pages=NUM_PAGES))


def _tell(*_: object) -> None:
    gc.collect()
    coroutines = filter(inspect.iscoroutine, gc.get_objects())
    count = sum(inspect.getcoroutinestate(coroutine) == inspect.CORO_SUSPENDED for coroutine in coroutines)
    sys.stderr.write(f"coroutines: {count}\n")
    sys.stderr.flush()


service.backends.build_engine = _build_engine

from service.app import app  # noqa: E402 it builds the engine

__all__ = ["app"]

if __name__ == "__main__":
    from service.__main__ import main

    signal.signal(signal.SIGUSR1, _tell)
    sys.exit(main())
