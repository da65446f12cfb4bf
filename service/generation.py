"""From an admitted batch to events: one task per choice reads its stream, detokenises and looks for stop strings.

The only loop over an engine's updates; whatever answers a client consumes these events.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

import anyio
from anyio.streams.memory import MemoryObjectSendStream

from engine.api import ChoiceFailed, ChoiceUpdate, EndReason, Submission, TokenLogprobs
from service.detokenizer import IncrementalDetokenizer, StopMatch, StopMatcher, StopStrings
from service.errors import error_body
from service.fan_out import FanOut
from service.logs import log_unexpected
from service.schemas.common import ErrorDetail
from service.tokenizer import Tokenizer

if TYPE_CHECKING:
    from service.job import GenerationJob

logger = logging.getLogger("chorus.generation")


@dataclass(frozen=True, slots=True)
class ChoiceEvent:
    """What one engine update adds to one choice; the last one, and no other, has an end_reason.

    index: prompt * n + choice. text: may be empty. token_ids: those that count, up to the one that completed a stop
    string. num_tokens: how many, None from an engine that does not say. logprobs: where asked for, one for each of
    token_ids. stop_reason: the stop string or token id. error: what the client is told where the end_reason is ERROR.
    """

    index: int
    text: str
    token_ids: tuple[int, ...] = ()
    num_tokens: int | None = 0
    end_reason: EndReason | None = None
    stop_reason: int | str | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()
    error: ErrorDetail | None = None


class ChoiceText:
    """The text of one choice as its updates come in."""

    def __init__(
        self,
        index: int,
        tokenizer: Tokenizer,
        stops: StopStrings,
        min_tokens: int,
        *,
        continues: bool,
        request_id: str | None = None,
    ) -> None:
        self._index = index
        self._detokenizer = IncrementalDetokenizer(tokenizer, continues=continues)
        self._matcher = StopMatcher(stops)
        self._min_tokens = min_tokens
        self._request_id = request_id
        self._num_tokens = 0

    def advance(self, update: ChoiceUpdate, *, isolates: bool = False) -> ChoiceEvent:
        """Raises ChoiceFailed when the engine says so. isolates: whatever goes wrong is the choice's last event."""
        try:
            return self._advance(update)
        except Exception as error:
            if not isolates:
                raise
            return self._failure(error)

    def _advance(self, update: ChoiceUpdate) -> ChoiceEvent:
        if update.end_reason is EndReason.ERROR:
            raise ChoiceFailed(update.error or "the choice could not go on")
        text = ""
        for position, piece in enumerate(self._pieces(update), start=1):
            step = self._guard(piece)
            if isinstance(step, StopMatch):
                return self._event(text + step.text, update, position, EndReason.STOP, step.stop)
            text += step
        if update.end_reason is not None:
            text += self._matcher.flush()
        return self._event(text, update, len(update.token_ids), update.end_reason, update.stop_reason)

    def _failure(self, error: Exception) -> ChoiceEvent:
        info = error_body(error).identified(self._request_id)
        if info.unexpected:
            log_unexpected(logger, "unexpected error in a choice", error, request_id=self._request_id)
        return ChoiceEvent(self._index, self._matcher.flush(), end_reason=EndReason.ERROR, error=info.detail())

    def _pieces(self, update: ChoiceUpdate) -> list[str]:
        """One piece of text per token; an engine that gives text has a single one."""
        if not update.token_ids:
            return [update.text] if update.text else []
        pieces = [self._detokenizer.feed(token_id) for token_id in update.token_ids]
        if update.end_reason is EndReason.STOP:
            pieces[-1] = ""  # the token that ended it is not text, even where the vocabulary gives it some
        return pieces

    def _guard(self, piece: str) -> str | StopMatch:
        """Stop strings count in what comes after the first min_tokens tokens."""
        self._num_tokens += 1
        return self._matcher.feed(piece) if self._num_tokens > self._min_tokens else piece

    def _event(
        self,
        text: str,
        update: ChoiceUpdate,
        num_tokens: int,
        end_reason: EndReason | None,
        stop_reason: int | str | None,
    ) -> ChoiceEvent:
        """Of the update's tokens the first num_tokens count."""
        token_ids, logprobs = update.token_ids[:num_tokens], update.logprobs[:num_tokens]
        known = num_tokens if token_ids or not text else None
        return ChoiceEvent(self._index, text, token_ids, known, end_reason, stop_reason, logprobs)


async def generate(
    job: GenerationJob,
    submission: Submission,
    tokenizer: Tokenizer,
    events: MemoryObjectSendStream[ChoiceEvent],
    fan_out: FanOut,
) -> None:
    """Send every choice's events, in order within a choice, and close `events` once all have ended.

    fan_out sees each event before it waits for the writer, and its word is obeyed at once. A failing choice ends the
    others and is raised as itself (ChoiceFailed, EngineDead), unless failures are isolated.
    """

    async def run_choice(index: int, text: ChoiceText) -> None:
        stream = submission.choices[index]
        async for first in stream:
            update: ChoiceUpdate | None = first
            while update is not None:
                event = text.advance(update, isolates=fan_out.isolates)
                for other in fan_out.observe(event):
                    submission.choices[other].abort(EndReason.CANCELLED)
                if event.end_reason is not None and update.end_reason is None:
                    # a stop string, which the engine knows nothing of
                    stream.abort(event.end_reason)
                    await stream.aclose()
                await events.send(event)
                update = stream.receive_nowait()

    stops = StopStrings(job.stop)
    all_params = [params for request in job.batch for params in request.choices]
    failure: Exception | None = None
    async with events:
        try:
            async with anyio.create_task_group() as choices:
                for index, params in enumerate(all_params):
                    text = ChoiceText(
                        index,
                        tokenizer,
                        stops,
                        params.min_tokens,
                        continues=job.kind == "completion",
                        request_id=job.request_id,
                    )
                    choices.start_soon(run_choice, index, text)
        except ExceptionGroup as group:
            failure = _first_leaf(group)
        if failure is not None:
            raise failure  # not within the except: it keeps the cause that it has


def _first_leaf(error: Exception) -> Exception:
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    return error
