"""What of a request goes on, as text, to an engine that has the tokenizer, the chat template and the parsers itself.

Extensions go on only where the client has sent them, so that a plain request suits any OpenAI-compatible server.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, cast

import msgspec

from engine.api import ChatPrompt, Constraint, JsonObject, JsonSchema, Prompt, TextPrompt, TokenPrompt
from service.chat_options import TemplateWish, check_own_template
from service.errors import ApiError, invalid
from service.job import Echo
from service.messages import RenderedMessage
from service.requests import Plan
from service.sampling import show_rules, stop_strings, text_rules
from service.schemas.common import SamplingFields
from service.schemas.completions import CompletionRequest
from service.settings import Settings
from service.structured import field_of
from service.tools import ToolUse

if TYPE_CHECKING:
    from service.auth import Caller
    from service.chat_job import Turn

PASSED = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "min_tokens",
    "stop_token_ids",
    "ignore_eos",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "logit_bias",
    "allowed_token_ids",
    "bad_words",
    "skip_special_tokens",
    "truncate_prompt_tokens",
)
"""As they came: the choices' parameters do not tell a default from a wish for it."""


def passed_fields(request: SamplingFields, caller: Caller) -> dict[str, object]:
    """Of both endpoints. Raises ApiError (400)."""
    if request.return_token_ids:
        raise _needs_tokens("return_token_ids")
    sent = {name: getattr(request, name) for name in PASSED if getattr(request, name) is not None}
    if request.structured_outputs is not None:
        outputs = msgspec.to_builtins(request.structured_outputs)
        sent["structured_outputs"] = {name: value for name, value in outputs.items() if value is not None}
    if request.stop and not request.include_stop_str_in_output:  # what ends a text can be shown only where it is seen
        sent["stop"] = list(stop_strings(request))
    if request.cache_salt is not None:
        sent["cache_salt"] = hashlib.sha256(f"{caller.owner}\0{request.cache_salt}".encode()).hexdigest()
    return sent


def passed_chat(request: SamplingFields, turn: Turn, settings: Settings, caller: Caller) -> tuple[Plan, Prompt]:
    """Raises ApiError (400) naming the field."""
    wish, tools = turn.template, turn.tools
    if turn.truncates:
        raise _needs_tokens("truncation")
    check_own_template(wish.own, settings)
    sent = passed_fields(request, caller) | _template_fields(wish) | _format_fields(turn.text)
    if tools is not None:
        sent |= _tool_fields(tools)
    if turn.max_tokens is not None and turn.max_tokens_param == "max_completion_tokens":
        sent["max_completion_tokens"] = turn.max_tokens
    show = show_rules(request, turn.logprobs)
    plan = Plan(
        kind=turn.kind,
        id_prefix=turn.id_prefix,
        prompt_param=wish.messages_param,
        max_tokens=turn.max_tokens,
        max_tokens_param=turn.max_tokens_param,
        n=turn.n,
        fan_out=turn.fan_out,
        show=replace(show, may_call=tools is not None, named_call=tools is not None and tools.named),
        text=text_rules(request, continues=wish.continues),
        constraint=None,
        sent=sent,
        own_names=_own_names(turn),
    )
    return plan, ChatPrompt(tuple(map(_message, turn.messages)))


def _own_names(turn: Turn) -> dict[str, str]:
    """Where the server has a chat's names for the fields of another endpoint."""
    if turn.kind == "chat":
        return {}
    own_format = {} if turn.text is None else {"response_format": turn.text.param}
    return own_format | {
        "messages": turn.template.messages_param,
        "max_tokens": turn.max_tokens_param,
        "reasoning_effort": turn.template.effort_param,
    }


def passed_prompt(prompt: str | list[int]) -> Prompt:
    """Token ids are the client's own: they go on like any other prompt."""
    return TextPrompt(prompt) if isinstance(prompt, str) else TokenPrompt(tuple(prompt))


def passed_echo(request: CompletionRequest, prompts: Sequence[str | list[int]]) -> tuple[Echo, ...]:
    """Raises ApiError (400) where nobody here knows the text that is to be repeated."""
    texts = [prompt for prompt in prompts if isinstance(prompt, str)] if request.echo else []
    if request.echo and len(texts) < len(prompts):
        raise _needs_tokens("echo")
    return tuple(map(Echo, texts))


def _needs_tokens(param: str) -> ApiError:
    message = f"Unsupported parameter: `{param}`: this server passes requests on as text, and has no tokenizer."
    return invalid(message, param, "unsupported_parameter")


def _message(message: RenderedMessage) -> Mapping[str, object]:
    """As OpenAI writes it: arguments of calls are text."""
    calls = cast("Sequence[Mapping[str, Mapping[str, object]]]", message.get("tool_calls", ()))
    return {**message, "tool_calls": [_call(call) for call in calls]} if calls else message


def _call(call: Mapping[str, Mapping[str, object]]) -> dict[str, object]:
    function = call["function"]
    arguments = json.dumps(function["arguments"], ensure_ascii=False)
    return {**call, "function": {"name": function["name"], "arguments": arguments}}


def _template_fields(wish: TemplateWish) -> dict[str, object]:
    variables = {} if wish.variables is None else msgspec.to_builtins(wish.variables)
    given = {
        "chat_template": wish.own,
        "chat_template_kwargs": {name: value for name, value in variables.items() if value is not None} or None,
        "reasoning_effort": wish.effort,
        "add_generation_prompt": False if wish.continues else wish.generation_prompt,
        "continue_final_message": wish.continues or None,
    }
    return {name: value for name, value in given.items() if value is not None}


def _format_fields(constraint: Constraint | None) -> dict[str, object]:
    """Of the endpoint's own field for it; those of extensions go on as they came."""
    match constraint:
        case JsonObject(param) if field_of(param) != "structured_outputs":
            return {"response_format": {"type": "json_object"}}
        case JsonSchema(schema, param) if field_of(param) != "structured_outputs":
            named = {"name": "answer", "schema": msgspec.Raw(schema.encode()), "strict": True}
            return {"response_format": {"type": "json_schema", "json_schema": named}}
    return {}


def _tool_fields(tools: ToolUse) -> dict[str, object]:
    wish = tools.wish
    shown = [
        tool if function.strict is None else _with_strict(tool, function.strict)
        for tool, function in zip(tools.shown, wish.functions, strict=True)
    ]
    fields: dict[str, object] = {"tools": shown}
    if wish.choice is not None:
        fields["tool_choice"] = msgspec.to_builtins(wish.choice)
    if not wish.parallel:
        fields["parallel_tool_calls"] = False
    return fields


def _with_strict(tool: Mapping[str, object], strict: bool) -> dict[str, object]:
    function = tool["function"]
    assert isinstance(function, dict)
    return {**tool, "function": {**function, "strict": strict}}
