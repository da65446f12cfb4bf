"""What a chat request tells the template beside its messages: tools, whose turn it is, the template's own variables."""

from __future__ import annotations

from collections.abc import Mapping

from service.errors import ApiError, invalid
from service.model_parsers import ModelParsers
from service.sampling import given
from service.schemas.chat import AssistantMessage, ChatCompletionRequest
from service.templates import TemplateOptions, knows
from service.tools import ToolUse


def template_options(
    request: ChatCompletionRequest, tools: ToolUse | None, parsers: ModelParsers, template: str
) -> TemplateOptions:
    """template: its source. Raises ApiError (400) naming the field."""
    continues = given(request.continue_final_message, False)
    if continues:
        _check_last(request)
    return TemplateOptions(
        tools=() if tools is None else tools.shown,
        generation_prompt=given(request.add_generation_prompt, not continues),
        continues_last=continues,
        variables={**_effort(request.reasoning_effort, parsers, template), **_variables(request, template)},
    )


def _check_last(request: ChatCompletionRequest) -> None:
    if request.add_generation_prompt:
        message = "`continue_final_message` and `add_generation_prompt` exclude each other."
        raise invalid(message, "continue_final_message")
    last = request.messages[-1]
    if not isinstance(last, AssistantMessage) or not last.content or last.tool_calls or last.function_call:
        message = "`continue_final_message` needs an assistant's message with text, and no calls, at the end."
        raise invalid(message, "continue_final_message")


def _variables(request: ChatCompletionRequest, template: str) -> Mapping[str, object]:
    asked = request.chat_template_kwargs
    if asked is None:
        return {}
    variables = {name: getattr(asked, name) for name in asked.__struct_fields__ if getattr(asked, name) is not None}
    for name in variables:
        if not knows(template, name):
            raise _unknown_to_template(f"chat_template_kwargs.{name}", name)
    return variables


def _effort(effort: str | None, parsers: ModelParsers, template: str) -> Mapping[str, object]:
    if effort is None:
        return {}
    if knows(template, "reasoning_effort"):
        return {"reasoning_effort": effort}
    if effort == "none" and knows(template, "enable_thinking"):
        return {"enable_thinking": False}
    if effort == "none" and parsers.reasoning is None:
        return {}  # as it is: the model does not reason
    raise _unknown_to_template("reasoning_effort", "reasoning_effort")


def _unknown_to_template(param: str, name: str) -> ApiError:
    message = f"Unsupported parameter: `{param}`: the chat template knows no `{name}`."
    return invalid(message, param, "unsupported_parameter")
