"""What a chat request tells the template beside its messages: tools, whose turn it is, the template's own variables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from service.errors import ApiError, invalid
from service.model_parsers import ModelParsers
from service.sampling import given
from service.schemas.chat import AssistantMessage, ChatCompletionRequest, ChatTemplateKwargs
from service.settings import Settings
from service.templates import TemplateOptions, knows
from service.tools import ToolUse


@dataclass(frozen=True, slots=True)
class TemplateWish:
    """What a request says of the chat template.

    own: a client's own source, instead of the model's. variables: of the template. effort: how much the model is to
    reason. generation_prompt: None for what fits. continues: the answer goes on with the last message. *_param: the
    fields to blame, as the client named them.
    """

    messages_param: Literal["messages", "input"]
    effort_param: str
    own: str | None = None
    variables: ChatTemplateKwargs | None = None
    effort: str | None = None
    generation_prompt: bool | None = None
    continues: bool = False


def template_wish(request: ChatCompletionRequest) -> TemplateWish:
    """Raises ApiError (400) naming the field."""
    continues = given(request.continue_final_message, False)
    if continues:
        _check_last(request)
    return TemplateWish(
        "messages",
        "reasoning_effort",
        own=request.chat_template,
        variables=request.chat_template_kwargs,
        effort=request.reasoning_effort,
        generation_prompt=request.add_generation_prompt,
        continues=continues,
    )


def check_own_template(own: str | None, settings: Settings) -> None:
    """Raises ApiError (400) where the operator does not take templates from clients."""
    if own is not None and not settings.trust_request_chat_template:
        message = "Unsupported parameter: `chat_template`: the operator of this server has not allowed it."
        raise invalid(message, "chat_template", "unsupported_parameter")


def template_options(
    wish: TemplateWish, tools: ToolUse | None, parsers: ModelParsers, template: str
) -> TemplateOptions:
    """template: its source. Raises ApiError (400) naming the field."""
    return TemplateOptions(
        tools=() if tools is None else tools.shown,
        generation_prompt=given(wish.generation_prompt, not wish.continues),
        continues_last=wish.continues,
        variables={**_effort(wish, parsers, template), **_variables(wish.variables, template)},
    )


def _check_last(request: ChatCompletionRequest) -> None:
    if request.add_generation_prompt:
        message = "`continue_final_message` and `add_generation_prompt` exclude each other."
        raise invalid(message, "continue_final_message")
    last = request.messages[-1]
    if not isinstance(last, AssistantMessage) or not last.content or last.tool_calls or last.function_call:
        message = "`continue_final_message` needs an assistant's message with text, and no calls, at the end."
        raise invalid(message, "continue_final_message")


def _variables(asked: ChatTemplateKwargs | None, template: str) -> Mapping[str, object]:
    if asked is None:
        return {}
    variables = {name: getattr(asked, name) for name in asked.__struct_fields__ if getattr(asked, name) is not None}
    for name in variables:
        if not knows(template, name):
            raise _unknown_to_template(f"chat_template_kwargs.{name}", name)
    return variables


def _effort(wish: TemplateWish, parsers: ModelParsers, template: str) -> Mapping[str, object]:
    effort = wish.effort
    if effort is None:
        return {}
    if knows(template, "reasoning_effort"):
        return {"reasoning_effort": effort}
    if effort == "none" and knows(template, "enable_thinking"):
        return {"enable_thinking": False}
    if effort == "none" and parsers.reasoning is None:
        return {}  # as it is: the model does not reason
    raise _unknown_to_template(wish.effort_param, "reasoning_effort")


def _unknown_to_template(param: str, name: str) -> ApiError:
    message = f"Unsupported parameter: `{param}`: the chat template knows no `{name}`."
    return invalid(message, param, "unsupported_parameter")
