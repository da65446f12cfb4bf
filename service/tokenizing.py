"""Text to tokens and back as a service of its own, by the code that prompts of generation go through."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import anyio
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
from service.tokenizer import Encoder
from service.tools import tool_use

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Served:
    """One of the models. max_model_len: tokens of its input. vocab_size: ids that it or its tokenizer knows."""

    tokenizer: Encoder
    max_model_len: int
    vocab_size: int
    has_chats: bool


async def tokenized(request: TokenizeRequest, services: Services, _: Arrival) -> bytes:
    """A `Tokenized` as JSON. Raises ApiError (4xx), EngineNotReady and EngineDead."""
    model = _served(request.model, services)
    if (prompt := request.prompt) is not None:
        _check_alone(request)
        with_special = given(request.add_special_tokens, True)
        token_ids = await _in_thread(lambda: model.tokenizer.encode(prompt, add_special_tokens=with_special), services)
    elif request.messages is not None:
        if not model.has_chats:
            raise invalid(f"The model `{request.model}` makes embeddings; it has no chats.", "messages")
        token_ids = await _chat_token_ids(request, request.messages, services)
    else:
        raise invalid("Missing required parameter: `prompt` or `messages`.", "prompt", "missing_required_parameter")

    def encode() -> bytes:
        pieces = list(map(model.tokenizer.piece, token_ids)) if request.return_token_strs else None
        return msgspec.json.encode(
            Tokenized(count=len(token_ids), max_model_len=model.max_model_len, tokens=token_ids, token_strs=pieces)
        )

    return await _in_thread(encode, services)


async def detokenized(request: DetokenizeRequest, services: Services, _: Arrival) -> bytes:
    """A `Detokenized` as JSON. Raises as `tokenized` does."""
    model = _served(request.model, services)

    def decode() -> bytes:
        if (highest := max(request.tokens, default=0)) >= model.vocab_size:
            raise invalid(f"Token id {highest} is outside of 0 to {model.vocab_size - 1}.", "tokens")
        return msgspec.json.encode(Detokenized(prompt=model.tokenizer.decode(request.tokens)))

    return await _in_thread(decode, services)


async def rendered_chat(request: ChatCompletionRequest, services: Services, arrival: Arrival) -> bytes:
    """A `RenderedChat` as JSON: the prompt of the job that the same request would be. Raises as `prepare_chat` does."""
    _check_tokenizer(services)
    job = await prepare_chat(request, services, arrival)
    prompt, tokenizer = job.batch[0].prompt, services.ready_tokenizer()
    assert isinstance(prompt, TokenPrompt)
    token_ids, max_model_len = list(prompt.token_ids), services.engine.info.max_model_len

    def encode() -> bytes:
        return msgspec.json.encode(
            RenderedChat(
                model=job.model,
                prompt=tokenizer.decode(token_ids),
                token_ids=token_ids,
                count=len(token_ids),
                max_model_len=max_model_len,
            )
        )

    return await _in_thread(encode, services)


async def _in_thread(work: Callable[[], T], services: Services) -> T:
    return await anyio.to_thread.run_sync(work, limiter=services.tokenizer_limiter)


def _check_tokenizer(services: Services) -> None:
    if services.passes_text:
        raise invalid("This server passes requests on as text, and has no tokenizer.", code="unsupported")


def _served(name: str | None, services: Services) -> _Served:
    """The model that generates where none is named. Raises ApiError (404), EngineNotReady and EngineDead."""
    _check_tokenizer(services)
    settings, info = services.settings, services.engine.info
    embedding = info.embedding if name == settings.served_embedding_model_name else None
    if embedding is None and name not in (None, services.model_name):
        raise model_not_found(str(name))
    tokenizer = services.ready_tokenizer()
    if embedding is None:
        return _Served(tokenizer, info.max_model_len, max(tokenizer.vocab_size, info.vocab_size), has_chats=True)
    encoder = services.embedding_tokenizer
    assert encoder is not None
    return _Served(encoder, embedding.max_model_len, max(encoder.vocab_size, embedding.vocab_size), has_chats=False)


def _check_alone(request: TokenizeRequest) -> None:
    for name in ("messages", *CHAT_ONLY):
        if getattr(request, name) is not None:
            raise invalid(f"`{name}` cannot be had with `prompt`.", name)


async def _chat_token_ids(request: TokenizeRequest, messages: list[Message], services: Services) -> list[int]:
    if request.add_special_tokens:
        message = "Unsupported parameter: `add_special_tokens` with `messages`: the chat template writes its own."
        raise invalid(message, "add_special_tokens", "unsupported_parameter")
    more = {name: getattr(request, name) for name in CHAT_ONLY}
    chat = ChatCompletionRequest(model=services.model_name, messages=messages, **more)
    rendered = render_messages(messages)
    check_num_messages(len(rendered), "messages", services)
    tools = tool_use(tool_wish(chat), services.parsers)
    token_ids, _ = await chat_prompt(chat, template_wish(chat), rendered, tools, services)
    return token_ids
