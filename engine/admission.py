"""What may enter the engine: bounds on choices and prompt tokens, booked on the event loop, and how fast they drain."""

from __future__ import annotations

import math
import time
from collections import deque

from engine.api import (
    Capability,
    EngineInfo,
    EngineOverloaded,
    Request,
    RequestTooLarge,
    TokenPrompt,
    UnsupportedByEngine,
)
from engine.config import EngineConfig

_RATE_WINDOW = 64
"""Ends of choices that the rate is measured over."""


class Admission:
    """All or nothing: a batch is booked whole, or refused with nothing booked."""

    def __init__(self, config: EngineConfig) -> None:
        self._room = config.max_num_seqs + config.max_queued_seqs
        self._max_num_seqs = config.max_num_seqs
        self._max_tokens = config.max_queued_tokens
        self._num_choices = 0
        self._num_tokens = 0
        self._ends: deque[float] = deque(maxlen=_RATE_WINDOW)

    def book(self, num_choices: int, num_tokens: int) -> None:
        """num_tokens: of the batch's prompts. Raises RequestTooLarge, EngineOverloaded."""
        if num_choices > self._room:
            raise RequestTooLarge(f"{num_choices} choices were asked for; this server admits at most {self._room}", "n")
        if num_tokens > self._max_tokens:
            message = f"{num_tokens} prompt tokens were sent at once; this server admits at most {self._max_tokens}"
            raise RequestTooLarge(message, "prompt")
        if self._num_choices + num_choices > self._room or self._num_tokens + num_tokens > self._max_tokens:
            raise EngineOverloaded("the queue is full, try again later", self._seconds_until_room(num_choices))
        self._num_choices += num_choices
        self._num_tokens += num_tokens

    def end_choice(self) -> None:
        self._num_choices -= 1
        self._ends.append(time.monotonic())

    def end_batch(self, num_tokens: int) -> None:
        self._num_tokens -= num_tokens

    def _seconds_until_room(self, num_choices: int) -> float:
        """By the measured rate at which choices end, between 1 s and 120 s."""
        if len(self._ends) < 2:
            return 1.0
        rate = (len(self._ends) - 1) / max(1e-3, self._ends[-1] - self._ends[0])
        needed = max(1, self._num_choices + num_choices - self._room)
        return float(min(120, max(1, math.ceil(needed / rate))))


def token_limits(request: Request, info: EngineInfo) -> tuple[tuple[int, ...], list[int]]:
    """The prompt's tokens, and how many each choice may add. Raises RequestTooLarge, UnsupportedByEngine."""
    if not isinstance(request.prompt, TokenPrompt):
        raise UnsupportedByEngine(Capability.TEXT_IN)
    if request.kv_transfer_params is not None and Capability.KV_TRANSFER not in info.capabilities:
        raise UnsupportedByEngine(Capability.KV_TRANSFER)
    token_ids = request.prompt.token_ids
    if not token_ids:
        raise RequestTooLarge("the prompt has no tokens", "prompt")
    if any(not 0 <= token_id < info.vocab_size for token_id in token_ids):
        raise RequestTooLarge(f"token ids must lie in [0, {info.vocab_size})", "prompt")
    room = info.max_model_len - len(token_ids)
    max_tokens = [max(1, room) if params.max_tokens is None else params.max_tokens for params in request.choices]
    if max(max_tokens) > room:
        message = (
            f"{len(token_ids)} prompt tokens and {max(max_tokens)} new ones exceed this model's {info.max_model_len}"
        )
        raise RequestTooLarge(message, "max_tokens" if room >= 1 else "prompt")
    return token_ids, max_tokens
