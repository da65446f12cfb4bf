"""What the endpoints do between a decoded request and an engine batch: fields, context, parameters. 4xx ends here."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, TypeVar

import anyio
import msgspec

from engine import api
from service.auth import ANYONE, Caller
from service.choice_text import TextRules
from service.errors import CONTEXT_LENGTH_EXCEEDED, invalid, model_not_found
from service.fan_out import FanOutRules, fan_out_rules
from service.job import Arrival, GenerationJob, Kind, ShowRules
from service.lifespan import Services
from service.sampling import choices, given
from service.schemas.common import SamplingFields
from service.schemas.field_rules import FieldRule, Use
from service.structured import check_constraint
from service.tokenizer import Tokenizer

T = TypeVar("T")

UNKNOWN_VOCAB_SIZE = 2**31
"""Where only the server that a request is passed on to knows it."""

MAX_PROMPT_LOGPROBS = 500_000
"""In one answer: some tens of megabytes."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What the endpoints differ in. *_param: the fields to blame, as the client named them.
    sent: fields that go on to the engine as they came, None where it gets tokens. own_names: as in its requests.
    """

    kind: Kind
    id_prefix: str
    prompt_param: Literal["messages", "prompt", "input"]
    max_tokens: int | None
    max_tokens_param: str
    n: int
    fan_out: FanOutRules
    show: ShowRules
    text: TextRules
    constraint: api.Constraint | None
    checked: tuple[api.Constraint, ...] = ()
    sent: Mapping[str, object] | None = None
    own_names: Mapping[str, str] = field(default_factory=dict)


def check_common(request: SamplingFields, services: Services, fields: Mapping[str, FieldRule]) -> None:
    if request.model != services.model_name:
        raise model_not_found(request.model)
    for name, rule in fields.items():
        if rule.use is Use.REFUSED and "[" not in name:
            refuse(name, _value(request, name), rule)


def _value(request: msgspec.Struct, path: str) -> object:
    """None where something above it is."""
    value: object = request
    for name in path.split("."):
        value = getattr(value, name, None)
    return value


def refuse_fields(given: msgspec.Struct, path: str, place: str, fields: Mapping[str, FieldRule]) -> None:
    """Those of an element of a list. path: as in `fields`. place: as the client is told. Raises ApiError (400)."""
    for name, encoded in zip(given.__struct_fields__, given.__struct_encode_fields__, strict=True):
        rule = fields.get(f"{path}.{encoded}")
        if rule is not None and rule.use is Use.REFUSED:
            refuse(f"{place}.{encoded}", getattr(given, name), rule)


def refuse(name: str, value: object, rule: FieldRule) -> None:
    """Raises ApiError (400) unless the value asks for nothing."""
    if value is None or value in rule.neutral:
        return
    accepted = ", ".join(json.dumps(neutral) for neutral in rule.neutral)
    hint = f"; accepted: {accepted}" if accepted else ""
    raise invalid(f"Unsupported parameter: `{name}`: {rule.note}{hint}.", name, "unsupported_parameter")


def fan_out_of(request: SamplingFields, n: int, services: Services, caller: Caller) -> FanOutRules:
    services.quotas.check_n(caller, n)
    return fan_out_rules(request.fan_out, n, stream=bool(request.stream))


async def in_thread(encode: Callable[[Tokenizer], T], services: Services) -> T:
    """Off the event loop: long texts take seconds."""
    tokenizer = services.ready_tokenizer()
    return await anyio.to_thread.run_sync(encode, tokenizer, limiter=services.tokenizer_limiter)


def make_job(
    request: SamplingFields, plan: Plan, prompts: Sequence[api.Prompt], services: Services, arrival: Arrival
) -> GenerationJob:
    """Raises ApiError (400)."""
    info, caller = services.engine.info, arrival.caller
    check_constraint(plan.constraint, info)
    known = [prompt.token_ids for prompt in prompts if isinstance(prompt, api.TokenPrompt)]
    _check_prompt_logprobs(plan, sum(map(len, known)), info)
    _check_transfer(request, info)
    for token_ids in known:
        _check_prompt(token_ids, plan, info)
        _check_context(len(token_ids), request, plan, info.max_model_len)
    logprobs = 0 if plan.show.logprobs is None and plan.fan_out.needs_logprobs else plan.show.logprobs
    drawn = choices(request, plan.n, plan.max_tokens, logprobs, plan.constraint, info.vocab_size or UNKNOWN_VOCAB_SIZE)
    engine_request = partial(
        api.Request,
        request.model,
        choices=drawn,
        priority=0 if plan.sent is not None and request.priority is None else _priority(request.priority, caller),
        owner=caller.owner,
        cache_namespace=caller.owner if request.cache_salt is None else f"{caller.owner}\0{request.cache_salt}",
        prompt_logprobs=plan.show.num_prompt_logprobs,
        checked=plan.checked,
        kv_transfer_params=request.kv_transfer_params,
        sent=plan.sent or {},
        own_names=plan.own_names,
    )
    return GenerationJob(
        kind=plan.kind,
        response_id=plan.id_prefix + secrets.token_hex(16),
        created=int(time.time()),
        model=request.model,
        batch=tuple(map(engine_request, prompts)),
        n=plan.n,
        text=plan.text,
        stream=bool(request.stream),
        include_usage=request.stream_options is not None and bool(request.stream_options.include_usage),
        request_id=given(request.request_id, arrival.request_id),
        show=plan.show,
        fan_out=plan.fan_out,
        caller=caller,
        received_at=arrival.received_at,
        timeout=arrival.seconds(request.timeout, services.settings),
    )


def _priority(wanted: int | None, caller: Caller) -> int:
    """A key bounds how far its requests can push ahead; where there are no keys nothing does."""
    if caller is ANYONE:
        return given(wanted, 0)
    return max(given(wanted, 0), given(caller.limits.priority, 0))


def _check_prompt_logprobs(plan: Plan, num_tokens: int, info: api.EngineInfo) -> None:
    """num_tokens: of all prompts. Each choice repeats its prompt's, so that answers could grow without bound."""
    count = plan.show.num_prompt_logprobs
    if count is None:
        return
    param = "echo" if plan.show.prompt_logprobs is None else "prompt_logprobs"
    if api.Capability.PROMPT_LOGPROBS not in info.capabilities:
        message = f"Unsupported parameter: `{param}`: this engine gives no log probabilities of prompts."
        raise invalid(message, param, "unsupported_parameter")
    if (total := num_tokens * plan.n * (count + 1)) > MAX_PROMPT_LOGPROBS:
        message = f"`{param}` asks for {total} log probabilities; at most {MAX_PROMPT_LOGPROBS} are told at once."
        raise invalid(message, param)


def _check_transfer(request: SamplingFields, info: api.EngineInfo) -> None:
    if request.kv_transfer_params is not None and api.Capability.KV_TRANSFER not in info.capabilities:
        message = "Unsupported parameter: `kv_transfer_params`: this engine moves no keys and values between machines."
        raise invalid(message, "kv_transfer_params", "unsupported_parameter")


def _check_prompt(token_ids: Sequence[int], plan: Plan, info: api.EngineInfo) -> None:
    if not token_ids:
        raise invalid(f"`{plan.prompt_param}` is empty: it has no tokens.", plan.prompt_param)
    vocab_size = info.vocab_size or UNKNOWN_VOCAB_SIZE
    if (low := min(token_ids)) < 0 or max(token_ids) >= vocab_size:
        wrong = low if low < 0 else max(token_ids)
        raise invalid(f"Token id {wrong} is outside of 0 to {vocab_size - 1}.", plan.prompt_param)


def wanted_tokens(request: SamplingFields, max_tokens: int | None) -> int:
    """What a choice must have room for behind its prompt."""
    return given(max_tokens, max(1, given(request.min_tokens, 0)))


def _check_context(num_tokens: int, request: SamplingFields, plan: Plan, limit: int) -> None:
    wanted = wanted_tokens(request, plan.max_tokens)
    if num_tokens + wanted <= limit or not limit:
        return
    param: str = "min_tokens" if plan.max_tokens is None else plan.max_tokens_param
    if num_tokens >= limit:
        param = plan.prompt_param
    message = (
        f"This model's context length is {limit} tokens. However, {num_tokens + wanted} tokens were requested "
        f"({num_tokens} in the prompt, {wanted} for the answer)."
    )
    raise invalid(message, param, CONTEXT_LENGTH_EXCEEDED)
