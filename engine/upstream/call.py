"""One choice at an upstream: its request, its answer, and other tries while nothing has come."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass, field

import anyio
import httpx
from httpx_sse import EventSource

from engine.api import (
    ChoiceFailed,
    ChoiceUpdate,
    EndReason,
    EngineError,
    EngineNotReady,
    PromptInfo,
    Request,
    SamplingParams,
)
from engine.streams import BufferedChoiceStream
from engine.upstream.answer import Answer, Usage
from engine.upstream.asking import body_of, path_of
from engine.upstream.client import post, unwind
from engine.upstream.fleet import Fleet, Upstream
from engine.upstream.refusals import Refusal, refusal_of

logger = logging.getLogger("chorus.upstream")

DONE = "[DONE]"
SHUTTING_DOWN = "the server is shutting down"


@dataclass(slots=True, eq=False)
class Prompt:
    """What the choices of a prompt share."""

    request: Request
    upstream: Upstream
    key: str
    info: PromptInfo = field(default_factory=lambda: PromptInfo(None))
    is_known: bool = False

    def note(self, usage: Usage) -> None:
        """Of one of them. What the first found in the cache was there before; the others share what it computed."""
        cached = min(self.info.num_cached_tokens, usage.cached_tokens) if self.is_known else usage.cached_tokens
        self.is_known, self.info.num_tokens, self.info.num_cached_tokens = True, usage.prompt_tokens, cached


@dataclass(frozen=True, slots=True)
class Terms:
    """How calls are made. credit: updates that a reader may be behind."""

    http: httpx.AsyncClient
    fleet: Fleet
    max_retries: int
    credit: int


class Call:
    """Host `run` in a task; the choice's reader has `stream`.

    is_answered: the server has accepted it, or it is over. refusal: why it is over without having made anything.
    on_news: called when one of these changes, or something has come. ended: `run` has returned, and its connection is
    free or closed.
    """

    def __init__(self, prompt: Prompt, params: SamplingParams, terms: Terms) -> None:
        self._prompt = prompt
        self._params = params
        self._terms = terms
        self._upstream: Upstream | None = None
        self._scope = anyio.CancelScope()
        self._taken = anyio.Event()
        self._answer = Answer()
        self._response: httpx.Response | None = None
        self._num_made = 0
        self._heard_at: float | None = None
        self._num_bytes = 0
        self.stream = BufferedChoiceStream(self._abort, self._wake)
        self.refusal: EngineError | None = None
        self.is_answered = False
        self.on_news: Callable[[], None] = lambda: None
        self.ended = anyio.Event()
        self._move_to(prompt.upstream)

    @property
    def num_tokens(self) -> int:
        return self._answer.num_tokens

    @property
    def usage(self) -> Usage | None:
        """None where the server has not come to tell it."""
        return self._answer.usage

    @property
    def has_begun(self) -> bool:
        return self._answer.has_begun

    async def run(self) -> None:
        try:
            with self._scope:
                if self._params.max_tokens == 0:  # nothing has to be asked for that
                    self._deliver(ChoiceUpdate(end_reason=EndReason.LENGTH))
                else:
                    await self._try_until_begun()
        except Exception:
            logger.exception("an upstream's answer could not be dealt with")
            self._fail(ChoiceFailed("the upstream's answer could not be dealt with"))
        finally:
            self._move_to(None)
            self.stream.finish(EngineNotReady(SHUTTING_DOWN))
            self._tell()
            self.ended.set()

    def cancel(self) -> None:
        """Close the connection."""
        self._scope.cancel()

    def check_silence(self, timeout: float) -> None:
        """End a call whose server has sent nothing for so long, within its answer, though its reader waits for more."""
        if self._response is None or not self._answer.has_begun or self._is_behind:
            self._heard_at = None
            return
        num_bytes, now = self._response.num_bytes_downloaded, time.monotonic()
        if self._heard_at is None or num_bytes != self._num_bytes:
            self._heard_at, self._num_bytes = now, num_bytes
        elif now > self._heard_at + timeout:
            if self._answer.finished:
                self._deliver(self._answer.last_update())
            else:
                self._fail(ChoiceFailed(f"the upstream has sent nothing for {timeout:g} s"))
            self.cancel()

    async def _try_until_begun(self) -> None:
        tried: list[Upstream] = []
        while self._upstream is not None:
            tried.append(self._upstream)
            try:
                await self._ask_counted(self._upstream)
                return
            except Refusal as refusal:
                may_retry = refusal.is_passing and not self._answer.has_begun and len(tried) <= self._terms.max_retries
                other = self._terms.fleet.choose(self._prompt.key, tried) if may_retry else None
                if other is None and may_retry and refusal.is_unheard and tried.count(self._upstream) == 1:
                    other = self._upstream
                self._move_to(other)
                if other is None:
                    self._fail(refusal.told(self._prompt.request.own_names))

    def _move_to(self, upstream: Upstream | None) -> None:
        """The upstream whose the choice is, if any."""
        if self._upstream is not None:
            self._upstream.release()
        if upstream is not None:
            upstream.take()
        self._upstream = upstream

    async def _ask_counted(self, upstream: Upstream) -> None:
        outcome = "cancelled"
        try:
            await self._ask(upstream)
            outcome = "ok"
        except Refusal as refusal:
            outcome = "failed" if refusal.is_fault else "refused"
            upstream.circuit.fail() if refusal.is_fault else upstream.circuit.succeed()
            raise
        finally:
            upstream.requests[outcome] += 1

    async def _ask(self, upstream: Upstream) -> None:
        """Raises Refusal."""
        request, is_open = self._prompt.request, False
        body = body_of(request, self._params, upstream.model, upstream.max_model_len)
        try:
            async with aclosing(await post(self._terms.http, upstream.url + path_of(request), body)) as response:
                is_open = True
                await self._read(response, upstream)
        except (httpx.TransportError, httpx.DecodingError) as error:
            reason = str(error) or type(error).__name__
            if is_open:
                raise Refusal.lost(reason) from None
            is_down = isinstance(error, httpx.ConnectError | httpx.ConnectTimeout)
            if is_down:
                upstream.set_down(reason)  # the next poll may find it again
            raise Refusal.unreachable(reason, is_unheard=not is_down) from None

    async def _read(self, response: httpx.Response, upstream: Upstream) -> None:
        if response.status_code != 200:
            raise refusal_of(response.status_code, await response.aread(), response.headers.get("retry-after"))
        kind = response.headers.get("content-type", "of no type")
        if not kind.startswith("text/event-stream"):
            raise Refusal.broken(f"it is {kind[:100]}, not text/event-stream")
        self._response = response
        self._tell()
        events = EventSource(response).aiter_sse()
        try:
            async for event in events:
                if event.data == DONE:
                    self._end()  # reading on to the body's end lets the connection be used again
                elif event.data and not self.stream.ended:
                    await self._take(event.data, upstream)
        finally:
            await unwind(events)
        if not self.stream.ended and not self._answer.finished:
            raise Refusal.lost("it ended before the answer did")
        self._end()

    async def _take(self, data: str, upstream: Upstream) -> None:
        had_begun = self._answer.has_begun
        update = self._answer.read(data)
        if self._answer.usage is not None:
            self._prompt.note(self._answer.usage)
        if self._answer.has_begun and not had_begun:
            upstream.circuit.succeed()
        if update is None:
            return
        while self._is_behind:
            self._taken = anyio.Event()
            await self._taken.wait()
        self._deliver(update)

    @property
    def _is_behind(self) -> bool:
        """The reader is: nothing more is read, until the server feels that in its connection."""
        return self._num_made - self.stream.num_taken >= self._terms.credit

    def _deliver(self, update: ChoiceUpdate) -> None:
        self._num_made += 1
        self.stream.deliver(update)
        if not self.is_answered or self._num_made == 1:
            self._tell()

    def _tell(self) -> None:
        self.is_answered = True
        self.on_news()

    def _end(self) -> None:
        if not self.stream.ended:
            self._deliver(self._answer.last_update())

    def _fail(self, error: EngineError) -> None:
        if not self.stream.ended:
            if not self._answer.has_begun:
                self.refusal = error
            self._deliver(ChoiceUpdate(end_reason=EndReason.ERROR, error=str(error), cause=error))

    def _abort(self, reason: EndReason) -> None:
        self._deliver(ChoiceUpdate(end_reason=reason))
        self.cancel()

    def _wake(self) -> None:
        self._taken.set()
