"""Events to the client's schema: as the chunks of a stream, or folded into one body."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import UNSET, Struct, UnsetType
from msgspec.structs import replace

from service.job import Kind
from service.parsers import ToolCallArguments, ToolCallStart, fold
from service.presenter import Presenter
from service.presenting import ChoicesPresenter, Part, PromptFacts
from service.response_presenter import ResponsePresenter
from service.schemas.chat import (
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatDelta,
    ChatMessage,
    FunctionCall,
    FunctionDelta,
    ToolCall,
    ToolCallDelta,
)
from service.schemas.common import Usage
from service.schemas.completions import Completion, CompletionChoice
from service.schemas.fan_out import FanOutResult
from service.schemas.logprobs import ChatLogprobs, CompletionLogprobs
from service.shown_logprobs import chat_logprobs, completion_logprobs


class ChatPresenter(ChoicesPresenter):
    """A choice's first chunk has its role and no text, its last one an empty delta and the finish reason.

    Log probabilities and token ids go with the last chunk that shows something of their text.
    """

    def _opening(self, part: Part) -> list[Struct]:
        if not part.is_first:
            return []
        part.is_first = False
        delta = ChatDelta(role="assistant", content=None if self._job.show.may_call else "")
        choice = ChatChunkChoice(index=part.index, delta=delta)
        return [self._chunk([choice], UNSET, self._prompt_facts(part.index))]

    def _chunks(self, part: Part) -> list[Struct]:
        choices = [ChatChunkChoice(index=part.index, delta=delta) for delta in _deltas(part)]
        if choices:
            choices[-1] = ChatChunkChoice(
                index=part.index,
                delta=choices[-1].delta,
                logprobs=self._logprobs(part),
                token_ids=self._token_ids(part),
            )
        if part.end is not None:
            choices.append(
                ChatChunkChoice(
                    index=part.index,
                    delta=ChatDelta(),
                    logprobs=None if choices else self._logprobs(part),
                    token_ids=UNSET if choices else self._token_ids(part),
                    **self._facts(part.end),
                )
            )
        *others, last = choices
        return [*(self._chunk([choice], UNSET) for choice in others), self._chunk([last], self._result)]

    def _logprobs(self, part: Part) -> ChatLogprobs | None:
        k = self._job.show.logprobs
        return None if k is None or not part.entries else chat_logprobs(part.entries, k)

    def _usage_chunk(self, usage: Usage) -> Struct:
        return self._chunk([], self._all_results, usage=usage)

    def _chunk(
        self,
        choices: list[ChatChunkChoice],
        fan_out: FanOutResult | UnsetType,
        prompt: PromptFacts | None = None,
        usage: Usage | None = None,
    ) -> Struct:
        job = self._job
        return ChatCompletionChunk(
            id=job.response_id,
            created=job.created,
            model=job.model,
            choices=choices,
            usage=usage or self._chunk_usage,
            fan_out=fan_out,
            **(prompt or {}),
        )

    def _body(self, parts: Sequence[Part]) -> Struct:
        job = self._job
        return ChatCompletion(
            id=job.response_id,
            created=job.created,
            model=job.model,
            choices=[self._choice(part) for part in parts],
            usage=self.usage(),
            fan_out=self._all_results,
            kv_transfer_params=self._transfer(parts),
            **self._prompt_facts(0),
        )

    def _choice(self, part: Part) -> ChatChoice:
        assert part.end is not None
        calls = [_tool_call(call.id, call.name, call.arguments) for call in fold(part.calls).tool_calls]
        message = ChatMessage(
            content=part.text or (None if self._job.show.may_call else ""),
            reasoning_content=part.reasoning or UNSET,
            tool_calls=calls or UNSET,
        )
        return ChatChoice(
            index=part.shown_index,
            message=message,
            logprobs=self._logprobs(part),
            token_ids=self._token_ids(part),
            **self._facts(part.end),
        )


def _deltas(part: Part) -> list[ChatDelta]:
    """Reasoning comes before content, and content before calls."""
    deltas = [ChatDelta(reasoning_content=part.reasoning)] if part.reasoning else []
    if part.text:
        deltas.append(ChatDelta(content=part.text))
    return deltas + [ChatDelta(tool_calls=[_call_delta(piece)]) for piece in part.calls]


def _call_delta(piece: ToolCallStart | ToolCallArguments) -> ToolCallDelta:
    if isinstance(piece, ToolCallArguments):
        return ToolCallDelta(index=piece.index, function=FunctionDelta(arguments=piece.json_fragment))
    function = FunctionDelta(name=piece.name, arguments="")
    return ToolCallDelta(index=piece.index, id=piece.id, type="function", function=function)


def _tool_call(id_: str, name: str, arguments: str) -> ToolCall:
    return ToolCall(id=id_, function=FunctionCall(name=name, arguments=arguments))


class CompletionPresenter(ChoicesPresenter):
    """Chunk and body have one shape; a choice's last chunk carries the rest of its text too."""

    def _chunks(self, part: Part) -> list[Struct]:
        return [self._completion([self._choice(part)], self._chunk_usage, self._result)]

    def _usage_chunk(self, usage: Usage) -> Struct:
        return self._completion([], usage, self._all_results)

    def _body(self, parts: Sequence[Part]) -> Struct:
        body = self._completion([self._choice(part) for part in parts], self.usage(), self._all_results)
        return replace(body, kv_transfer_params=self._transfer(parts))

    def _completion(
        self, choices: list[CompletionChoice], usage: Usage | UnsetType | None, fan_out: FanOutResult | UnsetType
    ) -> Struct:
        job = self._job
        return Completion(
            id=job.response_id, created=job.created, model=job.model, choices=choices, usage=usage, fan_out=fan_out
        )

    def _choice(self, part: Part) -> CompletionChoice:
        choice = CompletionChoice(
            index=part.shown_index,
            text=part.text,
            logprobs=self._logprobs(part),
            token_ids=self._token_ids(part),
            **(self._prompt_facts(part.index) if part.is_first else {}),
        )
        return choice if part.end is None else replace(choice, **self._facts(part.end))

    def _logprobs(self, part: Part) -> CompletionLogprobs | None:
        k = self._job.show.logprobs
        return None if k is None or not part.entries else completion_logprobs(part.entries, k)


PRESENTERS: dict[Kind, type[Presenter]] = {
    "chat": ChatPresenter,
    "completion": CompletionPresenter,
    "response": ResponsePresenter,
}
