"""One generation request on its way from its arrival to the engine and back."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from engine import api
from service.auth import ANYONE, Caller
from service.choice_text import TextRules
from service.fan_out import STEERED_BY_NOTHING, FanOutRules
from service.schemas.response_items import InputItem
from service.schemas.responses import Response
from service.settings import Settings

if TYPE_CHECKING:
    from service.messages import RenderedMessage

Kind = Literal["chat", "completion", "response"]


@dataclass(frozen=True, slots=True)
class Echo:
    """A prompt as an answer repeats it. offsets: where the text of each of its tokens begins; none without logprobs."""

    text: str
    offsets: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class ShowRules:
    """What an answer has beside texts and ends.

    logprobs: how many likeliest tokens beside the drawn one's; None for no log probabilities. token_ids: those of
    prompts and choices. running_usage: on every chunk. reasoning: it is told apart. may_call: choices may call tools;
    named_call: the client said which one, so that a call is no news. renumbered: the choices that are kept count as if
    there were no others. echo: the prompts, which precede the choices. prompt_logprobs: how many likeliest tokens
    beside each of the prompt's; None for none of these. tokens_per_chunk: that a chunk of a stream waits for.
    """

    logprobs: int | None = None
    token_ids: bool = False
    running_usage: bool = False
    reasoning: bool = False
    may_call: bool = False
    named_call: bool = False
    renumbered: bool = False
    echo: tuple[Echo, ...] = ()
    prompt_logprobs: int | None = None
    tokens_per_chunk: int = 1

    @property
    def num_prompt_logprobs(self) -> int | None:
        """What the engine is asked for."""
        wanted = [self.prompt_logprobs, self.logprobs if self.echo else None]
        return max((count for count in wanted if count is not None), default=None)


@dataclass(frozen=True, slots=True)
class GenerationJob:
    """One HTTP request, checked and tokenised.

    batch: one engine request per prompt; choice i of prompt p has index p * n + i. created: unix seconds.
    request_id: the client's own, echoed. timeout: seconds from received_at, which is of time.monotonic(), to the
    deadline. response: what the answer of a response repeats of its request; else None. kept_input: of a response that
    is to be stored. asked: the messages, only where traces are to have them.
    """

    kind: Kind
    response_id: str
    created: int
    model: str
    batch: tuple[api.Request, ...]
    n: int
    text: TextRules
    stream: bool
    include_usage: bool
    request_id: str | None
    show: ShowRules = ShowRules()
    fan_out: FanOutRules = STEERED_BY_NOTHING
    response: Response | None = None
    kept_input: Sequence[InputItem] | None = None
    asked: Sequence[RenderedMessage] = ()
    caller: Caller = ANYONE
    received_at: float = 0.0
    timeout: float = math.inf

    @property
    def num_choices(self) -> int:
        return len(self.batch) * self.n

    @property
    def ends_by_text(self) -> bool:
        """What a choice says may end it or others, and the engine does not know: each token is to be seen at once."""
        rules = self.fan_out
        steers = rules.stop_after is not None or rules.agree is not None
        return steers or bool(self.text.stop) or self.text.max_calls is not None


@dataclass(frozen=True, slots=True)
class Arrival:
    """What a request came with besides its body. received_at: time.monotonic(). timeout: seconds, of the header."""

    caller: Caller
    received_at: float
    request_id: str | None = None
    timeout: float | None = None

    def seconds(self, wanted: float | None, settings: Settings) -> float:
        """From the arrival to the deadline: the smallest of what the body, the header and the server say."""
        given = (wanted, self.timeout, settings.request_timeout)
        return min(seconds for seconds in given if seconds is not None)
