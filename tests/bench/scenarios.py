"""What is measured, and how one server is taken through it."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass
from typing import Any

import aiohttp

from tests.bench.client import timed_chat
from tests.bench.metrics import RequestTimes, Summary, summarise

_TEXT = (
    "time year people way day man thing woman life child world school state family student group country problem hand "
    "part place case week company system program question work number night point home water room mother area money"
)
WORDS = _TEXT.split()


@dataclass(frozen=True, slots=True)
class Scenario:
    """clients requests at once, each with a prompt of its own of about prompt_words tokens and n choices."""

    name: str
    clients: int
    prompt_words: int
    n: int
    max_tokens: int


SCENARIOS = (
    Scenario("one stream", 1, 64, 1, 128),
    Scenario("512 in, n=1", 1, 512, 1, 64),
    Scenario("512 in, n=8", 1, 512, 8, 64),
    Scenario("2048 in, n=1", 1, 2048, 1, 64),
    Scenario("2048 in, n=16", 1, 2048, 16, 64),
    Scenario("16 clients", 16, 128, 1, 64),
    Scenario("8 clients, n=4", 8, 256, 4, 64),
)
FAN_OUT = tuple(Scenario(f"n={n}", 1, 512, n, 64) for n in (1, 2, 4, 8, 16, 32, 64))
CLIENTS = tuple(Scenario(f"{clients} clients", clients, 128, 1, 64) for clients in (1, 2, 4, 8, 16, 32))


@dataclass(slots=True)
class Target:
    """A server under test. extra: fields for every request, such as ignore_eos."""

    label: str
    url: str
    model: str
    extra: dict[str, Any]


def prompt_of(num_words: int, rng: random.Random) -> str:
    """A prompt that no earlier request shared; a common English word is about one token."""
    return " ".join(rng.choice(WORDS) for _ in range(num_words))


def body_of(target: Target, scenario: Scenario, text: str) -> dict[str, Any]:
    return {
        "model": target.model,
        "messages": [{"role": "user", "content": text}],
        "n": scenario.n,
        "max_tokens": scenario.max_tokens,
        "temperature": 1.0,
        **target.extra,
    }


async def run_scenario(target: Target, scenario: Scenario, repeats: int, rng: random.Random) -> Summary:
    """One warm-up, then `repeats` rounds. Raises BenchError."""
    rounds = [await _round(target, scenario, rng) for _ in range(repeats + 1)]
    return summarise(rounds[1:])


async def _round(target: Target, scenario: Scenario, rng: random.Random) -> list[RequestTimes]:
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    timeout = aiohttp.ClientTimeout(total=600)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout, read_bufsize=2**20) as session:
        bodies = [body_of(target, scenario, prompt_of(scenario.prompt_words, rng)) for _ in range(scenario.clients)]
        return list(await asyncio.gather(*(timed_chat(session, target.url, body) for body in bodies)))


async def repeated_prompt(target: Target, repeats: int, rng: random.Random) -> tuple[float, float]:
    """Median seconds to the first token of a long prompt, new and sent again."""
    scenario = Scenario("again", 1, 2048, 1, 8)
    cold, warm = [], []
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as session:
        for _ in range(repeats):
            body = body_of(target, scenario, prompt_of(scenario.prompt_words, rng))
            cold.append((await timed_chat(session, target.url, body)).first_token)
            warm.append((await timed_chat(session, target.url, body)).first_token)
    return sorted(cold)[len(cold) // 2], sorted(warm)[len(warm) // 2]


async def after_a_client_left(target: Target, repeats: int, rng: random.Random, settle: float) -> tuple[float, float]:
    """Median seconds of a short request on an idle server, and right after a client has left an n=8 request."""
    short, wide = Scenario("short", 1, 64, 1, 32), Scenario("wide", 1, 256, 8, 1500)
    idle, after = [], []
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as session:
        for _ in range(repeats + 1):
            for walls in (idle, after):
                if walls is after:
                    body = body_of(target, wide, prompt_of(wide.prompt_words, rng))
                    await timed_chat(session, target.url, body, leave_after=8)
                times = await timed_chat(
                    session, target.url, body_of(target, short, prompt_of(short.prompt_words, rng))
                )
                walls.append(times.ended - times.started)
            await asyncio.sleep(settle)
    return sorted(idle[1:])[repeats // 2], sorted(after[1:])[repeats // 2]
