"""What one key may use: requests and tokens a minute, requests at once, choices in a request."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from service.auth import Caller
from service.errors import NO_RETRY, ApiError, ErrorInfo, retry_after

BUSY_SECONDS = 1.0
"""When to come again where only the end of another request can help."""


class Bucket:
    """An allowance that fills evenly over a minute, up to a minute's worth. What is taken may leave a debt."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._level: float | None = None
        self._filled_at = clock()

    def wait_seconds(self, per_minute: int, amount: float) -> float:
        """How long until `amount` is there; 0 when it is."""
        level = self._fill(per_minute)
        return max(0.0, amount - level) * 60 / per_minute if per_minute else 60.0

    def take(self, per_minute: int, amount: float) -> None:
        self._level = self._fill(per_minute) - amount

    def _fill(self, per_minute: int) -> float:
        now = self._clock()
        level = per_minute if self._level is None else self._level + (now - self._filled_at) * per_minute / 60
        self._level, self._filled_at = min(per_minute, level), now
        return self._level


class _Meter:
    def __init__(self, clock: Callable[[], float]) -> None:
        self.requests, self.tokens, self.num_running = Bucket(clock), Bucket(clock), 0


class Quotas:
    """Every method raises ApiError (429) and then has taken nothing."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._meters: dict[str, _Meter] = {}

    def take_request(self, caller: Caller) -> None:
        limit = caller.limits.requests_per_minute
        if limit is None:
            return
        requests = self._meter(caller).requests
        if wait := requests.wait_seconds(limit, 1):
            raise _exceeded(f"requests per minute is {limit}", wait)
        requests.take(limit, 1)

    @staticmethod
    def check_n(caller: Caller, n: int) -> None:
        limit = caller.limits.max_n
        if limit is not None and n > limit:
            message = f"`n` is {n}; this key's limit is {limit}."
            raise ApiError(ErrorInfo(429, message, "rate_limit_error", "n", "rate_limit_exceeded", NO_RETRY))

    @contextmanager
    def running(self, caller: Caller, num_prompt_tokens: int) -> Iterator[None]:
        """While a request runs. The tokens of its answer are taken by `spend`, and may leave a debt to wait for."""
        limits, meter = caller.limits, self._meter(caller)
        if limits.max_concurrent is not None and meter.num_running >= limits.max_concurrent:
            raise _exceeded(f"requests at once is {limits.max_concurrent}", BUSY_SECONDS)
        if limits.tokens_per_minute is not None:
            # a prompt that is larger than a minute's worth has to wait for a full minute's, else it could never run
            wanted = min(num_prompt_tokens, limits.tokens_per_minute)
            if wait := meter.tokens.wait_seconds(limits.tokens_per_minute, wanted):
                raise _exceeded(f"tokens per minute is {limits.tokens_per_minute}", wait)
        self.spend(caller, num_prompt_tokens)
        meter.num_running += 1
        try:
            yield
        finally:
            meter.num_running -= 1

    def spend(self, caller: Caller, num_tokens: int) -> None:
        if caller.limits.tokens_per_minute is not None:
            self._meter(caller).tokens.take(caller.limits.tokens_per_minute, num_tokens)

    def _meter(self, caller: Caller) -> _Meter:
        return self._meters.setdefault(caller.owner, _Meter(self._clock))


def _exceeded(what: str, wait: float) -> ApiError:
    message = f"This key's limit of {what}."
    return ApiError(ErrorInfo(429, message, "rate_limit_error", code="rate_limit_exceeded", headers=retry_after(wait)))
