"""From a decoded chat request to a job: messages, tools, reasoning, the chat template."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from engine import api
from service.chat_prompt import chat_prompt
from service.choice_text import TextRules
from service.errors import CONTEXT_LENGTH_EXCEEDED, invalid
from service.job import Arrival, GenerationJob
from service.lifespan import Services
from service.messages import render_messages
from service.parsers import REASONING_PARSERS, OutputParser, ReasoningParser
from service.requests import Plan, check_common, fan_out_of, make_job
from service.sampling import check_sampling, given, show_rules, text_rules
from service.schemas.chat import ChatCompletionRequest
from service.schemas.fields import CHAT_FIELDS
from service.structured import both_say, constraint_of, field_of
from service.tools import ToolUse, tool_use


async def prepare_chat(request: ChatCompletionRequest, services: Services, arrival: Arrival) -> GenerationJob:
    """Raises ApiError (4xx), EngineNotReady and EngineDead."""
    check_common(request, services, CHAT_FIELDS)
    max_tokens, max_tokens_param = _chat_max_tokens(request)
    logprobs = _chat_logprobs(request)
    messages = render_messages(request.messages)
    n = given(request.n, 1)
    check_sampling(request, max_tokens, n, 1, services.settings)
    fan_out = fan_out_of(request, n, services, arrival.caller)
    check_num_messages(len(messages), services)
    tools = tool_use(request, services.parsers)
    constraint = _constraint(request, tools)
    continues = bool(request.continue_final_message)
    continued = str(messages[-1].get("content") or "") if continues else ""
    token_ids, tail = await chat_prompt(request, messages, tools, services)
    # what must be complete begins with its first token: no reasoning comes before it
    is_free = constraint is None or isinstance(constraint, api.TriggeredBlocks | api.OpenConstraint)
    reasoning = services.parsers.reasoning if is_free else None
    plan = Plan(
        kind="chat",
        id_prefix="chatcmpl-",
        prompt_param="messages",
        max_tokens=max_tokens,
        max_tokens_param=max_tokens_param,
        n=n,
        fan_out=fan_out,
        show=replace(
            show_rules(request, logprobs),
            reasoning=reasoning is not None,
            may_call=tools is not None,
            named_call=tools is not None and tools.named,
        ),
        text=_with_parsers(text_rules(request, continues=continues), tools, reasoning, tail, continued),
        constraint=constraint,
        checked=() if tools is None else tools.checked,
    )
    return make_job(request, plan, [token_ids], services, arrival)


def _constraint(request: ChatCompletionRequest, tools: ToolUse | None) -> api.Constraint | None:
    constraint = constraint_of(request, request.response_format)
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


def check_num_messages(num_messages: int, services: Services) -> None:
    """A message is a token at least: a hundred thousand of them need no rendering to be too many."""
    services.check_ready()
    limit = services.engine.info.max_model_len
    if num_messages > limit:
        message = f"This model's context length is {limit} tokens. However, {num_messages} messages were sent."
        raise invalid(message, "messages", CONTEXT_LENGTH_EXCEEDED)


def _chat_max_tokens(request: ChatCompletionRequest) -> tuple[int | None, str]:
    newer, older = request.max_completion_tokens, request.max_tokens
    if newer is None:
        return older, "max_tokens"
    if older is not None and older != newer:
        raise invalid(
            f"`max_completion_tokens` ({newer}) and `max_tokens` ({older}) are two names of one limit.",
            "max_completion_tokens",
        )
    return newer, "max_completion_tokens"


def _chat_logprobs(request: ChatCompletionRequest) -> int | None:
    if request.logprobs:
        return given(request.top_logprobs, 0)
    if request.top_logprobs is not None:
        raise invalid("`top_logprobs` is only allowed with `logprobs`.", "top_logprobs")
    return None
