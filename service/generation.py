"""From an admitted batch to events: one task per choice reads its stream, detokenises and looks for stop strings.

The only loop over an engine's updates; whatever answers a client consumes these events.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio
from anyio.streams.memory import MemoryObjectSendStream

from engine.api import ChoiceUpdate, EndReason, Submission
from service.choice_text import ChoiceEvent, ChoiceText
from service.detokenizer import StopStrings
from service.fan_out import FanOut
from service.tokenizer import Tokenizer

if TYPE_CHECKING:
    from service.job import GenerationJob


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


def _first_leaf(error: Exception) -> Exception:
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    return error
