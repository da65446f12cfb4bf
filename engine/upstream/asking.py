"""One choice as the JSON body of a request with n=1. What nobody asked for is left to the server's defaults."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields

import msgspec

from engine.api import ChatPrompt, Request, SamplingParams, TextPrompt, TokenPrompt

SEEDS = 2**63
"""Servers read a seed as a signed number of 64 bits."""

_DEFAULTS = SamplingParams(seed=0)
_SAME_NAMES = {field.name for field in fields(SamplingParams)} - {"seed", "logit_bias", "logprobs", "constraint"}


def path_of(request: Request) -> str:
    return "/v1/chat/completions" if isinstance(request.prompt, ChatPrompt) else "/v1/completions"


def body_of(request: Request, params: SamplingParams, model: str, max_model_len: int) -> bytes:
    """max_model_len: 0 where the server does not say."""
    body: dict[str, object] = {"model": model, **_prompt(request), **_fields(params, request), **request.sent}
    if request.priority and "priority" not in body:
        body["priority"] = request.priority
    if "max_completion_tokens" in request.sent:
        body.pop("max_tokens", None)
    if isinstance(request.prompt, TokenPrompt) and params.max_tokens is None and max_model_len:
        body["max_tokens"] = max(1, max_model_len - len(request.prompt.token_ids))
    body |= {"seed": params.seed % SEEDS, "stream": True, "stream_options": {"include_usage": True}}
    return msgspec.json.encode(body)


def _prompt(request: Request) -> Mapping[str, object]:
    match request.prompt:
        case ChatPrompt(messages):
            return {"messages": messages}
        case TextPrompt(text):
            return {"prompt": text}
        case TokenPrompt(token_ids):
            return {"prompt": token_ids}


def _fields(params: SamplingParams, request: Request) -> dict[str, object]:
    """What differs from the defaults; vLLM's extensions have our names."""
    body: dict[str, object] = {}
    for name in _SAME_NAMES:
        value = getattr(params, name)
        if value != getattr(_DEFAULTS, name):
            body[name] = value
    if params.logit_bias:
        body["logit_bias"] = {str(token_id): bias for token_id, bias in params.logit_bias}
    if params.logprobs is not None:
        num_best = max(1, params.logprobs)  # some servers take 0 for none at all
        is_chat = isinstance(request.prompt, ChatPrompt)
        body |= {"logprobs": True, "top_logprobs": num_best} if is_chat else {"logprobs": num_best}
    return body


def prefix_key(request: Request) -> str:
    """What prompts that begin alike have in common: what the first user says, and all before it; up to a bound."""
    match request.prompt:
        case ChatPrompt(messages):
            first_user = next((place for place, said in enumerate(messages) if said.get("role") == "user"), 0)
            beginning = msgspec.json.encode(messages[: first_user + 1]).decode()
        case TextPrompt(text):
            beginning = text
        case TokenPrompt(token_ids):
            return repr(token_ids[:PREFIX_TOKENS])
    return beginning[:PREFIX_CHARACTERS]


PREFIX_TOKENS = 256
PREFIX_CHARACTERS = 4 * PREFIX_TOKENS
