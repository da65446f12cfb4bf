"""Mixed traffic: requests of all kinds at random, each with a word of its own that its answer must consist of."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import anyio
import httpx

from tests.soak.echo_app import WORD_LENGTH

MODEL = "soak"
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
BAD: list[dict[str, Any]] = [
    {"n": 0},
    {"n": 10**6},
    {"mood": 1},
    {"temperature": 9},
    {"model": "another"},
    {"max_tokens": 10**9},
    {"fan_out": {"stop_after": 99}},
    {"stop": ["x"] * 17},
]


@dataclass
class Traffic:
    """outcomes: how often what happened. wrong: what should never happen."""

    client: httpx.AsyncClient
    random: random.Random
    outcomes: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    async def worker(self) -> None:
        kinds: list[tuple[Callable[[], Awaitable[None]], int]] = [
            (self.whole, 5),
            (self.streamed, 5),
            (self.leave, 3),
            (self.leave_early, 2),
            (self.dawdle, 1),
            (self.cancel, 2),
            (self.bad, 3),
        ]
        actions, weights = zip(*kinds, strict=True)
        while True:
            (action,) = self.random.choices(actions, weights)
            try:
                await action()
            except httpx.HTTPError as error:
                self.wrong.append(f"{action.__name__}: {type(error).__name__} {error}")

    # -- what clients do

    async def whole(self) -> None:
        word, path, body = self._request()
        response = await self.client.post(path, json=body)
        if self._accepted("whole", response.status_code):
            answer = response.json()
            for choice in answer["choices"]:
                self._check(word, choice["text"] if "text" in choice else choice["message"]["content"])
            tokens = sum(_length(choice) for choice in answer["choices"])
            if answer["usage"]["completion_tokens"] != tokens:
                self.wrong.append(f"usage says {answer['usage']} of {tokens}")

    async def streamed(self) -> None:
        await self._stream("streamed")

    async def leave(self) -> None:
        """After some events."""
        await self._stream("left", limit=self.random.randint(1, 40))

    async def leave_early(self) -> None:
        """Perhaps while it waits for a place."""
        with anyio.move_on_after(self.random.random() * 0.02):
            await self.whole()
        self.outcomes["left early"] += 1

    async def dawdle(self) -> None:
        await self._stream("dawdled", pause=0.02)

    async def cancel(self) -> None:
        """From outside, by another connection; the answer must end properly all the same."""
        await self._stream("cancelled", cancel=True)

    async def bad(self) -> None:
        _, path, body = self._request()
        response = await self.client.post(path, json=body | self.random.choice(BAD))
        if response.status_code not in (400, 404):
            self.wrong.append(f"a bad request was answered with {response.status_code}")
        self.outcomes["bad"] += 1

    async def _stream(self, kind: str, *, limit: int | None = None, pause: float = 0.0, cancel: bool = False) -> None:
        word, path, body = self._request()
        texts: dict[int, str] = {}
        last = ""
        async with self.client.stream("POST", path, json=body | {"stream": True}) as response:
            if not self._accepted(kind, response.status_code):
                return
            if cancel:
                await self.client.delete(f"/v1/requests/{response.headers['x-chorus-response-id']}")
            number = 0
            async for line in response.aiter_lines():
                if not line.startswith("data: "):
                    continue
                last = line.removeprefix("data: ")
                if last != "[DONE]":
                    self._add(texts, json.loads(last))
                number += 1
                if number == limit:
                    break
                if pause:
                    await anyio.sleep(pause)
        for text in texts.values():
            self._check(word, text)
        if limit is None and last != "[DONE]":
            self.wrong.append(f"{kind}: a stream ended with {last[:200]}")

    # -- what must hold

    def _add(self, texts: dict[int, str], chunk: dict[str, Any]) -> None:
        for choice in chunk.get("choices", []):
            piece = choice["text"] if "text" in choice else choice["delta"].get("content", "")
            texts[choice["index"]] = texts.get(choice["index"], "") + piece

    def _accepted(self, kind: str, status: int) -> bool:
        """A full queue is an answer as well."""
        self.outcomes[kind if status == 200 else f"{status}"] += 1
        if status not in (200, 429):
            self.wrong.append(f"{kind}: status {status}")
        return status == 200

    def _check(self, word: str, text: str) -> None:
        """The word over and over, wherever in it the answer begins."""
        if text not in word * (len(text) // WORD_LENGTH + 2):
            self.wrong.append(f"{text!r} was said to {word!r}")

    def _request(self) -> tuple[str, str, dict[str, Any]]:
        word = "".join(self.random.choices("abcdefghijklmnopqrstuvwxyz", k=WORD_LENGTH))
        filler = "." * self.random.choice([0, 3, 60, 200])  # prompts that share their beginning, and their pages
        body: dict[str, Any] = {
            "model": MODEL,
            "n": self.random.choice([1, 1, 2, 4, 8, 32]),
            "max_tokens": self.random.randint(1, 60),
        }
        if self.random.random() < 0.3:
            body["fan_out"] = self.random.choice(
                [
                    {"stop_after": 1},
                    {"agree": {"on": "text", "count": 1}},
                    {"details": True},
                    {"on_error": "isolate"},
                ]
            )
        if self.random.random() < 0.5:
            return word, COMPLETIONS, body | {"prompt": f"{filler}<{word}>"}
        return word, CHAT, body | {"messages": [{"role": "user", "content": f"{filler}<{word}>"}]}


def _length(choice: dict[str, Any]) -> int:
    return len(choice["text"] if "text" in choice else choice["message"]["content"])
