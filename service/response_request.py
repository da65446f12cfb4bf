"""From a decoded response request to a job, and what the answer repeats of the request."""

from __future__ import annotations

from dataclasses import replace

from engine import api
from service.chat_job import Turn, check_num_messages, make_chat_job
from service.chat_options import TemplateWish
from service.errors import invalid
from service.job import Arrival, GenerationJob
from service.kept_responses import kept_conversation
from service.lifespan import Services
from service.requests import check_common, fan_out_of, in_thread, refuse_fields
from service.response_input import read_input, render_items
from service.sampling import check_sampling, given
from service.schemas.response_fields import RESPONSE_FIELDS
from service.schemas.responses import (
    AllowedFunctions,
    NamedFunction,
    ReasoningOptions,
    ReasoningShown,
    Response,
    ResponseRequest,
    ResponseTool,
    SchemaFormat,
    TextOptions,
    TextShown,
    ToolShown,
)
from service.schemas.structured import JsonObjectFormat, TextFormat
from service.schemas.tools import AllowedTools, FunctionRef, FunctionSpec, NamedTool, ToolChoice, ToolSubset
from service.structured import constraint_of, schema_text
from service.tools import ToolWish, tool_use

LOGPROBS = "message.output_text.logprobs"


async def prepare_response(request: ResponseRequest, services: Services, arrival: Arrival) -> GenerationJob:
    """Raises ApiError (4xx), EngineNotReady and EngineDead."""
    check_common(request, services, RESPONSE_FIELDS)
    logprobs = _logprobs(request)
    check_sampling(request, request.max_output_tokens, 1, 1, services.settings)
    fan_out = fan_out_of(request, 1, services, arrival.caller)
    services.check_ready()
    if request.input is None:
        raise invalid("Missing required parameter: `input`.", "input", "missing_required_parameter")
    asked, is_kept = request.input, services.responses is not None and request.store is not False
    given_items = await in_thread(lambda _: read_input(asked), services)
    items = await kept_conversation(request.previous_response_id, given_items, services.responses, arrival.caller)
    messages = render_items(request.instructions, items)
    if request.truncation != "auto":
        check_num_messages(len(messages), "input", services)
    turn = Turn(
        kind="response",
        id_prefix="resp_",
        messages=messages,
        template=_template_wish(request),
        tools=tool_use(_tool_wish(request), services.parsers),
        text=constraint_of(request, _text_constraint(request)),
        max_tokens=request.max_output_tokens,
        max_tokens_param="max_output_tokens",
        logprobs=logprobs,
        fan_out=fan_out,
        truncates=request.truncation == "auto",
    )
    job = await make_chat_job(request, turn, services, arrival)
    if services.responses is not None and is_kept:
        await services.responses.check()
    # with what it refers to: that may be deleted before the conversation goes on
    kept_input = [placed.item for placed in items[len(items) - len(given_items) :]] if is_kept else None
    return replace(job, response=_repeated(request, is_kept), kept_input=kept_input)


def _logprobs(request: ResponseRequest) -> int | None:
    if LOGPROBS in given(request.include, []):
        return given(request.top_logprobs, 0)
    if request.top_logprobs:
        raise invalid(f"`top_logprobs` is only allowed with `include` of `{LOGPROBS}`.", "top_logprobs")
    return None


def _template_wish(request: ResponseRequest) -> TemplateWish:
    return TemplateWish(
        "input",
        "reasoning.effort",
        own=request.chat_template,
        variables=request.chat_template_kwargs,
        effort=None if request.reasoning is None else request.reasoning.effort,
    )


def _tool_wish(request: ResponseRequest) -> ToolWish:
    functions = []
    for number, tool in enumerate(request.tools or []):
        refuse_fields(tool, "tools[function]", f"tools[{number}]", RESPONSE_FIELDS)
        functions.append(
            FunctionSpec(name=tool.name, description=tool.description, parameters=tool.parameters, strict=tool.strict)
        )
    return ToolWish(functions, _tool_choice(request), given(request.parallel_tool_calls, True), "")


def _tool_choice(request: ResponseRequest) -> ToolChoice | None:
    """As a chat has it."""
    match request.tool_choice:
        case NamedFunction(name=name):
            return NamedTool(function=FunctionRef(name=name))
        case AllowedFunctions(mode=mode, tools=tools):
            named = [NamedTool(function=FunctionRef(name=tool.name)) for tool in tools]
            return AllowedTools(allowed_tools=ToolSubset(mode=mode, tools=named))
        case choice:
            return choice


def _text_constraint(request: ResponseRequest) -> api.Constraint | None:
    match None if request.text is None else request.text.format:
        case JsonObjectFormat():
            return api.JsonObject("text.format")
        case SchemaFormat(schema=schema):
            param = "text.format.schema"
            return api.JsonSchema(schema_text(schema, param), param)
    return None


def _repeated(request: ResponseRequest, is_kept: bool) -> Response:
    """id and created_at are the job's."""
    reasoning = request.reasoning or ReasoningOptions()
    text = request.text or TextOptions()
    return Response(
        id="",
        created_at=0,
        status="in_progress",
        instructions=request.instructions,
        max_output_tokens=request.max_output_tokens,
        max_tool_calls=request.max_tool_calls,
        metadata=request.metadata or {},
        model=request.model,
        parallel_tool_calls=given(request.parallel_tool_calls, True),
        previous_response_id=request.previous_response_id,
        prompt_cache_key=request.prompt_cache_key,
        reasoning=ReasoningShown(effort=reasoning.effort, summary=reasoning.summary or reasoning.generate_summary),
        safety_identifier=request.safety_identifier,
        store=is_kept,
        temperature=given(request.temperature, 1.0),
        text=TextShown(format=text.format or TextFormat()),
        tool_choice=given(request.tool_choice, "auto"),
        tools=list(map(_tool_shown, request.tools or [])),
        top_logprobs=given(request.top_logprobs, 0),
        top_p=given(request.top_p, 1.0),
        truncation=given(request.truncation, "disabled"),
        user=request.user,
    )


def _tool_shown(tool: ResponseTool) -> ToolShown:
    return ToolShown(name=tool.name, description=tool.description, parameters=tool.parameters, strict=bool(tool.strict))
