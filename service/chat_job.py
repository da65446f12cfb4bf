"""What chats and responses have in common once their own schemas are behind them: a conversation becomes a job."""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

from engine import api
from service.chat_options import TemplateWish
from service.chat_prompt import chat_prompt
from service.choice_text import TextRules
from service.errors import CONTEXT_LENGTH_EXCEEDED, invalid
from service.fan_out import STEERED_BY_NOTHING, FanOutRules
from service.job import Arrival, GenerationJob, Kind
from service.lifespan import Services
from service.messages import RenderedMessage
from service.parsers import REASONING_PARSERS, OutputParser, ReasoningParser
from service.passing import passed_chat
from service.requests import Plan, make_job, wanted_tokens
from service.sampling import show_rules, text_rules
from service.schemas.common import SamplingFields
from service.shortening import shortened_prompt
from service.structured import both_say, field_of
from service.tools import ToolUse


@dataclass(frozen=True, slots=True)
class Turn:
    """A conversation and what is asked of its next turn. text: what the text must be. truncates: what does not fit is
    left out from the start.
    """

    kind: Kind
    id_prefix: str
    messages: Sequence[RenderedMessage]
    template: TemplateWish
    tools: ToolUse | None
    text: api.Constraint | None
    max_tokens: int | None
    max_tokens_param: str
    logprobs: int | None
    n: int = 1
    fan_out: FanOutRules = STEERED_BY_NOTHING
    truncates: bool = False


async def make_chat_job(request: SamplingFields, turn: Turn, services: Services, arrival: Arrival) -> GenerationJob:
    """Raises ApiError (400) naming the field, EngineNotReady and EngineDead."""
    if services.passes_text:
        plan, prompt = passed_chat(request, turn, services.settings, arrival.caller)
    else:
        plan, prompt = await _tokenised(request, turn, services)
    job = make_job(request, plan, [prompt], services, arrival)
    return replace(job, asked=turn.messages) if services.keeps_content else job


async def _tokenised(request: SamplingFields, turn: Turn, services: Services) -> tuple[Plan, api.Prompt]:
    tools, constraint = turn.tools, _constraint(turn)

    def prompt(messages: Sequence[RenderedMessage]) -> Awaitable[tuple[list[int], str]]:
        return chat_prompt(request, turn.template, messages, tools, services)

    if turn.truncates:
        room = services.engine.info.max_model_len - wanted_tokens(request, turn.max_tokens)
        token_ids, tail = await shortened_prompt(turn.messages, prompt, room)
    else:
        token_ids, tail = await prompt(turn.messages)
    continues = turn.template.continues
    continued = str(turn.messages[-1].get("content") or "") if continues else ""
    # what must be complete begins with its first token: no reasoning comes before it
    is_free = constraint is None or isinstance(constraint, api.TriggeredBlocks | api.OpenConstraint)
    reasoning = services.parsers.reasoning if is_free else None
    plan = Plan(
        kind=turn.kind,
        id_prefix=turn.id_prefix,
        prompt_param=turn.template.messages_param,
        max_tokens=turn.max_tokens,
        max_tokens_param=turn.max_tokens_param,
        n=turn.n,
        fan_out=turn.fan_out,
        show=replace(
            show_rules(request, turn.logprobs),
            reasoning=reasoning is not None,
            may_call=tools is not None,
            named_call=tools is not None and tools.named,
        ),
        text=_with_parsers(text_rules(request, continues=continues), tools, reasoning, tail, continued),
        constraint=constraint,
        checked=() if tools is None else tools.checked,
    )
    return plan, api.TokenPrompt(tuple(token_ids))


def _constraint(turn: Turn) -> api.Constraint | None:
    """The one of the text and the tools."""
    tools, constraint = turn.tools, turn.text
    if tools is None or constraint is None:
        return constraint if tools is None else tools.forced or tools.guided
    if not isinstance(constraint, api.OpenConstraint):
        param = field_of(constraint.param)
        raise invalid(f"`{param}` says what the whole text is, so that no `tools` could be called.", param)
    if (calls := tools.forced or tools.guided) is not None:
        raise both_say(calls, constraint.param)
    return constraint


def _with_parsers(
    rules: TextRules, tools: ToolUse | None, reasoning: str | None, tail: str, continued: str
) -> TextRules:
    """tail: the end of the prompt's text. continued: the answer that is to go on, "" for a new one."""
    markers: tuple[str, ...] = () if tools is None else tools.parser.markers
    new_reasoning = None
    if reasoning is not None:
        parser = REASONING_PARSERS[reasoning]
        markers += parser.markers
        new_reasoning = partial(parser, starts_inside=parser.opened_by(tail) or parser.left_open_by(continued))

    def new_parser() -> OutputParser:
        thoughts: ReasoningParser | None = None if new_reasoning is None else new_reasoning()
        return OutputParser(thoughts, None if tools is None else tools.new_parser())

    return replace(
        rules,
        new_parser=new_parser,
        markers=frozenset(markers),
        max_calls=None if tools is None else tools.max_calls,
    )


def check_num_messages(num_messages: int, param: Literal["messages", "input"], services: Services) -> None:
    """A message is a token at least: a hundred thousand of them need no rendering to be too many."""
    services.check_ready()
    limit = services.engine.info.max_model_len
    if limit and num_messages > limit:
        message = f"This model's context length is {limit} tokens. However, {num_messages} messages were sent."
        raise invalid(message, param, CONTEXT_LENGTH_EXCEEDED)
