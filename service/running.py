"""The requests that run now, and all that may end one from outside: its owner, its deadline, a reader that stands
still, an engine that hangs.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import anyio
import anyio.lowlevel

from engine.api import EndReason, Submission
from service.errors import DEADLINE_EXCEEDED, ApiError, ErrorInfo, retry_after
from service.fan_out import FanOut

if TYPE_CHECKING:
    from anyio.abc import TaskGroup
    from litestar.types import Message, Send

    from service.job import GenerationJob


class ClientStalled(Exception):
    """The client has taken nothing for the whole write timeout, by our clock or the kernel's."""


def deadline_passed(before: str = "the model began with it") -> ApiError:
    message = f"The request's time was over before {before}."
    return ApiError(
        ErrorInfo(503, message, "server_error", code=DEADLINE_EXCEEDED, headers=retry_after(1.0)),
    )


class RunningRequest:
    """One job from its arrival to its last byte.

    failure: what ended it from outside, for the client to be told (ClientStalled: nobody is there to be told).
    was_cancelled: on somebody's word, though it may have ended by itself meanwhile.
    """

    def __init__(self, job: GenerationJob, write_timeout: float) -> None:
        self.job = job
        self.fan_out: FanOut | None = None
        self.failure: Exception | None = None
        self.was_cancelled = False
        self._cancelled_early: set[int] = set()
        self._write_timeout = write_timeout
        self._submission: Submission | None = None
        self._production: anyio.CancelScope | None = None
        self._all: anyio.CancelScope | None = None
        self._sending_since: float | None = None

    def watch(self, group: TaskGroup) -> None:
        """Hold the request to its deadline and its reader to the write timeout, until `group` is cancelled."""
        self._all = group.cancel_scope
        group.start_soon(self._watch_deadline)
        group.start_soon(self._watch_reader)

    @property
    def _seconds_left(self) -> float:
        return max(0.0, self.job.received_at + self.job.timeout - time.monotonic())

    def check_time(self) -> None:
        """Raises ApiError (503) when the deadline has passed before anything was asked of the engine."""
        if not self._seconds_left:
            raise deadline_passed()

    def begin(self, submission: Submission, fan_out: FanOut) -> None:
        """It has been admitted. Raises what has ended it meanwhile."""
        if self.failure is not None:
            raise self.failure
        self._submission, self.fan_out = submission, fan_out
        for index, stream in enumerate(submission.choices):
            if self.was_cancelled or index in self._cancelled_early:
                stream.abort(EndReason.CANCELLED)

    def produce_within(self, scope: anyio.CancelScope) -> None:
        """scope: what a failure from outside ends."""
        self._production = scope
        if self.failure is not None:
            scope.cancel()

    def fail(self, failure: Exception) -> None:
        if self.failure is None:
            self.failure = failure
            if self._production is not None:
                self._production.cancel()

    def cancel(self, index: int | None = None) -> bool:
        """End all choices or one of them, as `cancelled` and with what they have. False when that has ended already."""
        if self.fan_out is None or self._submission is None:
            # it waits for admission, which comes for all choices or none
            self.was_cancelled |= index is None
            self._cancelled_early.update([] if index is None else [index])
            return True
        if self.fan_out.all_ended if index is None else self.fan_out.has_ended(index):
            return False
        if index is None:
            self.was_cancelled = True
            self._abort(EndReason.CANCELLED)
        else:
            self._submission.choices[index].abort(EndReason.CANCELLED)
        return True

    def timed(self, send: Send) -> Send:
        """The same `send`, with its reader held to the write timeout; a connection that has failed ends the request."""

        async def timed_send(message: Message) -> None:
            self._sending_since = anyio.current_time()
            try:
                await send(message)
            except OSError:
                self._cut()
                await anyio.lowlevel.checkpoint()
            finally:
                self._sending_since = None

        return timed_send

    def _abort(self, reason: EndReason) -> None:
        assert self._submission is not None and self.fan_out is not None
        for index, stream in enumerate(self._submission.choices):
            if not self.fan_out.has_ended(index):
                stream.abort(reason)

    async def _watch_deadline(self) -> None:
        await anyio.sleep(self._seconds_left)
        if self.fan_out is not None and self.fan_out.has_begun:
            self._abort(EndReason.DEADLINE)
        else:
            self.fail(deadline_passed())

    async def _watch_reader(self) -> None:
        while self._sending_since is None or anyio.current_time() < self._sending_since + self._write_timeout:
            since = anyio.current_time() if self._sending_since is None else self._sending_since
            await anyio.sleep_until(since + self._write_timeout)
        self._cut()

    def _cut(self) -> None:
        """Nobody is there to be told anything any more."""
        self.failure = ClientStalled()
        if self._submission is not None:
            # at once: under trio hypercorn's send lets nobody cancel it
            self._abort(EndReason.CANCELLED)
        if self._all is not None:
            self._all.cancel()


class RunningEmbedding:
    """One request for embeddings, until its vectors are there."""

    def __init__(self, scope: anyio.CancelScope) -> None:
        self.failure: Exception | None = None
        self._scope = scope

    def fail(self, failure: Exception) -> None:
        self.failure = self.failure or failure
        self._scope.cancel()


class RunningRequests:
    """All of them, oldest first."""

    def __init__(self) -> None:
        self._all: dict[RunningRequest, None] = {}
        self.num_choices = 0

    def __iter__(self) -> Iterator[RunningRequest]:
        return iter(list(self._all))

    @contextmanager
    def registered(self, running: RunningRequest) -> Iterator[None]:
        self._all[running] = None
        self.num_choices += running.job.num_choices
        try:
            yield
        finally:
            self.num_choices -= running.job.num_choices
            del self._all[running]

    def of(self, owner: str) -> list[RunningRequest]:
        return [running for running in self._all if running.job.caller.owner == owner]

    def find(self, response_id: str, owner: str) -> RunningRequest | None:
        """None for another owner's: nobody learns that it exists."""
        return next((running for running in self.of(owner) if running.job.response_id == response_id), None)
