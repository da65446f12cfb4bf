"""The app with faults that a test asks for from outside: by a request's seed, or by a file.

Run as `python -m tests.e2e.faulty_app` (instead of `python -m service`) or `hypercorn tests.e2e.faulty_app:app`.
FAULTY_STEP_SECONDS: pause of the fake engine between steps. FAULTY_LOAD_GATE: loading waits until this file exists.
FAULTY_KILL: the engine's next draw raises once this file exists.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import anyio

import service.backends
from engine.api import Engine
from engine.config import EngineConfig
from engine.fake import EOS_TOKEN_ID, FakeEngine, letter_rule
from engine.plan import SampledToken, StepPlan
from engine.thread import EngineThread
from service.settings import Settings
from tests.e2e.scripts import FAIL_SEED, FAULT_POSITION, HANG_SEED, SCRIPT_SEED, SCRIPTS

_gate = os.environ.get("FAULTY_LOAD_GATE")
_kill = os.environ.get("FAULTY_KILL")


def _die_if_told() -> None:
    if _kill is not None and Path(_kill).exists():
        raise RuntimeError("killed by a test")


def faulty_rule(seed: int, position: int, num_prompt_tokens: int) -> int:
    _die_if_told()
    if position == FAULT_POSITION and seed == FAIL_SEED:
        return -1
    if SCRIPT_SEED <= seed < SCRIPT_SEED + len(SCRIPTS):
        script = SCRIPTS[seed - SCRIPT_SEED]
        return script[position] if position < len(script) else EOS_TOKEN_ID
    return letter_rule(seed, position, num_prompt_tokens)


class FaultyRunner:
    """A model runner that fails where a sampling row asks for it."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def execute(self, plan: StepPlan) -> list[SampledToken]:
        due = [row.params.seed for row in plan.sampling_rows if len(row.output_ids) == FAULT_POSITION]
        _die_if_told()
        if HANG_SEED in due:
            while True:
                time.sleep(60)
        sampled: list[SampledToken] = self._runner.execute(plan)
        failing = [row.params.seed == FAIL_SEED and len(row.output_ids) == FAULT_POSITION for row in plan.sampling_rows]
        return [SampledToken(-1) if fails else token for fails, token in zip(failing, sampled, strict=True)]


def _load(config: EngineConfig) -> Any:
    while _gate is not None and not Path(_gate).exists():
        time.sleep(0.01)
    from engine.runner import load_runner

    return FaultyRunner(load_runner(config))


async def _wait_for_gate() -> None:
    while _gate is not None and not await anyio.Path(_gate).exists():  # noqa: ASYNC110 another process makes it
        await anyio.sleep(0.01)


def _build_engine(settings: Settings) -> Engine:
    config = settings.engine_config()
    if settings.engine == "torch":
        return EngineThread(config, _load)
    step_seconds = float(os.environ.get("FAULTY_STEP_SECONDS", "0"))
    return FakeEngine(config, step_seconds=step_seconds, rule=faulty_rule, load=_wait_for_gate)


service.backends.build_engine = _build_engine

from service.app import app  # noqa: E402 it builds the engine

__all__ = ["app"]

if __name__ == "__main__":
    from service.__main__ import main

    sys.exit(main())
