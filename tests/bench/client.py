"""One streamed chat request, timed chunk by chunk."""

from __future__ import annotations

import json
import time
from typing import Any

import aiohttp

from tests.bench.metrics import BenchError, RequestTimes


async def timed_chat(
    session: aiohttp.ClientSession, url: str, body: dict[str, Any], *, leave_after: int | None = None
) -> RequestTimes:
    """Send a streamed request and read it to its end, or hang up after `leave_after` chunks. Raises BenchError."""
    body = {"stream": True, "stream_options": {"include_usage": True}, **body}
    times = RequestTimes(time.perf_counter())
    num_chunks = 0
    async with session.post(f"{url}/v1/chat/completions", json=body) as response:
        if response.status != 200:
            raise BenchError(f"HTTP {response.status}: {(await response.text())[:300]}")
        async for line in response.content:
            if not line.startswith(b"data:") or line[5:].strip() == b"[DONE]":
                continue
            chunk = json.loads(line[5:])
            if chunk.get("error"):
                raise BenchError(str(chunk["error"])[:300])
            num_chunks += _book(times, chunk)
            if leave_after is not None and num_chunks >= leave_after:
                response.close()
                break
    times.ended = time.perf_counter()
    return times


def _book(times: RequestTimes, chunk: dict[str, Any]) -> int:
    """Note what a chunk brings; returns how many texts it had."""
    if usage := chunk.get("usage"):
        times.num_tokens, times.prompt_tokens = usage["completion_tokens"], usage["prompt_tokens"]
    now, count = time.perf_counter(), 0
    for choice in chunk.get("choices", ()):
        if (choice.get("delta") or {}).get("content"):
            times.arrivals.setdefault(choice["index"], []).append(now)
            count += 1
    return count
