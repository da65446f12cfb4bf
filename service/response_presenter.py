"""A response's events as a stream, or folded into its body: the same items either way."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec.structs import replace

from engine.api import EndReason, PromptInfo
from service.choice_text import ChoiceEvent
from service.errors import ErrorInfo
from service.fan_out import FanOut
from service.parsers import Piece, merge
from service.presenter import Presenter
from service.response_output import ResponseOutput
from service.schemas import response_events as events
from service.schemas.logprobs import TokenLogprob
from service.schemas.responses import (
    IncompleteDetails,
    InputTokensDetails,
    OutputTokensDetails,
    Response,
    ResponseFailure,
    ResponseUsage,
    Status,
)
from service.shown_logprobs import token_logprobs
from service.tokenizer import Tokenizer

if TYPE_CHECKING:
    from service.job import GenerationJob


def begun(job: GenerationJob) -> Response:
    """The response before anything of it is there."""
    assert job.response is not None
    return replace(job.response, id=job.response_id, created_at=job.created)


class ResponsePresenter(Presenter):
    """Its one choice. `response.completed` and its like come last of all: what has to be done before is done then."""

    says_done = False

    def __init__(
        self, job: GenerationJob, prompts: Sequence[PromptInfo], fan_out: FanOut, tokenizer: Tokenizer
    ) -> None:
        super().__init__(job, prompts, fan_out, tokenizer)
        self._blank = begun(job)
        self._numbers = itertools.count()
        self._output = ResponseOutput(job.response_id, self._number)
        self._waiting: list[Piece] = []
        self._num_waiting = 0
        self._end: ChoiceEvent | None = None
        self._whole: Response | None = None
        self._has_begun = False

    def _number(self) -> int:
        return next(self._numbers)

    def event_name(self, chunk: Struct) -> str | None:
        name = type(chunk).__struct_config__.tag
        assert isinstance(name, str)
        return name

    def chunks(self, event: ChoiceEvent) -> list[Struct]:
        return [*self._opening(), *self._add(event)]

    def _opening(self) -> list[Struct]:
        if self._has_begun:
            return []
        self._has_begun = True
        return [
            events.Created(sequence_number=self._number(), response=self._blank),
            events.InProgress(sequence_number=self._number(), response=self._blank),
        ]

    def _add(self, event: ChoiceEvent) -> list[Struct]:
        self.count(event)
        self._waiting += event.pieces
        self._num_waiting += event.num_tokens
        made = self._output.add((), self._logprobs(event))
        if self._num_waiting >= self._job.show.tokens_per_chunk or event.end_reason is not None:
            made += self._output.add(merge(self._waiting), ())
            self._waiting, self._num_waiting = [], 0
        if event.end_reason is not None:
            self._end = event
            made += self._output.finish("completed" if event.end_reason is EndReason.STOP else "incomplete")
        return list(made)

    def _logprobs(self, event: ChoiceEvent) -> list[TokenLogprob]:
        num_top = self._job.show.logprobs
        return [] if num_top is None or not event.entries else token_logprobs(event.entries, num_top)

    def last_chunks(self) -> list[Struct]:
        response = self.body()
        kind = events.Completed if response.status == "completed" else events.Incomplete
        return [kind(sequence_number=self._number(), response=response)]

    def failure_chunks(self, info: ErrorInfo) -> list[Struct]:
        opening = self._opening()
        error = events.ErrorEvent(
            sequence_number=self._number(), code=info.code or info.type, message=info.message, param=info.param
        )
        failed = replace(
            self._blank,
            status="failed",
            error=ResponseFailure(code=_failure_code(info), message=info.message),
            output=self._output.items(),
        )
        return [*opening, error, events.Failed(sequence_number=self._number(), response=failed)]

    def collect(self, event: ChoiceEvent) -> None:
        self._add(event)

    def body(self) -> Response:
        """The same one each time: what is kept is what the client gets."""
        if self._whole is None:
            self._whole = self._ended()
        return self._whole

    def _ended(self) -> Response:
        assert self._end is not None and self._end.end_reason is not None
        end_reason, stop_reason = self._end.end_reason, self._end.stop_reason
        status = _STATUS.get(end_reason, "incomplete")
        return replace(
            self._blank,
            status=status,
            completed_at=int(time.time()) if status == "completed" else None,
            incomplete_details=IncompleteDetails() if status == "incomplete" else None,
            output=self._output.items(),
            usage=self._response_usage(),
            end_reason=end_reason.value,
            stop_reason=stop_reason,
        )

    def _response_usage(self) -> ResponseUsage:
        usage = self.usage()
        return ResponseUsage(
            input_tokens=usage.prompt_tokens,
            input_tokens_details=InputTokensDetails(cached_tokens=usage.prompt_tokens_details.cached_tokens),
            output_tokens=usage.completion_tokens,
            output_tokens_details=OutputTokensDetails(reasoning_tokens=self._num_reasoning_tokens),
            total_tokens=usage.total_tokens,
        )


_STATUS: dict[EndReason, Status] = {EndReason.STOP: "completed", EndReason.CANCELLED: "cancelled"}


def _failure_code(info: ErrorInfo) -> str:
    """OpenAI's word for it."""
    return "rate_limit_exceeded" if info.status == 429 else "server_error"
