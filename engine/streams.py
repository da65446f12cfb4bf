"""A choice on its way from the engine's thread to its reader on the event loop."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Callable
from contextlib import suppress

import anyio

from engine.api import ChoiceUpdate, EndReason, EngineError


class BufferedChoiceStream:
    """All methods run on the event loop; the engine's thread only reads `num_taken`.

    The buffer needs no bound of its own: the engine makes no update for a choice that is `stream_credit` updates
    ahead of its reader. on_abort: called with a reason while the choice lives. on_taken: called after each update
    that was taken. on_end: called once, when the last update has arrived and the engine has let go.
    """

    def __init__(self, on_abort: Callable[[EndReason], None], on_taken: Callable[[], None]) -> None:
        self._send, self._receive = anyio.create_memory_object_stream[ChoiceUpdate](math.inf)
        self._on_abort = on_abort
        self._on_taken = on_taken
        self._failure: EngineError | None = None
        self.on_end: Callable[[], None] = lambda: None
        self.num_taken = 0
        self.ended = False

    def __aiter__(self) -> AsyncIterator[ChoiceUpdate]:
        return self

    async def __anext__(self) -> ChoiceUpdate:
        try:
            update = await self._receive.receive()
        except (anyio.EndOfStream, anyio.ClosedResourceError):
            if self._failure is not None:
                raise self._failure from None
            raise StopAsyncIteration from None
        return self._took(update)

    def receive_nowait(self) -> ChoiceUpdate | None:
        try:
            return self._took(self._receive.receive_nowait())
        except (anyio.WouldBlock, anyio.EndOfStream, anyio.ClosedResourceError):
            return None

    def abort(self, reason: EndReason) -> None:
        if not self.ended:
            self._on_abort(reason)

    async def aclose(self) -> None:
        self.abort(EndReason.CANCELLED)
        self.discard()

    def discard(self) -> None:
        """Drop what is here and what still comes."""
        self._receive.close()

    def deliver(self, update: ChoiceUpdate) -> None:
        """Hand an update to the reader, who may have gone."""
        with suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
            self._send.send_nowait(update)
        if update.end_reason is not None:
            self.finish()

    def finish(self, failure: EngineError | None = None) -> None:
        """No more updates come; with a failure the reader gets it after what it has not read yet."""
        if not self.ended:
            self.ended, self._failure = True, failure
            self._send.close()
            self.on_end()

    def _took(self, update: ChoiceUpdate) -> ChoiceUpdate:
        self.num_taken += 1
        self._on_taken()
        return update
