"""From a decoded request to an engine batch: cross-field checks, chat template, tokens. 4xx ends here."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, TypeVar

import anyio

from engine import api
from service.auth import ANYONE, Caller
from service.choice_text import TextRules
from service.detokenizer import IncrementalDetokenizer
from service.errors import CONTEXT_LENGTH_EXCEEDED, invalid, model_not_found
from service.fan_out import FanOutRules, fan_out_rules
from service.job import Arrival, GenerationJob, ShowRules
from service.lifespan import Services
from service.messages import render_messages
from service.sampling import check_sampling, choices, given, stop_strings
from service.schemas.chat import ChatCompletionRequest
from service.schemas.common import SamplingFields
from service.schemas.completions import CompletionRequest
from service.schemas.fields import CHAT_FIELDS, COMPLETION_FIELDS, FieldRule, Use
from service.structured import check_constraint, constraint_of
from service.tokenizer import TemplateError, Tokenizer

T = TypeVar("T")

DEFAULT_COMPLETION_TOKENS = 16


@dataclass(frozen=True, slots=True)
class _Plan:
    """What the two endpoints differ in. *_param: the fields to blame, as the client named them."""

    kind: Literal["chat", "completion"]
    id_prefix: str
    prompt_param: Literal["messages", "prompt"]
    max_tokens: int | None
    max_tokens_param: str
    n: int
    fan_out: FanOutRules
    show: ShowRules
    text: TextRules
    constraint: api.Constraint | None


async def prepare_chat(request: ChatCompletionRequest, services: Services, arrival: Arrival) -> GenerationJob:
    """Raises ApiError (4xx), EngineNotReady and EngineDead."""
    _check_common(request, services, CHAT_FIELDS)
    max_tokens, max_tokens_param = _chat_max_tokens(request)
    messages = render_messages(request.messages)
    n = given(request.n, 1)
    check_sampling(request, max_tokens, n, 1, services.settings)
    plan = _Plan(
        "chat",
        "chatcmpl-",
        "messages",
        max_tokens,
        max_tokens_param,
        n,
        _fan_out(request, n, services, arrival.caller),
        ShowRules(logprobs=_chat_logprobs(request)),
        TextRules(stop=stop_strings(request)),
        constraint_of(request.response_format, request.structured_outputs),
    )
    _check_num_messages(len(messages), services)

    def encode(tokenizer: Tokenizer) -> list[list[int]]:
        try:
            return [tokenizer.render_chat(messages)]
        except TemplateError as error:
            raise invalid(str(error), "messages") from None

    return _job(request, plan, await _in_thread(encode, services), services, arrival)


async def prepare_completion(request: CompletionRequest, services: Services, arrival: Arrival) -> GenerationJob:
    """Raises ApiError (4xx), EngineNotReady and EngineDead."""
    _check_common(request, services, COMPLETION_FIELDS)
    max_tokens = given(request.max_tokens, DEFAULT_COMPLETION_TOKENS)
    prompts = _prompts(request.prompt)
    n = _num_drawn(request)
    check_sampling(request, max_tokens, n, len(prompts), services.settings)
    fan_out = _fan_out(request, n, services, arrival.caller)
    has_best = n > given(request.n, 1)
    if request.echo and request.logprobs is not None:
        message = "`echo` with `logprobs` needs log probabilities of the prompt, which this engine does not give."
        raise invalid(message, "echo", "unsupported_parameter")

    plan = _Plan(
        "completion",
        "cmpl-",
        "prompt",
        max_tokens,
        "max_tokens",
        n,
        replace(fan_out, rank=True, keep=given(request.n, 1)) if has_best else fan_out,
        ShowRules(logprobs=request.logprobs, renumbered=has_best),
        TextRules(stop=stop_strings(request), continues=True),
        constraint_of(None, request.structured_outputs),
    )

    def encode(tokenizer: Tokenizer) -> list[list[int]]:
        return [
            tokenizer.encode(prompt, add_special_tokens=True) if isinstance(prompt, str) else prompt
            for prompt in prompts
        ]

    job = _job(request, plan, await _in_thread(encode, services), services, arrival)
    if not request.echo:
        return job
    texts = await _in_thread(lambda tokenizer: tuple(_text(prompt, tokenizer) for prompt in prompts), services)
    return replace(job, show=replace(job.show, echo=texts))


def _text(prompt: str | list[int], tokenizer: Tokenizer) -> str:
    if isinstance(prompt, str):
        return prompt
    detokenizer = IncrementalDetokenizer(tokenizer, continues=False, hides=lambda _: False)
    return "".join(map(detokenizer.feed, prompt))


def _num_drawn(request: CompletionRequest) -> int:
    """Choices to draw for each prompt: the n that are returned are the best of them."""
    n = given(request.n, 1)
    best_of = given(request.best_of, n)
    if best_of < n:
        raise invalid(f"`best_of` ({best_of}) is less than `n` ({n}).", "best_of")
    if best_of > n and request.stream:
        raise invalid("`best_of` above `n` needs an answer that is not streamed.", "best_of")
    if best_of > n and request.fan_out is not None:
        raise invalid("`best_of` above `n` and `fan_out` both say which choices are kept; give one.", "best_of")
    return best_of


def _check_common(request: SamplingFields, services: Services, fields: Mapping[str, FieldRule]) -> None:
    if request.model != services.settings.served_model_name:
        raise model_not_found(request.model)
    for name, rule in fields.items():
        if rule.use is Use.REFUSED and "[" not in name:
            _refuse(name, getattr(request, name), rule)


def _refuse(name: str, value: object, rule: FieldRule) -> None:
    if value is None or value in rule.neutral:
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
        return given(request.top_logprobs, 0)
    if request.top_logprobs is not None:
        raise invalid("`top_logprobs` is only allowed with `logprobs`.", "top_logprobs")
    return None


def _fan_out(request: SamplingFields, n: int, services: Services, caller: Caller) -> FanOutRules:
    services.quotas.check_n(caller, n)
    return fan_out_rules(request.fan_out, n, stream=bool(request.stream))


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


async def _in_thread(encode: Callable[[Tokenizer], T], services: Services) -> T:
    """Off the event loop: long texts take seconds."""
    tokenizer = services.ready_tokenizer()
    return await anyio.to_thread.run_sync(encode, tokenizer, limiter=services.tokenizer_limiter)


def _job(
    request: SamplingFields, plan: _Plan, prompts: list[list[int]], services: Services, arrival: Arrival
) -> GenerationJob:
    info, caller = services.engine.info, arrival.caller
    check_constraint(plan.constraint, info)
    for token_ids in prompts:
        _check_prompt(token_ids, plan, info)
        _check_context(len(token_ids), request, plan, info.max_model_len)
    logprobs = 0 if plan.show.logprobs is None and plan.fan_out.needs_logprobs else plan.show.logprobs
    drawn = choices(request, plan.n, plan.max_tokens, logprobs, plan.constraint, info.vocab_size)
    engine_request = partial(
        api.Request,
        request.model,
        choices=drawn,
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
        n=plan.n,
        text=plan.text,
        stream=bool(request.stream),
        include_usage=request.stream_options is not None and bool(request.stream_options.include_usage),
        request_id=given(request.request_id, arrival.request_id),
        show=plan.show,
        fan_out=plan.fan_out,
        caller=caller,
        received_at=arrival.received_at,
        timeout=arrival.timeout_for(request, services.settings),
    )


def _priority(wanted: int | None, caller: Caller) -> int:
    """A key bounds how far its requests can push ahead; where there are no keys nothing does."""
    if caller is ANYONE:
        return given(wanted, 0)
    return max(given(wanted, 0), given(caller.limits.priority, 0))


def _check_prompt(token_ids: Sequence[int], plan: _Plan, info: api.EngineInfo) -> None:
    if not token_ids:
        raise invalid(f"`{plan.prompt_param}` is empty: it has no tokens.", plan.prompt_param)
    if (low := min(token_ids)) < 0 or max(token_ids) >= info.vocab_size:
        wrong = low if low < 0 else max(token_ids)
        raise invalid(f"Token id {wrong} is outside of 0 to {info.vocab_size - 1}.", plan.prompt_param)


def _check_context(num_tokens: int, request: SamplingFields, plan: _Plan, limit: int) -> None:
    wanted = given(plan.max_tokens, max(1, given(request.min_tokens, 0)))
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
