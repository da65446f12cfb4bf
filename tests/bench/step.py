"""Measure single engine steps, without HTTP: how long they take at n = 1, 8, 16 and 64, and where the time goes.

`python -m tests.bench.step` loads a model into the native runner as the server would, prefills one prompt, forks n
choices off it and prints the median step and its phases in milliseconds, and what keys and values take at the end.
Nothing else should run meanwhile.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import time
from pathlib import Path
from typing import Any

from engine.api import SamplingParams
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.native.runner import NativeRunner
from engine.runner import load_runner
from tests.engine.support import prefill_of

NUM_STEPS = 32


def main() -> None:
    args = _arguments()
    config = EngineConfig(model=args.model, num_threads=args.num_threads, num_speculative_tokens=0)
    runner = load_runner(config)
    if not isinstance(runner, NativeRunner):
        raise SystemExit(f"{runner.name} tells no phases; only the native runner does")
    rng = random.Random(args.seed)
    rows = [_measure(runner, config, length, n, rng) for length in args.prompts for n in args.n]
    print(
        f"{runner.name}, {runner.num_threads} threads; {NUM_STEPS} steps each, median ms; load {os.getloadavg()[0]:.1f}"
    )
    for row in rows:
        phases = "  ".join(f"{name} {ms:.2f}" for name, ms in row["phases_ms"].items())
        print(f"{row['prompt']:5d} tokens, n={row['n']:<3d} prefill {row['prefill_s']:.3f} s, ", end="")
        print(f"KV {row['kv_bytes'] / 2**20:5.1f} MiB, step {row['step_ms']:6.2f}: {phases}")
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.step", description=__doc__)
    parser.add_argument("--model", help="folder or hub id; the embedded default model without it")
    parser.add_argument("--n", type=int, nargs="+", default=[1, 8, 16, 64])
    parser.add_argument("--prompts", type=int, nargs="+", default=[512, 2048], help="lengths in tokens")
    parser.add_argument("--num-threads", type=int)
    parser.add_argument("--seed", type=int, default=0, help="of the prompts")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def _measure(runner: NativeRunner, config: EngineConfig, length: int, n: int, rng: random.Random) -> dict[str, Any]:
    core = EngineCore(config, runner)
    prompt = [rng.randrange(100, runner.vocab_size) for _ in range(length)]
    choices = [SamplingParams(seed=i, temperature=1.0, max_tokens=NUM_STEPS + 3, ignore_eos=True) for i in range(n)]
    core.add([prefill_of(prompt, choices)])
    prefill = _Phases(runner)
    while not core.scheduler.running:
        prefill.step(core)
    decode = _Phases(runner)
    core.step()  # copies the prompt's last page
    for _ in range(NUM_STEPS):
        decode.step(core)
    held = core.cache.num_held
    core.abort_all()
    return {
        "kv_pages": held,
        "kv_bytes": held * _page_bytes(runner),
        "prompt": length,
        "n": n,
        "prefill_s": sum(prefill.walls),
        "prefill_phases_ms": {name: 1e3 * sum(times) for name, times in prefill.phases.items()},
        "step_ms": 1e3 * statistics.median(decode.walls),
        "phases_ms": {name: 1e3 * statistics.median(times) for name, times in decode.phases.items()},
    }


def _page_bytes(runner: NativeRunner) -> int:
    _, elements = runner.engine.pool()
    return elements * 2 // runner.num_pages  # bfloat16


class _Phases:
    """Seconds per step, and per step and phase; "python" is what the native step does not account for."""

    def __init__(self, runner: NativeRunner) -> None:
        self._engine = runner.engine
        self.walls: list[float] = []
        self.phases: dict[str, list[float]] = {}

    def step(self, core: EngineCore) -> None:
        started = time.perf_counter()
        core.step()
        wall = time.perf_counter() - started
        phases = self._engine.phases()
        for name, seconds in (phases | {"python": wall - sum(phases.values())}).items():
            self.phases.setdefault(name, []).append(seconds)
        self.walls.append(wall)


if __name__ == "__main__":
    main()
