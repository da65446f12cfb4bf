"""A choice on its way from the engine's thread to its reader on the event loop."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Callable

import anyio
from anyio.lowlevel import checkpoint, checkpoint_if_cancelled

from engine.api import ChoiceUpdate, EndReason, EngineError


class BufferedChoiceStream:
    """All methods run on the event loop, for one reader; the engine's thread only reads `num_taken`.

    A queue of its own, for every token passes it: anyio's streams take several times as long. It needs no bound: the
    engine makes no update for a choice that is `stream_credit` updates ahead of its reader. on_abort: called with a
    reason while the choice lives. on_taken: called after each update that was taken. on_end: called once, when the last
    update has arrived and the engine has let go.
    """

    def __init__(self, on_abort: Callable[[EndReason], None], on_taken: Callable[[], None]) -> None:
        self._updates: deque[ChoiceUpdate] = deque()
        self._news: anyio.Event | None = None  # what the reader waits for
        self._is_discarded = False
        self._on_abort = on_abort
        self._on_taken = on_taken
        self._failure: EngineError | None = None
        self.on_end: Callable[[], None] = lambda: None
        self.num_taken = 0
        self.ended = False

    def __aiter__(self) -> AsyncIterator[ChoiceUpdate]:
        return self

    async def __anext__(self) -> ChoiceUpdate:
        if self._updates or self._is_over:
            await checkpoint()
        else:
            # under asyncio a wait that is over by the time it would be cancelled is not: it might always be
            await checkpoint_if_cancelled()
        while not self._updates:
            if self._is_over:
                if self._failure is not None:
                    raise self._failure
                raise StopAsyncIteration
            self._news = anyio.Event()
            await self._news.wait()
        return self._took(self._updates.popleft())

    def receive_nowait(self) -> ChoiceUpdate | None:
        return self._took(self._updates.popleft()) if self._updates else None

    def abort(self, reason: EndReason) -> None:
        if not self.ended:
            self._on_abort(reason)

    async def aclose(self) -> None:
        self.abort(EndReason.CANCELLED)
        self.discard()

    def discard(self) -> None:
        """Drop what is here and what still comes."""
        self._is_discarded = True
        self._updates.clear()
        self._wake_reader()

    def deliver(self, update: ChoiceUpdate) -> None:
        """Hand an update to the reader, who may have gone."""
        if not self._is_over:
            self._updates.append(update)
            self._wake_reader()
        if update.end_reason is not None:
            self.finish()

    def finish(self, failure: EngineError | None = None) -> None:
        """No more updates come; with a failure the reader gets it after what it has not read yet."""
        if not self.ended:
            self.ended, self._failure = True, failure
            self._wake_reader()
            self.on_end()

    @property
    def _is_over(self) -> bool:
        return self.ended or self._is_discarded

    def _wake_reader(self) -> None:
        if self._news is not None:
            self._news.set()
            self._news = None

    def _took(self, update: ChoiceUpdate) -> ChoiceUpdate:
        self.num_taken += 1
        self._on_taken()
        return update
