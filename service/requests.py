"""From a decoded request to an engine batch: cross-field checks, chat template, tokens. 4xx ends here."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, TypeVar

import anyio

from engine import api
from service.auth import ANYONE, Caller
from service.choice_text import TextRules
from service.errors import CONTEXT_LENGTH_EXCEEDED, ApiError, invalid, model_not_found
from service.fan_out import FanOutRules, fan_out_rules
from service.job import Arrival, GenerationJob, ShowRules
from service.lifespan import Services
from service.messages import render_messages
from service.schemas.chat import ChatCompletionRequest
from service.schemas.common import SamplingFields
from service.schemas.completions import CompletionRequest
from service.schemas.fields import CHAT_FIELDS, COMPLETION_FIELDS, FieldRule, Use
from service.tokenizer import TemplateError, Tokenizer

T = TypeVar("T")

MAX_STOP_BYTES = 16 * 1024
DEFAULT_COMPLETION_TOKENS = 16
GREEDY_BELOW = 1e-5
"""Dividing logits by less than this overflows; the draw is greedy long before."""


@dataclass(frozen=True, slots=True)
class _Plan:
    """What the two endpoints differ in. *_param: the fields to blame, as the client named them."""

    kind: Literal["chat", "completion"]
    id_prefix: str
    prompt_param: Literal["messages", "prompt"]
    max_tokens: int | None
    max_tokens_param: str
    fan_out: FanOutRules
    logprobs: int | None


async def prepare_chat(request: ChatCompletionRequest, services: Services, arrival: Arrival) -> GenerationJob:
    """Raises ApiError (4xx), EngineNotReady and EngineDead."""
    _check_common(request, services, CHAT_FIELDS)
    max_tokens, max_tokens_param = _chat_max_tokens(request)
    messages = render_messages(request.messages)
    _check_sampling(request, max_tokens, num_prompts=1, services=services)
    fan_out = _fan_out(request, services, arrival.caller)
    _check_num_messages(len(messages), services)

    def encode(tokenizer: Tokenizer) -> list[list[int]]:
        try:
            return [tokenizer.render_chat(messages)]
        except TemplateError as error:
            raise invalid(str(error), "messages") from None

    plan = _Plan("chat", "chatcmpl-", "messages", max_tokens, max_tokens_param, fan_out, _chat_logprobs(request))
    return _job(request, plan, await _tokens(encode, services), services, arrival)


async def prepare_completion(request: CompletionRequest, services: Services, arrival: Arrival) -> GenerationJob:
    """Raises ApiError (4xx), EngineNotReady and EngineDead."""
    _check_common(request, services, COMPLETION_FIELDS)
    max_tokens = _given(request.max_tokens, DEFAULT_COMPLETION_TOKENS)
    prompts = _prompts(request.prompt)
    _check_sampling(request, max_tokens, num_prompts=len(prompts), services=services)
    fan_out = _fan_out(request, services, arrival.caller)

    def encode(tokenizer: Tokenizer) -> list[list[int]]:
        return [
            tokenizer.encode(prompt, add_special_tokens=True) if isinstance(prompt, str) else prompt
            for prompt in prompts
        ]

    plan = _Plan("completion", "cmpl-", "prompt", max_tokens, "max_tokens", fan_out, request.logprobs)
    return _job(request, plan, await _tokens(encode, services), services, arrival)


def _given(value: T | None, default: T) -> T:
    return default if value is None else value


def _check_common(request: SamplingFields, services: Services, fields: Mapping[str, FieldRule]) -> None:
    if request.model != services.settings.served_model_name:
        raise model_not_found(request.model)
    for name, rule in fields.items():
        if rule.use is Use.REFUSED and "[" not in name:
            _refuse(name, getattr(request, name), rule, request)


def _refuse(name: str, value: object, rule: FieldRule, request: SamplingFields) -> None:
    # best_of only picks among choices that are not returned: with as many as n there are none
    if value is None or value in rule.neutral or (name == "best_of" and value == _given(request.n, 1)):
        return
    accepted = ", ".join(json.dumps(neutral) for neutral in rule.neutral)
    hint = f"; accepted: {accepted}" if accepted else ""
    raise invalid(f"Unsupported parameter: `{name}`: {rule.note}{hint}.", name, "unsupported_parameter")


def _chat_max_tokens(request: ChatCompletionRequest) -> tuple[int | None, str]:
    newer, older = request.max_completion_tokens, request.max_tokens
    if newer is None:
        return older, "max_tokens"
    if older is not None and older != newer:
        raise invalid(
            f"`max_completion_tokens` ({newer}) and `max_tokens` ({older}) are two names of one limit.",
            "max_completion_tokens",
        )
    return newer, "max_completion_tokens"


def _chat_logprobs(request: ChatCompletionRequest) -> int | None:
    if request.logprobs:
        return _given(request.top_logprobs, 0)
    if request.top_logprobs is not None:
        raise invalid("`top_logprobs` is only allowed with `logprobs`.", "top_logprobs")
    return None


def _check_sampling(request: SamplingFields, max_tokens: int | None, num_prompts: int, services: Services) -> None:
    """What spans fields or depends on settings, as far as it needs no model."""
    settings, n = services.settings, _given(request.n, 1)
    if n > settings.max_n:
        raise invalid(f"`n` is {n}, more than this server's limit of {settings.max_n}.", "n")
    if n * num_prompts > settings.max_choices:
        many = f"{num_prompts} prompts with n={n} make {n * num_prompts} choices"
        message = f"{many}, more than this server admits at once ({settings.max_choices})."
        raise invalid(message, "n" if n > 1 else "prompt")
    if request.stream_options is not None and not request.stream:
        raise invalid("`stream_options` is only allowed with `stream`.", "stream_options")
    if max_tokens is not None and _given(request.min_tokens, 0) > max_tokens:
        raise invalid(f"`min_tokens` ({request.min_tokens}) exceeds `max_tokens` ({max_tokens}).", "min_tokens")
    if sum(len(stop.encode()) for stop in _stop(request)) > MAX_STOP_BYTES:
        raise invalid(f"`stop` has more than {MAX_STOP_BYTES} bytes.", "stop")


def _fan_out(request: SamplingFields, services: Services, caller: Caller) -> FanOutRules:
    n = _given(request.n, 1)
    services.quotas.check_n(caller, n)
    return fan_out_rules(request.fan_out, n, stream=bool(request.stream))


def _stop(request: SamplingFields) -> tuple[str, ...]:
    stop = _given(request.stop, [])
    return (stop,) if isinstance(stop, str) else tuple(stop)


def _prompts(prompt: str | list[str | int | list[int]]) -> list[str | list[int]]:
    """The list of prompts that any of the four forms stands for."""
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise invalid("`prompt` is an empty array.", "prompt", "empty_array")
    token_ids = [item for item in prompt if isinstance(item, int)]
    if len(token_ids) == len(prompt):
        return [token_ids]
    prompts = [item for item in prompt if not isinstance(item, int)]
    if len(prompts) < len(prompt) or len({type(item) for item in prompts}) > 1:
        raise invalid("`prompt` mixes texts, token ids and lists; give one kind.", "prompt")
    return prompts


def _check_num_messages(num_messages: int, services: Services) -> None:
    """A message is a token at least: a hundred thousand of them need no rendering to be too many."""
    services.check_ready()
    limit = services.engine.info.max_model_len
    if num_messages > limit:
        message = f"This model's context length is {limit} tokens. However, {num_messages} messages were sent."
        raise invalid(message, "messages", CONTEXT_LENGTH_EXCEEDED)


async def _tokens(encode: Callable[[Tokenizer], list[list[int]]], services: Services) -> list[list[int]]:
    """Off the event loop: long texts take seconds."""
    tokenizer = services.ready_tokenizer()
    return await anyio.to_thread.run_sync(encode, tokenizer, limiter=services.tokenizer_limiter)


def _job(
    request: SamplingFields, plan: _Plan, prompts: list[list[int]], services: Services, arrival: Arrival
) -> GenerationJob:
    info, caller = services.engine.info, arrival.caller
    for token_ids in prompts:
        _check_prompt(token_ids, plan, info)
        _check_context(len(token_ids), request, plan, info.max_model_len)
    choices = _choices(request, plan, info.vocab_size)
    engine_request = partial(
        api.Request,
        request.model,
        choices=choices,
        priority=_priority(request.priority, caller),
        owner=caller.owner,
        cache_namespace=caller.owner,
    )
    return GenerationJob(
        kind=plan.kind,
        response_id=plan.id_prefix + secrets.token_hex(16),
        created=int(time.time()),
        model=request.model,
        batch=tuple(engine_request(api.TokenPrompt(tuple(ids))) for ids in prompts),
        n=len(choices),
        text=TextRules(stop=_stop(request), continues=plan.kind == "completion"),
        stream=bool(request.stream),
        include_usage=request.stream_options is not None and bool(request.stream_options.include_usage),
        request_id=_given(request.request_id, arrival.request_id),
        show=ShowRules(logprobs=plan.logprobs),
        fan_out=plan.fan_out,
        caller=caller,
        received_at=arrival.received_at,
        timeout=arrival.timeout_for(request, services.settings),
    )


def _priority(wanted: int | None, caller: Caller) -> int:
    """A key bounds how far its requests can push ahead; where there are no keys nothing does."""
    if caller is ANYONE:
        return _given(wanted, 0)
    return max(_given(wanted, 0), _given(caller.limits.priority, 0))


def _check_prompt(token_ids: Sequence[int], plan: _Plan, info: api.EngineInfo) -> None:
    if not token_ids:
        raise invalid(f"`{plan.prompt_param}` is empty: it has no tokens.", plan.prompt_param)
    if (low := min(token_ids)) < 0 or max(token_ids) >= info.vocab_size:
        wrong = low if low < 0 else max(token_ids)
        raise invalid(f"Token id {wrong} is outside of 0 to {info.vocab_size - 1}.", plan.prompt_param)


def _check_context(num_tokens: int, request: SamplingFields, plan: _Plan, limit: int) -> None:
    wanted = _given(plan.max_tokens, max(1, _given(request.min_tokens, 0)))
    if num_tokens + wanted <= limit:
        return
    param: str = "min_tokens" if plan.max_tokens is None else plan.max_tokens_param
    if num_tokens >= limit:
        param = plan.prompt_param
    message = (
        f"This model's context length is {limit} tokens. However, {num_tokens + wanted} tokens were requested "
        f"({num_tokens} in the prompt, {wanted} for the answer)."
    )
    raise invalid(message, param, CONTEXT_LENGTH_EXCEEDED)


def _choices(request: SamplingFields, plan: _Plan, vocab_size: int) -> tuple[api.SamplingParams, ...]:
    """Choice i draws from seed + i; without a seed all start from one fresh base."""
    stop_token_ids = tuple(_given(request.stop_token_ids, []))
    for token_id in stop_token_ids:
        if token_id >= vocab_size:
            raise _not_a_token(str(token_id), vocab_size, "stop_token_ids")
    seed = _given(request.seed, secrets.randbits(63))
    temperature = _given(request.temperature, 1.0)
    logit_bias = _logit_bias(_given(request.logit_bias, {}), vocab_size)
    return tuple(
        api.SamplingParams(
            seed=(seed + index) % 2**64,
            temperature=temperature if temperature >= GREEDY_BELOW else 0.0,
            top_p=_given(request.top_p, 1.0),
            top_k=max(0, _given(request.top_k, 0)),
            min_p=_given(request.min_p, 0.0),
            max_tokens=plan.max_tokens,
            min_tokens=_given(request.min_tokens, 0),
            stop_token_ids=stop_token_ids,
            ignore_eos=_given(request.ignore_eos, False),
            frequency_penalty=_given(request.frequency_penalty, 0.0),
            presence_penalty=_given(request.presence_penalty, 0.0),
            repetition_penalty=_given(request.repetition_penalty, 1.0),
            logit_bias=logit_bias,
            logprobs=0 if plan.logprobs is None and plan.fan_out.needs_logprobs else plan.logprobs,
        )
        for index in range(_given(request.n, 1))
    )


def _logit_bias(bias: Mapping[str, float], vocab_size: int) -> tuple[tuple[int, float], ...]:
    pairs = []
    for key, value in bias.items():
        # one spelling for each id, so that none can be given twice
        if not (key.isascii() and key.isdecimal() and len(key) < 10 and str(int(key)) == key and int(key) < vocab_size):
            raise _not_a_token(key, vocab_size, "logit_bias")
        pairs.append((int(key), value))
    return tuple(pairs)


def _not_a_token(spelling: str, vocab_size: int, param: str) -> ApiError:
    return invalid(f"`{param}`: `{spelling}` is no token id from 0 to {vocab_size - 1}.", param)
