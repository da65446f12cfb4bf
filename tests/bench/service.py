"""Measure the service without a model: tokens per second through HTTP, with the fake engine.

Starts `python -m service` once per event loop with CHORUS_ENGINE=fake, and reads a number of streams at once over raw
sockets, here, in a process of its own; nothing else should run meanwhile. The fake engine steps on the event loop, as
often as that comes round, and makes one token per stream and step by arithmetic; what it takes of the loop's time
counts. Streams and readers are all that is limited: there is a place (max_num_seqs) for each stream.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.bench.flood import flood
from tests.bench.metrics import Throughput, throughput
from tests.bench.server import cpu_seconds, first_model, own_server

WORKERS = ("asyncio", "uvloop", "trio")
STREAMS = (1, 32, 128, 512)
MAX_TOKENS, MIN_TOKENS = 4000, 500
"""Of one answer: a little less than the fake engine's context, and enough for its request to weigh little."""


def main() -> None:
    args = _arguments()
    rows: list[dict[str, Any]] = []
    for worker in args.workers:
        settings = {
            "CHORUS_ENGINE": "fake",
            "CHORUS_WORKER": worker,
            "CHORUS_MAX_NUM_SEQS": str(max(args.streams)),
            "CHORUS_MAX_QUEUED_TOKENS": str(2**24),
        }
        with own_server(args.port, settings=settings) as (url, _):
            model = first_model(url)
            for streams in args.streams:
                before = cpu_seconds(args.port)
                rounds = [_measure(url, model, streams, args.tokens) for _ in range(args.repeat)]
                cpu = (cpu_seconds(args.port) - before) / sum(result.tokens for result in rounds)
                best = max(rounds, key=lambda result: result.tokens_per_second)
                rows.append({"worker": worker, "cpu_seconds_per_token": cpu, **asdict(best)})
                print(f"{_line(worker, best)}, {1e6 * cpu:.0f} us of processor time a token", flush=True)
    if args.json:
        machine = {"date": time.strftime("%Y-%m-%d"), "cpus": os.cpu_count(), "load": os.getloadavg()}
        args.json.write_text(json.dumps({**machine, "service": rows}, indent=1))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.service", description=__doc__)
    parser.add_argument("--workers", nargs="+", choices=WORKERS, default=WORKERS, help="event loops")
    parser.add_argument("--streams", nargs="+", type=int, default=STREAMS, help="streams at once")
    parser.add_argument("--tokens", type=int, default=64_000, help="of all streams of a round together, about")
    parser.add_argument("--repeat", type=int, default=3, help="rounds, of which the best counts")
    parser.add_argument("--port", type=int, default=8099)
    parser.add_argument("--json", type=Path, help="write all figures here")
    return parser.parse_args()


def _measure(url: str, model: str, streams: int, tokens: int) -> Throughput:
    body = {
        "model": model,
        "messages": [{"role": "user", "content": "go"}],
        "max_tokens": min(MAX_TOKENS, max(MIN_TOKENS, tokens // streams)),
        "ignore_eos": True,
    }
    return throughput(flood(url, [body] * streams))


def _line(worker: str, result: Throughput) -> str:
    rate = f"{result.tokens_per_second:7.0f} tokens/s, {result.tokens_per_read:5.1f} a read"
    gaps = f"gap {1000 * result.gap_median:.1f} ms, at most {1000 * result.gap_max:.0f} ms"
    return f"{worker:8} {result.streams:4} streams {rate}, {gaps}"


if __name__ == "__main__":
    main()
