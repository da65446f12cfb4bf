"""From a decoded chat request to a job: messages, limits, tools, format."""

from __future__ import annotations

from service.chat_job import Turn, check_num_messages, make_chat_job
from service.chat_options import template_wish
from service.errors import invalid
from service.job import Arrival, GenerationJob
from service.lifespan import Services
from service.messages import render_messages
from service.requests import check_common, fan_out_of
from service.sampling import check_sampling, given
from service.schemas.chat import ChatCompletionRequest
from service.schemas.fields import CHAT_FIELDS
from service.structured import constraint_of, constraint_of_format
from service.tools import ToolWish, tool_use


async def prepare_chat(request: ChatCompletionRequest, services: Services, arrival: Arrival) -> GenerationJob:
    """Raises ApiError (4xx), EngineNotReady and EngineDead."""
    check_common(request, services, CHAT_FIELDS)
    max_tokens, max_tokens_param = _chat_max_tokens(request)
    logprobs = _chat_logprobs(request)
    messages = render_messages(request.messages)
    n = given(request.n, 1)
    check_sampling(request, max_tokens, n, 1, services.settings)
    fan_out = fan_out_of(request, n, services, arrival.caller)
    check_num_messages(len(messages), "messages", services)
    turn = Turn(
        kind="chat",
        id_prefix="chatcmpl-",
        messages=messages,
        template=template_wish(request),
        tools=tool_use(tool_wish(request), services.parsers),
        text=constraint_of(request, constraint_of_format(request.response_format)),
        max_tokens=max_tokens,
        max_tokens_param=max_tokens_param,
        n=n,
        fan_out=fan_out,
        logprobs=logprobs,
    )
    return await make_chat_job(request, turn, services, arrival)


def tool_wish(request: ChatCompletionRequest) -> ToolWish:
    functions = [tool.function for tool in request.tools or []]
    return ToolWish(functions, request.tool_choice, given(request.parallel_tool_calls, True), ".function")


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
