"""When an upstream that fails is left alone, and for how long.

A state machine of our own: of the libraries for it, pybreaker counts calls (a streamed answer would be no success until
its end), aiobreaker knows asyncio only, and purgatory lets everybody through at once when it tries again.
"""

from __future__ import annotations

import time
from collections.abc import Callable

THRESHOLD = 3
COOLDOWN_SECONDS = 2.0
MAX_COOLDOWN_SECONDS = 60.0


class Circuit:
    """Opens after THRESHOLD failures with no success between them. Once it has cooled down one try may go through: it
    closes the circuit, or opens it for twice as long.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._num_failures = 0
        self._cooldown = COOLDOWN_SECONDS
        self._opened_at: float | None = None
        self._is_tried = False

    @property
    def is_open(self) -> bool:
        return self._opened_at is not None

    @property
    def lets_through(self) -> bool:
        if self._opened_at is None:
            return True
        return not self._is_tried and self._clock() >= self._opened_at + self._cooldown

    def begin(self) -> None:
        """Something goes through."""
        if self._opened_at is not None:
            self._is_tried = True

    def succeed(self) -> None:
        """A first token has come, or an answer that shows that the server is well."""
        self._num_failures, self._opened_at, self._is_tried = 0, None, False
        self._cooldown = COOLDOWN_SECONDS

    def fail(self) -> None:
        self._num_failures += 1
        if self._is_tried:
            self._open(min(2 * self._cooldown, MAX_COOLDOWN_SECONDS))
        elif self._opened_at is None and self._num_failures >= THRESHOLD:
            self._open(COOLDOWN_SECONDS)

    def give_up(self) -> None:
        """What went through ended, and has shown nothing either way."""
        self._is_tried = False

    def _open(self, cooldown: float) -> None:
        self._opened_at, self._cooldown, self._is_tried = self._clock(), cooldown, False
