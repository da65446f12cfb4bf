"""Does the service delay the engine's steps? Their spread, with and without other work on the event loop.

Starts this checkout's server with its default model and streams a number of answers, once alone and once while a thread
here has long chats rendered, tokenised and then refused (more tokens than the context holds). Only steps that decode
all of the answers and prefill nothing count. Nothing else should run meanwhile. On few cores the two share a processor,
and a step has to wait for its part of it: the figures say how long.
"""

from __future__ import annotations

import argparse
import json
import threading
import urllib.error
import urllib.request
from contextlib import suppress
from typing import Any

from tests.bench.flood import flood
from tests.bench.metrics import quantile
from tests.bench.server import first_model, own_server

SETTINGS = {"CHORUS_DEBUG": "true"}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.steps", description=__doc__)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=200, help="of each answer")
    parser.add_argument("--words", type=int, default=1500, help="of a chat that is refused")
    parser.add_argument("--port", type=int, default=8099)
    args = parser.parse_args()
    with own_server(args.port, settings=SETTINGS) as (url, _):
        body = _chat(first_model(url), "go", args.tokens)
        flood(url, [body] * args.streams)
        for name, is_disturbed in (("alone", False), ("with chats to tokenise", True)):
            stop = threading.Event()
            refused = [0]
            disturber = threading.Thread(target=_disturb, args=(url, body["model"], args.words, stop, refused))
            if is_disturbed:
                disturber.start()
            before = _last_step(url)
            flood(url, [body] * args.streams)
            stop.set()
            if is_disturbed:
                disturber.join()
            _report(name, _steps(url, before, args.streams), refused[0])


def _chat(model: str, text: str, max_tokens: int) -> dict[str, Any]:
    messages = [{"role": "user", "content": text}]
    return {"model": model, "messages": messages, "max_tokens": max_tokens, "ignore_eos": True}


def _disturb(url: str, model: str, words: int, stop: threading.Event, refused: list[int]) -> None:
    content = json.dumps(_chat(model, "word " * words, 10**6)).encode()
    request = urllib.request.Request(f"{url}/v1/chat/completions", content, {"Content-Type": "application/json"})
    while not stop.is_set():
        with suppress(urllib.error.HTTPError):
            urllib.request.urlopen(request, timeout=60)
        refused[0] += 1


def _records(url: str) -> list[dict[str, Any]]:
    with urllib.request.urlopen(f"{url}/debug/steps", timeout=60) as response:
        records: list[dict[str, Any]] = json.load(response)["data"]
        return records


def _last_step(url: str) -> int:
    return max((record["number"] for record in _records(url)), default=0)


def _steps(url: str, before: int, rows: int) -> list[float]:
    """Seconds of the full decode steps since `before`."""
    return [
        record["seconds"]
        for record in _records(url)
        if record["number"] > before and record["num_decode_rows"] == rows and not record["num_prefill_rows"]
    ]


def _report(name: str, seconds: list[float], refused: int) -> None:
    median, late, most = (1000 * value for value in (quantile(seconds, 0.5), quantile(seconds, 0.99), max(seconds)))
    spread = f"median {median:.2f} ms, 99 % within {late:.2f} ms, at most {most:.2f} ms"
    print(f"{name:24} {len(seconds):4} steps: {spread}; {refused} other requests", flush=True)


if __name__ == "__main__":
    main()
