"""Events to the client's schema: as the chunks of a stream, or folded into one body."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Literal, TypedDict

from msgspec import UNSET, Struct, UnsetType

from engine.api import EndReason, PromptInfo
from service.fan_out import FanOut
from service.generation import ChoiceEvent
from service.schemas.chat import (
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatDelta,
    ChatMessage,
)
from service.schemas.common import ErrorDetail, FinishReason, PromptTokensDetails, Usage
from service.schemas.completions import Completion, CompletionChoice
from service.schemas.fan_out import ChoiceDetails, FanOutResult

if TYPE_CHECKING:
    from service.job import GenerationJob


def finish_reason(end_reason: EndReason) -> FinishReason:
    """OpenAI's word: anything but a stop is an answer that is not complete."""
    return "stop" if end_reason is EndReason.STOP else "length"


def total(counts: Iterable[int | None]) -> int:
    """The sum of the known counts."""
    return sum(count for count in counts if count is not None)


class ChoiceFacts(TypedDict):
    finish_reason: FinishReason
    stop_reason: int | str | None
    end_reason: str
    error: ErrorDetail | UnsetType
    details: ChoiceDetails | UnsetType


class Presenter(ABC):
    """One answer. Every event goes to `chunks` (and then `last_chunks`), or every event to `collect` (and then `body`).

    prompts: live; num_cached_tokens is read when the usage is. fan_out: has seen every event already.
    """

    def __init__(self, job: GenerationJob, prompts: Sequence[PromptInfo], fan_out: FanOut) -> None:
        self._job = job
        self._prompts = prompts
        self._fan_out = fan_out
        self._num_open = job.num_choices
        self._num_completion_tokens = 0
        self._texts: list[list[str]] = [[] for _ in range(job.num_choices)]
        self._ends: dict[int, ChoiceEvent] = {}

    def usage(self) -> Usage:
        """Each prompt counts once, the completions of all choices together."""
        prompt_tokens = total(prompt.num_tokens for prompt in self._prompts)
        cached_tokens = total(prompt.num_cached_tokens for prompt in self._prompts)
        return Usage(
            prompt_tokens=prompt_tokens,
            completion_tokens=self._num_completion_tokens,
            total_tokens=prompt_tokens + self._num_completion_tokens,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=cached_tokens),
        )

    def chunks(self, event: ChoiceEvent) -> list[Struct]:
        """What an event adds to the stream; nothing while its text is held back."""
        self._num_completion_tokens += event.num_tokens or 0
        self._num_open -= event.end_reason is not None
        return self._chunks(event)

    def last_chunks(self) -> list[Struct]:
        return [self._usage_chunk(self.usage())] if self._job.include_usage else []

    @property
    def _result(self) -> FanOutResult | UnsetType:
        """What the last chunk of all says of the choices together: one without choices would break clients' loops."""
        is_last = self._num_open == 0 and not self._job.include_usage
        return self._all_results if is_last else UNSET

    @property
    def _all_results(self) -> FanOutResult | UnsetType:
        return self._fan_out.result() or UNSET

    def _facts(self, event: ChoiceEvent) -> ChoiceFacts:
        """The fields that both kinds of answer have for a choice that has ended, in both modes."""
        assert event.end_reason is not None
        return {
            "finish_reason": finish_reason(event.end_reason),
            "stop_reason": event.stop_reason,
            "end_reason": event.end_reason.value,
            "error": event.error or UNSET,
            "details": self._fan_out.details(event.index) or UNSET,
        }

    def collect(self, event: ChoiceEvent) -> None:
        self._num_completion_tokens += event.num_tokens or 0
        self._texts[event.index].append(event.text)
        if event.end_reason is not None:
            self._ends[event.index] = event

    def body(self) -> Struct:
        """The whole answer, once every choice has ended: the choices that the fan-out keeps, in its order."""
        kept = [self._ends[index] for index in self._fan_out.order()]
        return self._body([("".join(self._texts[end.index]), end) for end in kept])

    @property
    def _no_usage(self) -> UnsetType | None:
        return None if self._job.include_usage else UNSET

    @abstractmethod
    def _chunks(self, event: ChoiceEvent) -> list[Struct]: ...

    @abstractmethod
    def _usage_chunk(self, usage: Usage) -> Struct: ...

    @abstractmethod
    def _body(self, choices: Sequence[tuple[str, ChoiceEvent]]) -> Struct:
        """choices: each one's text and last event."""


class ChatPresenter(Presenter):
    """A choice's first chunk has its role and no text, its last one an empty delta and the finish reason."""

    def __init__(self, job: GenerationJob, prompts: Sequence[PromptInfo], fan_out: FanOut) -> None:
        super().__init__(job, prompts, fan_out)
        self._begun: set[int] = set()

    def _chunks(self, event: ChoiceEvent) -> list[Struct]:
        choices = []
        if event.index not in self._begun:
            self._begun.add(event.index)
            choices.append(ChatChunkChoice(index=event.index, delta=ChatDelta(role="assistant", content="")))
        if event.text:
            choices.append(ChatChunkChoice(index=event.index, delta=ChatDelta(content=event.text)))
        if event.end_reason is not None:
            choices.append(ChatChunkChoice(index=event.index, delta=ChatDelta(), **self._facts(event)))
        last = len(choices) - 1
        return [
            self._chunk([choice], self._no_usage, self._result if number == last else UNSET)
            for number, choice in enumerate(choices)
        ]

    def _usage_chunk(self, usage: Usage) -> Struct:
        return self._chunk([], usage, self._all_results)

    def _chunk(
        self, choices: list[ChatChunkChoice], usage: Usage | UnsetType | None, fan_out: FanOutResult | UnsetType
    ) -> Struct:
        job = self._job
        return ChatCompletionChunk(
            id=job.response_id, created=job.created, model=job.model, choices=choices, usage=usage, fan_out=fan_out
        )

    def _body(self, choices: Sequence[tuple[str, ChoiceEvent]]) -> Struct:
        job = self._job
        return ChatCompletion(
            id=job.response_id,
            created=job.created,
            model=job.model,
            choices=[
                ChatChoice(index=end.index, message=ChatMessage(content=text), **self._facts(end))
                for text, end in choices
            ],
            usage=self.usage(),
            fan_out=self._all_results,
        )


class CompletionPresenter(Presenter):
    """Chunk and body have one shape; a choice's last chunk carries the rest of its text too."""

    def _chunks(self, event: ChoiceEvent) -> list[Struct]:
        if not event.text and event.end_reason is None:
            return []
        return [self._completion([self._choice(event.text, event)], self._no_usage, self._result)]

    def _usage_chunk(self, usage: Usage) -> Struct:
        return self._completion([], usage, self._all_results)

    def _body(self, choices: Sequence[tuple[str, ChoiceEvent]]) -> Struct:
        return self._completion([self._choice(*choice) for choice in choices], self.usage(), self._all_results)

    def _completion(
        self, choices: list[CompletionChoice], usage: Usage | UnsetType | None, fan_out: FanOutResult | UnsetType
    ) -> Struct:
        job = self._job
        return Completion(
            id=job.response_id, created=job.created, model=job.model, choices=choices, usage=usage, fan_out=fan_out
        )

    def _choice(self, text: str, event: ChoiceEvent) -> CompletionChoice:
        if event.end_reason is None:
            return CompletionChoice(index=event.index, text=text)
        return CompletionChoice(index=event.index, text=text, **self._facts(event))


PRESENTERS: dict[Literal["chat", "completion"], type[Presenter]] = {
    "chat": ChatPresenter,
    "completion": CompletionPresenter,
}
