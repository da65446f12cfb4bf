"""From an admitted batch to events: one task per choice reads its stream, detokenises and looks for stop strings.

The only loop over an engine's updates; whatever answers a client consumes these events.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import anyio
from anyio.streams.memory import MemoryObjectSendStream

from engine.api import ChoiceStream, ChoiceUpdate, EndReason, Submission
from service.choice_text import ChoiceEvent, ChoiceText
from service.detokenizer import StopStrings
from service.fan_out import FanOut
from service.pace import Pace
from service.tokenizer import Tokenizer

if TYPE_CHECKING:
    from service.job import GenerationJob

Batch = list[ChoiceEvent]
"""Of one choice and in order: what the engine has made of it since the last, up to a bound."""

EVENTS_PER_BATCH = 16
"""A reader that is behind may hold back about three batches beside its credit with the engine."""


async def generate(
    job: GenerationJob,
    submission: Submission,
    tokenizer: Tokenizer,
    events: MemoryObjectSendStream[Batch],
    fan_out: FanOut,
    num_running: Callable[[], int],
) -> None:
    """Send every choice's events, in order within a choice, and close `events` once all have ended.

    fan_out sees each event before it waits for the writer, and its word is obeyed at once. A failing choice ends the
    others and is raised as itself (ChoiceFailed, EngineDead), unless failures are isolated. num_running: see Pace.
    """

    def event_of(text: ChoiceText, stream: ChoiceStream, update: ChoiceUpdate) -> ChoiceEvent:
        event = text.advance(update, isolates=fan_out.isolates)
        for other in fan_out.observe(event):
            submission.choices[other].abort(EndReason.CANCELLED)
        if event.end_reason is not None and update.end_reason is None:
            # a stop string, which the engine knows nothing of
            stream.abort(event.end_reason)
        return event

    async def run_choice(index: int, text: ChoiceText) -> None:
        stream, pace = submission.choices[index], Pace(num_running)
        async for first in stream:
            await pace.turn()
            batch: Batch = []
            update: ChoiceUpdate | None = first
            try:
                while update is not None:
                    batch.append(event_of(text, stream, update))
                    if batch[-1].end_reason is not None or len(batch) == EVENTS_PER_BATCH:
                        break
                    update = stream.receive_nowait()
            finally:
                if batch:  # what came before a failure is the client's
                    await _send(events, batch)
            if batch[-1].end_reason is not None:
                await stream.aclose()
            elif len(batch) > 1:
                await pace.turn()  # the engine is ahead: once for all that comes till then

    stops = StopStrings(job.text.stop)
    all_params = [params for request in job.batch for params in request.choices]
    failure: Exception | None = None
    async with events:
        try:
            async with anyio.create_task_group() as choices:
                for index, params in enumerate(all_params):
                    text = ChoiceText(index, tokenizer, job.text, stops, params.min_tokens, job.request_id)
                    choices.start_soon(run_choice, index, text)
        except ExceptionGroup as group:
            failure = _first_leaf(group)
        if failure is not None:
            raise failure  # not within the except: it keeps the cause that it has


async def _send(events: MemoryObjectSendStream[Batch], batch: Batch) -> None:
    """Without a detour over the loop where there is room; the stream that the batch is from has a checkpoint."""
    try:
        events.send_nowait(batch)
    except anyio.WouldBlock:
        await events.send(batch)


def _first_leaf(error: Exception) -> Exception:
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    return error
