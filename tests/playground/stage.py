"""`python -m service` with a fake engine that says what scripts.py has, slowly enough to be watched.

STAGE_STEP_SECONDS: pause between steps. STAGE_LOAD_GATE: loading waits until this file exists. STAGE_KILL: the engine's
next step raises once this file exists.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import anyio

import service.backends
from engine.api import Engine
from engine.fake import EOS_TOKEN_ID, FakeEngine
from service.settings import Settings
from tests.playground.scripts import AGREE_SEED, AGREEING, FAIL_SEED, PROSE, SCRIPT_SEED, SCRIPTS

_gate = os.environ.get("STAGE_LOAD_GATE")
_kill = os.environ.get("STAGE_KILL")
_bytes = {
    seed + place: text.encode()
    for seed, texts in ((SCRIPT_SEED, SCRIPTS), (AGREE_SEED, AGREEING))
    for place, text in enumerate(texts)
}
_prose = PROSE.encode()


def staged_rule(seed: int, position: int, num_prompt_tokens: int) -> int:
    if _kill is not None and Path(_kill).exists():
        raise RuntimeError("killed by a test")
    if seed == FAIL_SEED and position == 3:
        return -1
    if seed in _bytes:
        script = _bytes[seed]
        return script[position] if position < len(script) else EOS_TOKEN_ID
    return _prose[(position + 7 * seed) % len(_prose)]


async def _wait_for_gate() -> None:
    while _gate is not None and not await anyio.Path(_gate).exists():  # noqa: ASYNC110 another process makes it
        await anyio.sleep(0.01)


def _build_engine(settings: Settings) -> Engine:
    step_seconds = float(os.environ.get("STAGE_STEP_SECONDS", "0.004"))
    return FakeEngine(settings.engine_config(), step_seconds=step_seconds, rule=staged_rule, load=_wait_for_gate)


service.backends.build_engine = _build_engine

from service.app import app  # noqa: E402 it builds the engine

__all__ = ["app"]

if __name__ == "__main__":
    from service.__main__ import main

    sys.exit(main())
