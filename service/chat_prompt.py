"""From messages to the prompt's tokens: by the model's template in a thread, by a client's own in a process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from service.call_forms import CALL_FORMS, COMMON_FORM
from service.chat_options import TemplateWish, check_own_template, template_options
from service.errors import invalid
from service.lifespan import Services
from service.messages import RenderedMessage
from service.plain_tools import with_calls_as_text, with_results_as_text, with_tools_as_text
from service.requests import in_thread
from service.sampling import truncated
from service.schemas.common import SamplingFields
from service.templates import TemplateError, TemplateOptions, knows
from service.tokenizer import Tokenizer
from service.tools import ToolUse

_TAIL = 64
"""Tokens of the prompt's end, where a template may have opened the reasoning."""


async def chat_prompt(
    request: SamplingFields,
    wish: TemplateWish,
    messages: Sequence[RenderedMessage],
    tools: ToolUse | None,
    services: Services,
) -> tuple[list[int], str]:
    """Token ids, and the text of the last of them. Raises ApiError (400)."""
    own, tokenizer = wish.own, services.ready_tokenizer()
    check_own_template(own, services.settings)
    source = tokenizer.chat_template if own is None else own
    options = template_options(wish, tools, services.parsers, source)
    form = CALL_FORMS.get(services.parsers.tools or "", CALL_FORMS[COMMON_FORM])
    if not knows(source, "tool_calls"):
        messages = with_calls_as_text(messages, form)
    if not knows(source, "tools"):
        messages = with_results_as_text(messages) if not knows(source, "tool") else messages
        if options.tools:
            messages = with_tools_as_text(messages, options.tools, form)
            options = replace(options, tools=())
    try:
        if own is None:
            token_ids = await in_thread(lambda tokenizer: tokenizer.render_chat(messages, options), services)
        else:
            token_ids = await _by_own_template(own, messages, options, services)
    except TemplateError as error:
        raise invalid(str(error), wish.messages_param if own is None else "chat_template") from None
    token_ids = truncated(token_ids, request)
    return token_ids, _tail(token_ids, tokenizer)


async def _by_own_template(
    template: str, messages: Sequence[RenderedMessage], options: TemplateOptions, services: Services
) -> list[int]:
    call = await in_thread(lambda tokenizer: tokenizer.call_of(template, messages, options), services)
    rendered = await services.templates.render(call)
    return await in_thread(lambda tokenizer: tokenizer.encode_rendered(rendered, call), services)


def _tail(token_ids: Sequence[int], tokenizer: Tokenizer) -> str:
    return b"".join(map(tokenizer.token_bytes, token_ids[-_TAIL:])).decode(errors="replace")
