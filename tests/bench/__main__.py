"""Measure Chorus, and any other OpenAI-compatible servers beside it, on the work it exists for.

Starts this checkout's server with default settings (unless --no-own), takes it and every --peer through the same
scenarios, one server at a time, and prints medians and ratios. Nothing else should run meanwhile. Every prompt is
new, unless a scenario measures reuse; tokens are counted from the servers' own usage. Peers must take `ignore_eos`
(see --extra).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.bench.metrics import Summary, ratios
from tests.bench.plots import plot_curves
from tests.bench.scenarios import (
    CLIENTS,
    FAN_OUT,
    SCENARIOS,
    Scenario,
    Target,
    after_a_client_left,
    repeated_prompt,
    run_scenario,
)
from tests.bench.server import first_model, own_server, rss_bytes

Results = dict[str, dict[str, Any]]


def main() -> None:
    args = _arguments()
    results: Results = {}
    rng = random.Random(args.seed)
    extra = json.loads(args.extra)
    if not args.no_own:
        with own_server(args.port) as (url, start_seconds):
            target = Target("chorus", url, first_model(url), extra)
            results["chorus"] = asyncio.run(_measure(target, args, rng))
            results["chorus"] |= {"start_seconds": start_seconds, "rss_bytes": rss_bytes(args.port)}
    for peer in args.peer:
        label, _, url = peer.partition("=")
        target = Target(label, url.rstrip("/"), first_model(url.rstrip("/")), extra)
        results[label] = asyncio.run(_measure(target, args, rng))
    _print_ratios(results)
    if args.json:
        machine = {"date": time.strftime("%Y-%m-%d"), "cpus": os.cpu_count(), "load": os.getloadavg()}
        record = {**machine, "servers": results}
        args.json.write_text(json.dumps(record, indent=1, default=_plain))
    if args.plots:
        args.plots.mkdir(parents=True, exist_ok=True)
        for curve, x_label, name in (("fan_out", "n", "fan-out.png"), ("clients", "clients", "clients.png")):
            curves = {label: result[curve] for label, result in results.items() if result.get(curve)}
            if curves:
                plot_curves(curves, x_label, args.plots / name)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=__doc__)
    parser.add_argument("--peer", action="append", default=[], metavar="LABEL=URL", help="another server, repeatable")
    parser.add_argument("--no-own", action="store_true", help="do not start this checkout's server")
    parser.add_argument("--port", type=int, default=8099, help="for this checkout's server")
    parser.add_argument("--repeat", type=int, default=3, help="rounds per scenario, after a warm-up")
    parser.add_argument("--curves", action="store_true", help="also measure n = 1..64 and 1..32 clients")
    parser.add_argument("--settle", type=float, default=5.0, help="seconds after an abandoned request")
    parser.add_argument("--extra", default='{"ignore_eos": true}', help="JSON object, added to every request")
    parser.add_argument("--seed", type=int, default=time.time_ns() % 2**31, help="of the prompts")
    parser.add_argument("--json", type=Path, help="write all figures here")
    parser.add_argument("--plots", type=Path, metavar="DIR", help="write PNG plots here (with --curves)")
    return parser.parse_args()


async def _measure(target: Target, args: argparse.Namespace, rng: random.Random) -> dict[str, Any]:
    scenarios = await _run_all(target, SCENARIOS, args.repeat, rng)
    idle, after = await after_a_client_left(target, args.repeat, rng, args.settle)
    _print_pair(target, "a client left", after, idle)
    cold, warm = await repeated_prompt(target, args.repeat, rng)
    _print_pair(target, "prompt again", warm, cold)
    result: dict[str, Any] = {
        "scenarios": {scenario.name: summary for scenario, summary in scenarios},
        "after_left": after / idle,
        "again": warm / cold,
    }
    if args.curves:
        result["fan_out"] = await _run_all(target, FAN_OUT, args.repeat, rng)
        result["clients"] = await _run_all(target, CLIENTS, args.repeat, rng)
    return result


def _print_pair(target: Target, name: str, seconds: float, against: float) -> None:
    ratio = seconds / against
    print(f"{target.label:12} {name:18} {seconds:8.3f} s against {against:.3f} s: {ratio:.3f}", flush=True)


async def _run_all(
    target: Target, scenarios: Sequence[Scenario], repeats: int, rng: random.Random
) -> list[tuple[Scenario, Summary]]:
    measured = []
    for scenario in scenarios:
        summary = await run_scenario(target, scenario, repeats, rng)
        wall = f"{summary.wall:8.3f} s ({summary.wall_min:.3f}-{summary.wall_max:.3f})"
        rates = f"gap {1000 * summary.gap_median:.1f} ms  {summary.tokens_per_second:.0f} tokens/s"
        print(f"{target.label:12} {scenario.name:18} {wall}  first {summary.first_token:.3f} s  {rates}", flush=True)
        measured.append((scenario, summary))
    return measured


def _print_ratios(results: Results) -> None:
    walls = {label: {name: s.wall for name, s in result["scenarios"].items()} for label, result in results.items()}
    ours = walls.pop("chorus", {})
    for scenario, (best, ratio) in ratios(ours, walls).items():
        print(f"{scenario:18} {ratio:5.2f} of {best}")


def _plain(value: object) -> object:
    return asdict(value) if hasattr(value, "__dataclass_fields__") else str(value)


if __name__ == "__main__":
    main()
