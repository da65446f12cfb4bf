"""Tools of a chat: which the template shows, which may be called, what is enforced, and who finds calls in the text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from engine.api import JsonBlock, JsonBlocks, JsonSchema, TriggeredBlocks
from service.call_forms import CALL_FORMS, COMMON_FORM, CallForm
from service.errors import ApiError, invalid
from service.model_parsers import ModelParsers
from service.parsers import REASONING_PARSERS, TOOL_PARSERS, Tool, ToolParser
from service.schemas.chat import ChatCompletionRequest
from service.schemas.tools import AllowedTools, FunctionSpec, FunctionTool, NamedTool
from service.structured import schema_text


@dataclass(frozen=True, slots=True)
class ToolUse:
    """shown: for the template. callable: those that count as calls. max_calls: of one choice. forced: the constraint
    that makes the model call, None where it may. guided: that which holds the calls it makes by itself to the schemas
    of strict tools, None where there are none or nothing shows where a call begins; then checked are the schemas that
    would have to be kept. named: the client said which one.
    """

    shown: tuple[Mapping[str, object], ...]
    callable: tuple[Tool, ...]
    parser: type[ToolParser]
    max_calls: int | None
    forced: JsonBlocks | None = None
    guided: TriggeredBlocks | None = None
    checked: tuple[JsonSchema, ...] = ()
    named: bool = False

    def new_parser(self) -> ToolParser:
        return self.parser(self.callable)


def tool_use(request: ChatCompletionRequest, parsers: ModelParsers) -> ToolUse | None:
    """None where nothing may be called. Raises ApiError (400) naming the field."""
    tools, choice = request.tools or [], request.tool_choice
    _check_names(tools)
    if not tools:
        if choice not in (None, "none", "auto"):
            raise invalid("`tool_choice` wants a call, but there are no `tools`.", "tool_choice")
        return None
    if choice == "none":
        return None
    callable_ = [(place, tool.function) for place, tool in enumerate(tools)]
    must_call, named = choice == "required", isinstance(choice, NamedTool)
    match choice:
        case NamedTool():
            callable_ = _only(callable_, [choice.function.name])
            must_call = True
        case AllowedTools(allowed_tools=subset):
            callable_ = _only(callable_, [tool.function.name for tool in subset.tools])
            must_call = subset.mode == "required"
    family = parsers.tools
    if must_call:
        family = family if family in CALL_FORMS else COMMON_FORM
    if family is None:
        raise _no_calls("tools")
    max_calls = 1 if named or request.parallel_tool_calls is False else None
    blocks = [_block(place, function, CALL_FORMS[family]) for place, function in callable_] if must_call else []
    strict = [] if must_call else [(place, function) for place, function in callable_ if function.strict]
    guided = _guided(callable_, family, parsers, max_calls) if strict else None
    return ToolUse(
        shown=tuple(_shown(tool.function) for tool in tools),
        callable=tuple(Tool(function.name, function.parameters or {}) for _, function in callable_),
        parser=TOOL_PARSERS[family],
        max_calls=max_calls,
        forced=_forced(blocks, CALL_FORMS[family], max_calls) if blocks else None,
        guided=guided,
        checked=() if guided is not None else tuple(_schema(place, function) for place, function in strict),
        named=named,
    )


def _check_names(tools: Sequence[FunctionTool]) -> None:
    seen: set[str] = set()
    for place, tool in enumerate(tools):
        if tool.function.name in seen:
            raise invalid(f"There are two tools named `{tool.function.name}`.", f"tools[{place}].function.name")
        seen.add(tool.function.name)


def _only(functions: list[tuple[int, FunctionSpec]], names: Sequence[str]) -> list[tuple[int, FunctionSpec]]:
    known = {function.name for _, function in functions}
    for name in names:
        if name not in known:
            raise invalid(f"`tool_choice` names `{name}`, which is not among the `tools`.", "tool_choice")
    return [(place, function) for place, function in functions if function.name in names]


def _no_calls(param: str) -> ApiError:
    message = (
        f"Unsupported parameter: `{param}`: this server does not know how the model writes calls; they can be had from "
        "it with `tool_choice` `required` or a named one."
    )
    return invalid(message, param, "unsupported_parameter")


def _shown(function: FunctionSpec) -> Mapping[str, object]:
    """As OpenAI writes it, which is what templates expect."""
    described = {"description": function.description} if function.description is not None else {}
    parameters = {"type": "object", "properties": {}} if function.parameters is None else function.parameters
    return {"type": "function", "function": {"name": function.name, **described, "parameters": parameters}}


def _block(place: int, function: FunctionSpec, form: CallForm) -> JsonBlock:
    return JsonBlock(form.before.format(function.name), _schema(place, function), form.after)


def _schema(place: int, function: FunctionSpec) -> JsonSchema:
    param = f"tools[{place}].function.parameters"
    schema = {"type": "object", "properties": {}} if function.parameters is None else function.parameters
    if schema.get("type", "object") != "object":
        raise invalid(f"`{param}` must be the schema of an object.", param)
    return JsonSchema(schema_text({"type": "object", **schema}, param), param)


def _guided(
    functions: Sequence[tuple[int, FunctionSpec]], family: str, parsers: ModelParsers, max_calls: int | None
) -> TriggeredBlocks | None:
    """Tools that are not strict may be called with any object."""
    form = CALL_FORMS.get(family)
    if form is None or not form.trigger:
        return None
    blocks = []
    for place, function in functions:
        block = _block(place, function if function.strict else FunctionSpec(name=function.name, parameters={}), form)
        blocks.append(replace(block, before=block.before.removeprefix(form.trigger)))
    marks = () if parsers.reasoning is None else REASONING_PARSERS[parsers.reasoning].markers
    return TriggeredBlocks(tuple(blocks), form.trigger, "tools", marks, max_calls)


def _forced(blocks: Sequence[JsonBlock], form: CallForm, max_calls: int | None) -> JsonBlocks:
    return JsonBlocks(tuple(blocks), "tools", form.start, form.separator, form.end, max_calls)
