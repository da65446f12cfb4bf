"""Tools of a chat: which the template shows, which may be called, what is enforced, and who finds calls in the text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from engine.api import JsonBlock, JsonBlocks, JsonSchema, TriggeredBlocks
from service.call_forms import CALL_FORMS, COMMON_FORM, CallForm
from service.errors import ApiError, invalid
from service.model_parsers import ModelParsers
from service.parsers import REASONING_PARSERS, TOOL_PARSERS, Tool, ToolParser
from service.schemas.tools import AllowedTools, FunctionSpec, NamedTool, ToolChoice
from service.structured import schema_text


@dataclass(frozen=True, slots=True)
class ToolWish:
    """What a request says of tools. inside: where a function stands in an element of `tools`, as errors name it."""

    functions: Sequence[FunctionSpec]
    choice: ToolChoice | None
    parallel: bool
    inside: Literal["", ".function"]

    def place(self, number: int, field: str) -> str:
        return f"tools[{number}]{self.inside}.{field}"


@dataclass(frozen=True, slots=True)
class ToolUse:
    """shown: for the template. callable: those that count as calls. max_calls: of one choice. forced: the constraint
    that makes the model call, None where it may. guided: that which holds the calls it makes by itself to the schemas
    of strict tools, None where there are none or nothing shows where a call begins; then checked are the schemas that
    would have to be kept. named: the client said which one. wish: what it said.
    """

    wish: ToolWish
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


def tool_use(wish: ToolWish, parsers: ModelParsers) -> ToolUse | None:
    """None where nothing may be called. Raises ApiError (400) naming the field."""
    functions, choice = wish.functions, wish.choice
    _check_names(wish)
    if not functions:
        if choice not in (None, "none", "auto"):
            raise invalid("`tool_choice` wants a call, but there are no `tools`.", "tool_choice")
        return None
    if choice == "none":
        return None
    callable_ = [(wish.place(place, "parameters"), function) for place, function in enumerate(functions)]
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
    max_calls = 1 if named or not wish.parallel else None
    blocks = [_block(param, function, CALL_FORMS[family]) for param, function in callable_] if must_call else []
    strict = [] if must_call else [(param, function) for param, function in callable_ if function.strict]
    guided = _guided(callable_, family, parsers, max_calls) if strict else None
    return ToolUse(
        wish=wish,
        shown=tuple(map(_shown, functions)),
        callable=tuple(Tool(function.name, function.parameters or {}) for _, function in callable_),
        parser=TOOL_PARSERS[family],
        max_calls=max_calls,
        forced=_forced(blocks, CALL_FORMS[family], max_calls) if blocks else None,
        guided=guided,
        checked=() if guided is not None else tuple(_schema(param, function) for param, function in strict),
        named=named,
    )


def _check_names(wish: ToolWish) -> None:
    seen: set[str] = set()
    for place, function in enumerate(wish.functions):
        if function.name in seen:
            raise invalid(f"There are two tools named `{function.name}`.", wish.place(place, "name"))
        seen.add(function.name)


def _only(functions: list[tuple[str, FunctionSpec]], names: Sequence[str]) -> list[tuple[str, FunctionSpec]]:
    known = {function.name for _, function in functions}
    for name in names:
        if name not in known:
            raise invalid(f"`tool_choice` names `{name}`, which is not among the `tools`.", "tool_choice")
    return [(param, function) for param, function in functions if function.name in names]


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


def _block(param: str, function: FunctionSpec, form: CallForm) -> JsonBlock:
    return JsonBlock(form.before.format(function.name), _schema(param, function), form.after)


def _schema(param: str, function: FunctionSpec) -> JsonSchema:
    """param: where its parameters stand."""
    schema = {"type": "object", "properties": {}} if function.parameters is None else function.parameters
    if schema.get("type", "object") != "object":
        raise invalid(f"`{param}` must be the schema of an object.", param)
    return JsonSchema(schema_text({"type": "object", **schema}, param), param)


def _guided(
    functions: Sequence[tuple[str, FunctionSpec]], family: str, parsers: ModelParsers, max_calls: int | None
) -> TriggeredBlocks | None:
    """Tools that are not strict may be called with any object."""
    form = CALL_FORMS.get(family)
    if form is None or not form.trigger:
        return None
    blocks = []
    for param, function in functions:
        block = _block(param, function if function.strict else FunctionSpec(name=function.name, parameters={}), form)
        blocks.append(replace(block, before=block.before.removeprefix(form.trigger)))
    marks = () if parsers.reasoning is None else REASONING_PARSERS[parsers.reasoning].markers
    return TriggeredBlocks(tuple(blocks), form.trigger, "tools", marks, max_calls)


def _forced(blocks: Sequence[JsonBlock], form: CallForm, max_calls: int | None) -> JsonBlocks:
    return JsonBlocks(tuple(blocks), "tools", form.start, form.separator, form.end, max_calls)
