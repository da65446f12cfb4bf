"""A soak: python -m tests.soak [--minutes 10] [--worker asyncio|trio] [--plot FILE] [--json FILE].

Traffic at saturation against a server of its own, whose memory, descriptors, coroutines and held KV pages are sampled.
Ends with 1 when something grew that should not, or an answer was wrong.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import msgspec

from tests.soak.run import Report, plot, soak


def record(report: Report, arguments: argparse.Namespace) -> dict[str, object]:
    """All that was measured, and how it was called."""
    how = {name: value for name, value in vars(arguments).items() if name not in ("plot", "json")}
    return {"how": how, "failures": report.failures(), "report": report}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--worker", choices=["asyncio", "uvloop", "trio"], default="asyncio")
    parser.add_argument("--clients", type=int, default=24)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    report = soak(
        seconds=arguments.minutes * 60,
        worker=arguments.worker,
        num_clients=arguments.clients,
        seed=arguments.seed,
    )
    print(report.text())
    if arguments.plot is not None:
        plot(report, arguments.plot)
    if arguments.json is not None:
        arguments.json.write_bytes(msgspec.json.format(msgspec.json.encode(record(report, arguments))))
    return 1 if report.failures() else 0


if __name__ == "__main__":
    sys.exit(main())
