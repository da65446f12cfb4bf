"""What turns the events of one answer into what its client gets: chunks of a stream, or one body."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, ClassVar

from msgspec import UNSET, Struct

from engine.api import PromptInfo
from service.choice_text import ChoiceEvent
from service.errors import ErrorInfo
from service.fan_out import FanOut
from service.schemas.common import CompletionTokensDetails, ErrorEnvelope, PromptTokensDetails, Usage
from service.tokenizer import Tokenizer

if TYPE_CHECKING:
    from service.job import GenerationJob


def total(counts: Iterable[int | None]) -> int:
    """The sum of the known counts."""
    return sum(count for count in counts if count is not None)


class Presenter(ABC):
    """One answer. Every event goes to `chunks` (and then `last_chunks`), or every event to `collect` (and then `body`).

    prompts: live; num_cached_tokens is read when the usage is. fan_out: has seen every event already. says_done: a
    stream that did not fail ends in [DONE].
    """

    says_done: ClassVar[bool] = True

    def __init__(
        self, job: GenerationJob, prompts: Sequence[PromptInfo], fan_out: FanOut, tokenizer: Tokenizer
    ) -> None:
        self._job = job
        self._tokenizer = tokenizer
        self._prompts = prompts
        self._fan_out = fan_out
        self._num_completion_tokens = 0
        self._num_reasoning_tokens = 0

    def usage(self) -> Usage:
        """Each prompt counts once, the completions of all choices together."""
        prompt_tokens = total(prompt.num_tokens for prompt in self._prompts)
        cached_tokens = total(prompt.num_cached_tokens for prompt in self._prompts)
        reasoning = CompletionTokensDetails(reasoning_tokens=self._num_reasoning_tokens)
        return Usage(
            prompt_tokens=prompt_tokens,
            completion_tokens=self._num_completion_tokens,
            total_tokens=prompt_tokens + self._num_completion_tokens,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=cached_tokens),
            completion_tokens_details=reasoning if self._job.show.reasoning or self._num_reasoning_tokens else UNSET,
        )

    def count(self, event: ChoiceEvent) -> None:
        self._num_completion_tokens += event.num_tokens
        self._num_reasoning_tokens += event.num_reasoning_tokens

    def event_name(self, chunk: Struct) -> str | None:
        """For the `event:` line of a chunk; None for a stream without such lines."""
        return None

    def adds_only_text(self, event: ChoiceEvent) -> bool:
        """Whether its one chunk is `text_chunk`; then `count` stands for `chunks`."""
        return False

    def text_chunk(self, index: int, text: str) -> Struct:
        """Nothing of it but the text changes from one to the next."""
        raise NotImplementedError

    @abstractmethod
    def chunks(self, event: ChoiceEvent) -> list[Struct]:
        """What an event adds to the stream; nothing while its text is held back."""

    @abstractmethod
    def last_chunks(self) -> list[Struct]:
        """What follows when every choice has ended."""

    def failure_chunks(self, info: ErrorInfo) -> list[Struct]:
        """The end of a stream that has failed."""
        return [ErrorEnvelope(error=info.detail())]

    @abstractmethod
    def collect(self, event: ChoiceEvent) -> None: ...

    @abstractmethod
    def body(self) -> Struct:
        """The whole answer, once every choice has ended."""
