"""The policy of a fan-out: watches the events of all choices in one place, says which choices to stop, and in which
order, with what facts and with which common answer the rest is presented.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from engine.api import EndReason, PromptInfo
from service.agreement import Answer, Extract, extractor
from service.errors import invalid
from service.schemas.fan_out import Agreement, AgreeOptions, ChoiceDetails, FanOutOptions, FanOutResult

if TYPE_CHECKING:
    from service.choice_text import ChoiceEvent
    from service.job import GenerationJob

BY_ITSELF = frozenset({EndReason.STOP, EndReason.LENGTH})


@dataclass(frozen=True, slots=True)
class AgreeRule:
    """Stop once `count` choices of a prompt give the same answer."""

    extract: Extract
    count: int


@dataclass(frozen=True, slots=True)
class FanOutRules:
    """A checked `fan_out`; the defaults are those of a request without one."""

    isolate: bool = False
    stop_after: int | None = None
    keep_unfinished: bool = True
    rank: bool = False
    keep: int | None = None
    agree: AgreeRule | None = None
    details: bool = False

    @property
    def needs_logprobs(self) -> bool:
        return self.rank or self.details


STEERED_BY_NOTHING = FanOutRules()


def fan_out_rules(options: FanOutOptions | None, n: int, *, stream: bool) -> FanOutRules:
    """Raises ApiError (400) naming the field."""
    if options is None:
        return STEERED_BY_NOTHING
    _check_counts(options, n)
    _check_combinations(options, stream)
    return FanOutRules(
        isolate=options.on_error == "isolate",
        stop_after=options.stop_after,
        keep_unfinished=options.keep_unfinished is not False,
        rank=options.rank_by is not None,
        keep=options.keep,
        agree=None if options.agree is None else _agree_rule(options.agree),
        details=bool(options.details),
    )


def _check_counts(options: FanOutOptions, n: int) -> None:
    counts = {"stop_after": options.stop_after, "keep": options.keep}
    if options.agree is not None:
        counts["agree.count"] = options.agree.count
    for name, count in counts.items():
        if count is not None and count > n:
            raise invalid(f"`fan_out.{name}` is {count}, more than the {n} choices of a prompt.", f"fan_out.{name}")


def _check_combinations(options: FanOutOptions, stream: bool) -> None:
    whole_only = {
        "keep_unfinished": options.keep_unfinished is False,
        "rank_by": options.rank_by is not None,
        "keep": options.keep is not None,
    }
    for name, asked in whole_only.items():
        if stream and asked:
            raise invalid(f"`fan_out.{name}` needs an answer that is not streamed.", f"fan_out.{name}")
    if options.keep is not None and options.rank_by is None:
        raise invalid("`fan_out.keep` needs `fan_out.rank_by`, which says what is best.", "fan_out.keep")
    if options.keep_unfinished is False and options.stop_after is None and options.agree is None:
        message = "`fan_out.keep_unfinished` needs `fan_out.stop_after` or `fan_out.agree`."
        raise invalid(message, "fan_out.keep_unfinished")


def _agree_rule(options: AgreeOptions) -> AgreeRule:
    return AgreeRule(extractor(options), options.count)


@dataclass(slots=True)
class SeenChoice:
    """What was seen of one choice. Times: of `clock`. text: kept only to find the answer in it."""

    text: list[str] = field(default_factory=list)
    num_tokens: int = 0
    num_logprobs: int = 0
    logprob_sum: float = 0.0
    first_token_at: float | None = None
    ended_at: float | None = None
    end_reason: EndReason | None = None
    answer: Answer | None = None
    stopped: bool = False

    @property
    def mean_logprob(self) -> float | None:
        return self.logprob_sum / self.num_logprobs if self.num_logprobs else None


class FanOut:
    """One job's choices, index = prompt * n + choice."""

    def __init__(
        self, job: GenerationJob, prompts: Sequence[PromptInfo], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._rules = job.fan_out
        self._job = job
        self.prompts = prompts
        self._clock = clock
        self._choices = [SeenChoice() for _ in range(job.num_choices)]

    @property
    def isolates(self) -> bool:
        """A failing choice leaves the others alone."""
        return self._rules.isolate

    @property
    def choices(self) -> Sequence[SeenChoice]:
        """For the count of what there was, at the request's end."""
        return self._choices

    @property
    def all_ended(self) -> bool:
        return all(choice.end_reason is not None for choice in self._choices)

    def has_ended(self, index: int) -> bool:
        return self._choices[index].end_reason is not None

    def end_reason(self, index: int) -> EndReason | None:
        return self._choices[index].end_reason

    def num_tokens(self, index: int) -> int:
        return self._choices[index].num_tokens

    @property
    def has_begun(self) -> bool:
        """The engine has made something."""
        return any(choice.num_tokens or choice.end_reason for choice in self._choices) or any(
            prompt.started_at is not None for prompt in self.prompts
        )

    def observe(self, event: ChoiceEvent) -> list[int]:
        """To be called once for each event, as soon as it is made. Returns the choices that are to be cancelled now."""
        choice, now = self._choices[event.index], self._clock()
        choice.num_tokens += event.num_tokens
        if event.entries:
            choice.num_logprobs += len(event.entries)
            choice.logprob_sum += sum(entry.logprob or 0.0 for entry in event.entries)
        if choice.first_token_at is None and (event.num_tokens or event.text):
            choice.first_token_at = now
        if self._rules.agree is not None:
            choice.text.append(event.text)
        if event.end_reason is None:
            return []
        choice.end_reason, choice.ended_at = event.end_reason, now
        return self._stop_others(event.index) if event.end_reason in BY_ITSELF else []

    def _stop_others(self, index: int) -> list[int]:
        rules, siblings = self._rules, self._siblings(index // self._job.n)
        ended = [self._choices[sibling] for sibling in siblings if self._choices[sibling].end_reason in BY_ITSELF]
        is_enough = rules.stop_after is not None and len(ended) >= rules.stop_after
        if rules.agree is not None:
            choice = self._choices[index]
            choice.answer = rules.agree.extract("".join(choice.text))
            choice.text.clear()
            is_enough = is_enough or self._agreement(siblings, rules.agree).reached
        if not is_enough:
            return []
        others = [sibling for sibling in siblings if not self.has_ended(sibling) and not self._choices[sibling].stopped]
        for other in others:
            self._choices[other].stopped = True
        return others

    def order(self) -> list[int]:
        """The choices that the body has, in its order: prompt by prompt, of each prompt the best first if ranked."""
        shown = []
        for prompt in range(len(self._job.batch)):
            siblings = [index for index in self._siblings(prompt) if not self._is_left_out(self._choices[index])]
            if self._rules.rank:
                siblings.sort(key=self._rank)
            shown += siblings[: self._rules.keep]
        return shown

    def _is_left_out(self, choice: SeenChoice) -> bool:
        return not self._rules.keep_unfinished and choice.stopped and choice.end_reason is EndReason.CANCELLED

    def _rank(self, index: int) -> tuple[bool, float]:
        """A choice that failed or has nothing comes last."""
        choice = self._choices[index]
        mean = choice.mean_logprob
        return choice.end_reason is EndReason.ERROR or mean is None, -(mean or 0.0)

    def _siblings(self, prompt: int) -> range:
        return range(prompt * self._job.n, (prompt + 1) * self._job.n)

    def details(self, index: int) -> ChoiceDetails | None:
        """None unless asked for."""
        if not self._rules.details:
            return None
        choice, prompt = self._choices[index], self.prompts[index // self._job.n]
        params = self._job.batch[index // self._job.n].choices[index % self._job.n]
        total_ms = self._since_arrival(choice.ended_at)
        return ChoiceDetails(
            seed=params.seed,
            cached_tokens=prompt.num_cached_tokens,
            queue_ms=self._since_arrival(prompt.started_at),
            first_token_ms=self._since_arrival(choice.first_token_at),
            total_ms=0.0 if total_ms is None else total_ms,
            mean_logprob=choice.mean_logprob,
        )

    def _since_arrival(self, moment: float | None) -> float | None:
        return None if moment is None else round(max(0.0, moment - self._job.received_at) * 1000, 3)

    def result(self) -> FanOutResult | None:
        """What the whole answer says besides its choices, once all have ended; None where nothing was asked for."""
        rule = self._rules.agree
        if rule is None:
            return None
        agreed = [self._agreement(self._siblings(prompt), rule) for prompt in range(len(self._job.batch))]
        return FanOutResult(agree=agreed[0] if len(agreed) == 1 else agreed)

    def _agreement(self, siblings: Sequence[int], rule: AgreeRule) -> Agreement:
        """Of answers given equally often the one with the smallest index, so that the order of events is no matter."""
        votes: dict[str, list[int]] = {}
        for index in siblings:
            answer = self._choices[index].answer
            if answer is not None:
                votes.setdefault(answer.key, []).append(index)
        winners = max(votes.values(), key=len, default=[])
        first = self._choices[winners[0]].answer if winners else None
        return Agreement(
            answer=None if first is None else first.shown,
            count=len(winners),
            reached=len(winners) >= rule.count,
            indices=winners,
        )
