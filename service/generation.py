"""From an admitted batch to events: one task per choice reads its stream, detokenises and looks for stop strings.

The only loop over an engine's updates; whatever answers a client consumes these events.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import anyio
from anyio.streams.memory import MemoryObjectSendStream

from engine.api import ChoiceFailed, ChoiceStream, ChoiceUpdate, EndReason, Submission
from service.detokenizer import IncrementalDetokenizer, StopMatch, StopMatcher, StopStrings
from service.tokenizer import Tokenizer

if TYPE_CHECKING:
    from service.requests import GenerationJob


@dataclass(frozen=True, slots=True)
class ChoiceEvent:
    """What one engine update adds to one choice; the last one, and no other, has an end_reason.

    index: prompt * n + choice. text: may be empty. token_ids: those that count, up to the one that completed a stop
    string. num_tokens: how many, None from an engine that does not say. stop_reason: the stop string or token id.
    """

    index: int
    text: str
    token_ids: tuple[int, ...] = ()
    num_tokens: int | None = 0
    end_reason: EndReason | None = None
    stop_reason: int | str | None = None


class ChoiceText:
    """The text of one choice as its updates come in."""

    def __init__(
        self, index: int, tokenizer: Tokenizer, stops: StopStrings, min_tokens: int, *, continues: bool
    ) -> None:
        self._index = index
        self._detokenizer = IncrementalDetokenizer(tokenizer, continues=continues)
        self._matcher = StopMatcher(stops)
        self._min_tokens = min_tokens
        self._num_tokens = 0

    def advance(self, update: ChoiceUpdate) -> ChoiceEvent:
        """Raises ChoiceFailed when the engine says so."""
        if update.end_reason is EndReason.ERROR:
            raise ChoiceFailed(update.error or "the choice could not go on")
        text = ""
        for position, piece in enumerate(self._pieces(update), start=1):
            step = self._guard(piece)
            if isinstance(step, StopMatch):
                token_ids = update.token_ids[:position]
                return self._event(text + step.text, token_ids, EndReason.STOP, step.stop)
            text += step
        if update.end_reason is not None:
            text += self._matcher.flush()
        return self._event(text, update.token_ids, update.end_reason, update.stop_reason)

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
        self, text: str, token_ids: tuple[int, ...], end_reason: EndReason | None, stop_reason: int | str | None
    ) -> ChoiceEvent:
        num_tokens = len(token_ids) if token_ids or not text else None
        return ChoiceEvent(self._index, text, token_ids, num_tokens, end_reason, stop_reason)


async def generate(
    job: GenerationJob,
    submission: Submission,
    tokenizer: Tokenizer,
    events: MemoryObjectSendStream[ChoiceEvent],
) -> None:
    """Send every choice's events, in order within a choice, and close `events` once all have ended.

    A failing choice ends the others and is raised as itself: ChoiceFailed, EngineDead.
    """
    stops = StopStrings(job.stop)
    all_params = [params for request in job.batch for params in request.choices]
    async with events:
        try:
            async with anyio.create_task_group() as choices:
                for index, (params, stream) in enumerate(zip(all_params, submission.choices, strict=True)):
                    text = ChoiceText(index, tokenizer, stops, params.min_tokens, continues=job.kind == "completion")
                    choices.start_soon(_run_choice, stream, text, events)
        except ExceptionGroup as group:
            raise _first_leaf(group) from None


async def _run_choice(stream: ChoiceStream, text: ChoiceText, events: MemoryObjectSendStream[ChoiceEvent]) -> None:
    async for update in stream:
        event = text.advance(update)
        if event.end_reason is not None and update.end_reason is None:
            # a stop string, which the engine knows nothing of
            stream.abort(event.end_reason)
            await stream.aclose()
        await events.send(event)


def _first_leaf(error: Exception) -> Exception:
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    return error
