"""Tools: what a request offers, which of them it wants called, and calls of earlier answers sent back."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

MAX_TOOLS = 128

FunctionName = Annotated[str, Meta(pattern="^[a-zA-Z0-9_-]{1,64}$")]


class FunctionSpec(Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """parameters: a JSON schema of an object; none takes no arguments."""

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class FunctionTool(Struct, tag_field="type", tag="function", kw_only=True, frozen=True, forbid_unknown_fields=True):
    function: FunctionSpec


Tools = Annotated[list[FunctionTool], Meta(max_length=MAX_TOOLS)]


class FunctionRef(Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    name: FunctionName


class NamedTool(Struct, tag_field="type", tag="function", kw_only=True, frozen=True, forbid_unknown_fields=True):
    function: FunctionRef


class ToolSubset(Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Meta(min_length=1, max_length=MAX_TOOLS)]


class AllowedTools(
    Struct, tag_field="type", tag="allowed_tools", kw_only=True, frozen=True, forbid_unknown_fields=True
):
    allowed_tools: ToolSubset


ToolChoice = Literal["none", "auto", "required"] | NamedTool | AllowedTools


class CalledFunction(Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """arguments: JSON text, an object. parsed_arguments: what openai-python made of them for its user."""

    name: str
    arguments: str
    parsed_arguments: Any = None


class PastCall(Struct, tag_field="type", tag="function", kw_only=True, frozen=True, forbid_unknown_fields=True):
    """index: what openai-python keeps of a stream's deltas."""

    id: str
    index: int | None = None
    function: CalledFunction
