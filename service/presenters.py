"""Events to the client's schema: as the chunks of a stream, or folded into one body."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Literal

from msgspec import UNSET, Struct, UnsetType

from engine.api import EndReason, PromptInfo
from service.generation import ChoiceEvent
from service.schemas.chat import (
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatDelta,
    ChatMessage,
)
from service.schemas.common import FinishReason, PromptTokensDetails, Usage
from service.schemas.completions import Completion, CompletionChoice

if TYPE_CHECKING:
    from service.requests import GenerationJob


def finish_reason(end_reason: EndReason) -> FinishReason:
    """OpenAI's word: anything but a stop is an answer that is not complete."""
    return "stop" if end_reason is EndReason.STOP else "length"


def total(counts: Iterable[int | None]) -> int:
    """The sum of the known counts."""
    return sum(count for count in counts if count is not None)


class Presenter(ABC):
    """One answer. Every event goes to `chunks` (and then `last_chunks`), or every event to `collect` (and then `body`).

    prompts: live; num_cached_tokens is read when the usage is.
    """

    def __init__(self, job: GenerationJob, prompts: Sequence[PromptInfo]) -> None:
        self._job = job
        self._prompts = prompts
        self._num_completion_tokens = 0
        self._texts: list[list[str]] = [[] for _ in range(len(job.batch) * job.n)]
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
        return self._chunks(event)

    def last_chunks(self) -> list[Struct]:
        return [self._usage_chunk(self.usage())] if self._job.include_usage else []

    def collect(self, event: ChoiceEvent) -> None:
        self._num_completion_tokens += event.num_tokens or 0
        self._texts[event.index].append(event.text)
        if event.end_reason is not None:
            self._ends[event.index] = event

    def body(self) -> Struct:
        """The whole answer, once every choice has ended."""
        return self._body(["".join(pieces) for pieces in self._texts])

    @property
    def _no_usage(self) -> UnsetType | None:
        return None if self._job.include_usage else UNSET

    @abstractmethod
    def _chunks(self, event: ChoiceEvent) -> list[Struct]: ...

    @abstractmethod
    def _usage_chunk(self, usage: Usage) -> Struct: ...

    @abstractmethod
    def _body(self, texts: Sequence[str]) -> Struct: ...


class ChatPresenter(Presenter):
    """A choice's first chunk has its role and no text, its last one an empty delta and the finish reason."""

    def __init__(self, job: GenerationJob, prompts: Sequence[PromptInfo]) -> None:
        super().__init__(job, prompts)
        self._begun: set[int] = set()

    def _chunks(self, event: ChoiceEvent) -> list[Struct]:
        choices = []
        if event.index not in self._begun:
            self._begun.add(event.index)
            choices.append(ChatChunkChoice(index=event.index, delta=ChatDelta(role="assistant", content="")))
        if event.text:
            choices.append(ChatChunkChoice(index=event.index, delta=ChatDelta(content=event.text)))
        if event.end_reason is not None:
            choices.append(
                ChatChunkChoice(
                    index=event.index,
                    delta=ChatDelta(),
                    finish_reason=finish_reason(event.end_reason),
                    stop_reason=event.stop_reason,
                    end_reason=event.end_reason.value,
                )
            )
        return [self._chunk([choice], self._no_usage) for choice in choices]

    def _usage_chunk(self, usage: Usage) -> Struct:
        return self._chunk([], usage)

    def _chunk(self, choices: list[ChatChunkChoice], usage: Usage | UnsetType | None) -> Struct:
        job = self._job
        return ChatCompletionChunk(
            id=job.response_id, created=job.created, model=job.model, choices=choices, usage=usage
        )

    def _body(self, texts: Sequence[str]) -> Struct:
        job = self._job
        choices = [self._choice(index, text, self._ends[index]) for index, text in enumerate(texts)]
        return ChatCompletion(
            id=job.response_id, created=job.created, model=job.model, choices=choices, usage=self.usage()
        )

    @staticmethod
    def _choice(index: int, text: str, end: ChoiceEvent) -> ChatChoice:
        assert end.end_reason is not None
        return ChatChoice(
            index=index,
            message=ChatMessage(content=text),
            finish_reason=finish_reason(end.end_reason),
            stop_reason=end.stop_reason,
            end_reason=end.end_reason.value,
        )


class CompletionPresenter(Presenter):
    """Chunk and body have one shape; a choice's last chunk carries the rest of its text too."""

    def _chunks(self, event: ChoiceEvent) -> list[Struct]:
        if not event.text and event.end_reason is None:
            return []
        return [self._completion([self._choice(event.index, event.text, event)], self._no_usage)]

    def _usage_chunk(self, usage: Usage) -> Struct:
        return self._completion([], usage)

    def _body(self, texts: Sequence[str]) -> Struct:
        choices = [self._choice(index, text, self._ends[index]) for index, text in enumerate(texts)]
        return self._completion(choices, self.usage())

    def _completion(self, choices: list[CompletionChoice], usage: Usage | UnsetType | None) -> Struct:
        job = self._job
        return Completion(id=job.response_id, created=job.created, model=job.model, choices=choices, usage=usage)

    @staticmethod
    def _choice(index: int, text: str, event: ChoiceEvent) -> CompletionChoice:
        if event.end_reason is None:
            return CompletionChoice(index=index, text=text)
        return CompletionChoice(
            index=index,
            text=text,
            finish_reason=finish_reason(event.end_reason),
            stop_reason=event.stop_reason,
            end_reason=event.end_reason.value,
        )


PRESENTERS: dict[Literal["chat", "completion"], type[Presenter]] = {
    "chat": ChatPresenter,
    "completion": CompletionPresenter,
}
