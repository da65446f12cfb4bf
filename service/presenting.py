"""What the answers of both endpoints share: parts of choices, the facts of their ends, usage."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, TypedDict

from msgspec import UNSET, Struct, UnsetType

from engine.api import EndReason, PromptInfo, TokenPrompt
from service.choice_text import ChoiceEvent
from service.fan_out import FanOut
from service.parsers import ToolCallArguments, ToolCallStart
from service.presenter import Presenter
from service.schemas.common import (
    ErrorDetail,
    FinishReason,
    Usage,
)
from service.schemas.fan_out import ChoiceDetails, FanOutResult
from service.schemas.logprobs import PromptLogprobs
from service.shown_logprobs import prompt_logprobs
from service.token_entries import TokenEntry, prompt_entries
from service.tokenizer import Tokenizer

if TYPE_CHECKING:
    from service.job import GenerationJob


def finish_reason(end_reason: EndReason) -> FinishReason:
    """OpenAI's word: anything but a stop is an answer that is not complete."""
    return "stop" if end_reason is EndReason.STOP else "length"


class ChoiceFacts(TypedDict):
    finish_reason: FinishReason
    stop_reason: int | str | None
    end_reason: str
    error: ErrorDetail | UnsetType
    details: ChoiceDetails | UnsetType
    kv_transfer_params: dict[str, object] | UnsetType


class PromptFacts(TypedDict, total=False):
    prompt_token_ids: list[int]
    prompt_logprobs: PromptLogprobs


@dataclass(slots=True)
class Part:
    """What has come of one choice since the last chunk, or ever: the sum of its events. end: its last one.

    is_first: nothing of it has been shown yet. shown_index: the client's number for it.
    """

    index: int
    shown_index: int
    is_first: bool = True
    text: str = ""
    reasoning: str = ""
    calls: list[ToolCallStart | ToolCallArguments] = field(default_factory=list)
    entries: list[TokenEntry] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    num_tokens: int = 0
    end: ChoiceEvent | None = None

    def add(self, event: ChoiceEvent) -> None:
        self.text += event.text
        self.reasoning += event.reasoning
        self.calls += event.calls
        self.entries += event.entries
        self.token_ids += event.token_ids
        self.num_tokens += event.num_tokens
        if event.end_reason is not None:
            self.end = event

    @property
    def is_visible(self) -> bool:
        return bool(self.text or self.reasoning or self.calls or self.end is not None)


class ChoicesPresenter(Presenter):
    """An answer of choices: chat and completions."""

    def __init__(
        self, job: GenerationJob, prompts: Sequence[PromptInfo], fan_out: FanOut, tokenizer: Tokenizer
    ) -> None:
        super().__init__(job, prompts, fan_out, tokenizer)
        self._num_open = job.num_choices
        self._called: set[int] = set()
        show = job.show
        self._shows_only_text = (
            show.logprobs is None and not show.token_ids and not show.running_usage and show.tokens_per_chunk == 1
        )
        self._parts: dict[int, Part] = {}  # of the choices that have had an event
        self._echoed: dict[int, list[TokenEntry]] = {}  # by prompt

    def _first_part(self, index: int) -> Part:
        prompt = index // self._job.n
        if not self._job.show.echo:
            return Part(index, index)
        return Part(index, index, text=self._job.show.echo[prompt].text, entries=self._echoed_entries(prompt))

    def _echoed_entries(self, prompt: int) -> list[TokenEntry]:
        if self._job.show.logprobs is None:
            return []
        if prompt not in self._echoed:
            offsets = self._job.show.echo[prompt].offsets
            told = self._prompts[prompt].logprobs
            self._echoed[prompt] = prompt_entries(self._prompt_ids(prompt), told, offsets, self._tokenizer)
        return list(self._echoed[prompt])

    def chunks(self, event: ChoiceEvent) -> list[Struct]:
        part = self._add(event)
        self._num_open -= event.end_reason is not None
        chunks = self._opening(part)
        if part.is_visible and (part.num_tokens >= self._job.show.tokens_per_chunk or part.end is not None):
            self._parts[event.index] = Part(event.index, event.index, is_first=False)
            chunks += self._chunks(part)
        return chunks

    def adds_only_text(self, event: ChoiceEvent) -> bool:
        if not event.text or not event.num_tokens or event.end_reason is not None or not self._shows_only_text:
            return False
        if event.reasoning or event.calls or event.entries:
            return False
        part = self._parts.get(event.index)
        return part is not None and not part.is_first and not part.is_visible

    def text_chunk(self, index: int, text: str) -> Struct:
        (chunk,) = self._chunks(Part(index, index, is_first=False, text=text))
        return chunk

    def last_chunks(self) -> list[Struct]:
        return [self._usage_chunk(self.usage())] if self._job.include_usage else []

    def collect(self, event: ChoiceEvent) -> None:
        self._add(event)

    def body(self) -> Struct:
        """The choices that the fan-out keeps, in its order."""
        kept = [self._parts[index] for index in self._fan_out.order()]
        for number, part in enumerate(kept):
            part.shown_index = number if self._job.show.renumbered else part.index
        return self._body(kept)

    def _add(self, event: ChoiceEvent) -> Part:
        self.count(event)
        if event.calls:
            self._called.add(event.index)
        if event.index not in self._parts:
            self._parts[event.index] = self._first_part(event.index)
        part = self._parts[event.index]
        part.add(self._behind_echo(event))
        return part

    def _behind_echo(self, event: ChoiceEvent) -> ChoiceEvent:
        echo = self._job.show.echo
        if not echo or not event.entries:
            return event
        length = len(echo[event.index // self._job.n].text)
        return replace(event, entries=tuple(replace(entry, offset=entry.offset + length) for entry in event.entries))

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
        called = event.index in self._called and event.end_reason is EndReason.STOP and not self._job.show.named_call
        return {
            "finish_reason": "tool_calls" if called else finish_reason(event.end_reason),
            "stop_reason": event.stop_reason,
            "end_reason": event.end_reason.value,
            "error": event.error or UNSET,
            "details": self._fan_out.details(event.index) or UNSET,
            "kv_transfer_params": event.kv_transfer_params or UNSET,
        }

    @property
    def _chunk_usage(self) -> Usage | UnsetType | None:
        if self._job.show.running_usage:
            return self.usage()
        return None if self._job.include_usage else UNSET

    def _token_ids(self, part: Part) -> list[int] | UnsetType:
        return part.token_ids if self._job.show.token_ids else UNSET

    def _prompt_facts(self, index: int) -> PromptFacts:
        """Of the prompt that the choice belongs to."""
        prompt, show = index // self._job.n, self._job.show
        token_ids, told = self._prompt_ids(prompt), self._prompts[prompt].logprobs
        facts = PromptFacts()
        if show.token_ids:
            facts["prompt_token_ids"] = list(token_ids)
        if show.prompt_logprobs is not None:
            facts["prompt_logprobs"] = prompt_logprobs(token_ids, told, show.prompt_logprobs, self._tokenizer)
        return facts

    def _transfer(self, parts: Sequence[Part]) -> dict[str, object] | UnsetType:
        """Of the only choice, where vLLM's own server says it."""
        end = parts[0].end if len(parts) == 1 else None
        return (end and end.kv_transfer_params) or UNSET

    def _prompt_ids(self, prompt: int) -> tuple[int, ...]:
        given = self._job.batch[prompt].prompt
        return given.token_ids if isinstance(given, TokenPrompt) else ()

    def _opening(self, part: Part) -> list[Struct]:
        """What comes before anything of a choice is visible."""
        return []

    @abstractmethod
    def _chunks(self, part: Part) -> list[Struct]: ...

    @abstractmethod
    def _usage_chunk(self, usage: Usage) -> Struct: ...

    @abstractmethod
    def _body(self, parts: Sequence[Part]) -> Struct: ...
