"""Text to tokens and back as a service of its own, by the code that prompts of generation go through."""

from __future__ import annotations

import msgspec

from engine.api import TokenPrompt
from service.chat_job import check_num_messages
from service.chat_options import template_wish
from service.chat_prompt import chat_prompt
from service.chat_request import prepare_chat, tool_wish
from service.errors import invalid, model_not_found
from service.job import Arrival
from service.lifespan import Services
from service.messages import render_messages
from service.requests import in_thread
from service.sampling import given
from service.schemas.chat import ChatCompletionRequest, Message
from service.schemas.tokenize import (
    CHAT_ONLY,
    Detokenized,
    DetokenizeRequest,
    RenderedChat,
    Tokenized,
    TokenizeRequest,
)
from service.tokenizer import Tokenizer
from service.tools import tool_use


async def tokenized(request: TokenizeRequest, services: Services, _: Arrival) -> bytes:
    """A `Tokenized` as JSON. Raises ApiError (4xx), EngineNotReady and EngineDead."""
    _check_model(request.model, services)
    if (prompt := request.prompt) is not None:
        _check_alone(request)
        add_special_tokens = given(request.add_special_tokens, True)
        token_ids = await in_thread(
            lambda tokenizer: tokenizer.encode(prompt, add_special_tokens=add_special_tokens), services
        )
    elif request.messages is not None:
        token_ids = await _chat_token_ids(request, request.messages, services)
    else:
        raise invalid("Missing required parameter: `prompt` or `messages`.", "prompt", "missing_required_parameter")
    max_model_len = services.engine.info.max_model_len

    def encode(tokenizer: Tokenizer) -> bytes:
        texts = [_text([token_id], tokenizer) for token_id in token_ids] if request.return_token_strs else None
        return msgspec.json.encode(
            Tokenized(count=len(token_ids), max_model_len=max_model_len, tokens=token_ids, token_strs=texts)
        )

    return await in_thread(encode, services)


async def detokenized(request: DetokenizeRequest, services: Services, _: Arrival) -> bytes:
    """A `Detokenized` as JSON. Raises as `tokenized` does."""
    _check_model(request.model, services)
    vocab_size = max(services.ready_tokenizer().vocab_size, services.engine.info.vocab_size)

    def decode(tokenizer: Tokenizer) -> bytes:
        if (highest := max(request.tokens, default=0)) >= vocab_size:
            raise invalid(f"Token id {highest} is outside of 0 to {vocab_size - 1}.", "tokens")
        text = _text(request.tokens, tokenizer)
        return msgspec.json.encode(
            Detokenized(prompt=text.removeprefix(" ") if tokenizer.strips_leading_space else text)
        )

    return await in_thread(decode, services)


async def rendered_chat(request: ChatCompletionRequest, services: Services, arrival: Arrival) -> bytes:
    """A `RenderedChat` as JSON: the prompt of the job that the same request would be. Raises as `prepare_chat` does."""
    job = await prepare_chat(request, services, arrival)
    prompt = job.batch[0].prompt
    assert isinstance(prompt, TokenPrompt)
    token_ids, max_model_len = list(prompt.token_ids), services.engine.info.max_model_len

    def encode(tokenizer: Tokenizer) -> bytes:
        return msgspec.json.encode(
            RenderedChat(
                model=job.model,
                prompt=_text(token_ids, tokenizer),
                token_ids=token_ids,
                count=len(token_ids),
                max_model_len=max_model_len,
            )
        )

    return await in_thread(encode, services)


def _check_model(model: str | None, services: Services) -> None:
    if model is not None and model != services.settings.served_model_name:
        raise model_not_found(model)


def _check_alone(request: TokenizeRequest) -> None:
    for name in ("messages", *CHAT_ONLY):
        if getattr(request, name) is not None:
            raise invalid(f"`{name}` cannot be had with `prompt`.", name)


async def _chat_token_ids(request: TokenizeRequest, messages: list[Message], services: Services) -> list[int]:
    if request.add_special_tokens:
        message = "Unsupported parameter: `add_special_tokens` with `messages`: the chat template writes its own."
        raise invalid(message, "add_special_tokens", "unsupported_parameter")
    more = {name: getattr(request, name) for name in CHAT_ONLY}
    chat = ChatCompletionRequest(model=services.settings.served_model_name, messages=messages, **more)
    rendered = render_messages(messages)
    check_num_messages(len(rendered), "messages", services)
    tools = tool_use(tool_wish(chat), services.parsers)
    token_ids, _ = await chat_prompt(chat, template_wish(chat), rendered, tools, services)
    return token_ids


def _text(token_ids: list[int], tokenizer: Tokenizer) -> str:
    return b"".join(map(tokenizer.token_bytes, token_ids)).decode(errors="replace")
