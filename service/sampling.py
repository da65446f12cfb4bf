"""How a request's choices are drawn: what spans its sampling fields, and the engine's parameters for each choice."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import TypeVar

from engine import api
from service.choice_text import TextRules
from service.errors import invalid
from service.job import ShowRules
from service.schemas.common import SamplingFields
from service.settings import Settings
from service.structured import not_a_token

T = TypeVar("T")

MAX_STOP_BYTES = 16 * 1024
GREEDY_BELOW = 1e-5
"""Dividing logits by less than this overflows; the draw is greedy long before."""


def given(value: T | None, default: T) -> T:
    return default if value is None else value


def check_sampling(
    request: SamplingFields, max_tokens: int | None, n: int, num_prompts: int, settings: Settings
) -> None:
    """What spans fields or depends on settings, as far as it needs no model. n: choices to be drawn for each prompt.

    Raises ApiError (400).
    """
    n_param = "n" if n == given(request.n, 1) else "best_of"
    if n > settings.max_n:
        raise invalid(f"`{n_param}` is {n}, more than this server's limit of {settings.max_n}.", n_param)
    if n * num_prompts > settings.max_choices:
        prompts = "1 prompt" if num_prompts == 1 else f"{num_prompts} prompts"
        many = f"{prompts} with {n_param}={n}: {n * num_prompts} choices"
        message = f"{many}, more than this server admits at once ({settings.max_choices})."
        raise invalid(message, n_param if n > 1 else "prompt")
    if request.stream_options is not None and not request.stream:
        raise invalid("`stream_options` is only allowed with `stream`.", "stream_options")
    options = request.stream_options
    if options is not None and options.continuous_usage_stats and not options.include_usage:
        place = "stream_options.continuous_usage_stats"
        raise invalid(f"`{place}` needs `stream_options.include_usage`.", place)
    if request.max_streaming_response_tokens is not None and not request.stream:
        message = "`max_streaming_response_tokens` is only allowed with `stream`."
        raise invalid(message, "max_streaming_response_tokens")
    if max_tokens is not None and given(request.min_tokens, 0) > max_tokens:
        raise invalid(f"`min_tokens` ({request.min_tokens}) exceeds `max_tokens` ({max_tokens}).", "min_tokens")
    if sum(len(stop.encode()) for stop in stop_strings(request)) > MAX_STOP_BYTES:
        raise invalid(f"`stop` has more than {MAX_STOP_BYTES} bytes.", "stop")


def text_rules(request: SamplingFields, *, continues: bool) -> TextRules:
    return TextRules(
        stop=stop_strings(request),
        include_stop=given(request.include_stop_str_in_output, False),
        show_special=not given(request.skip_special_tokens, True),
        continues=continues,
    )


def show_rules(request: SamplingFields, logprobs: int | None) -> ShowRules:
    options = request.stream_options
    return ShowRules(
        logprobs=logprobs,
        token_ids=given(request.return_token_ids, False),
        prompt_logprobs=request.prompt_logprobs,
        tokens_per_chunk=given(request.max_streaming_response_tokens, 1),
        running_usage=options is not None and given(options.continuous_usage_stats, False),
    )


def truncated(token_ids: list[int], request: SamplingFields) -> list[int]:
    """The end of a prompt that is longer than the client wants."""
    return token_ids if request.truncate_prompt_tokens is None else token_ids[-request.truncate_prompt_tokens :]


def stop_strings(request: SamplingFields) -> tuple[str, ...]:
    stop = given(request.stop, [])
    return (stop,) if isinstance(stop, str) else tuple(stop)


def choices(
    request: SamplingFields,
    n: int,
    max_tokens: int | None,
    logprobs: int | None,
    constraint: api.Constraint | None,
    vocab_size: int,
) -> tuple[api.SamplingParams, ...]:
    """Choice i draws from seed + i; without a seed all start from one fresh base. Raises ApiError (400)."""
    stop_token_ids = tuple(given(request.stop_token_ids, []))
    for token_id in stop_token_ids:
        if token_id >= vocab_size:
            raise not_a_token(str(token_id), vocab_size, "stop_token_ids")
    seed = given(request.seed, secrets.randbits(63))
    temperature = given(request.temperature, 1.0)
    logit_bias = _logit_bias(given(request.logit_bias, {}), vocab_size)
    return tuple(
        api.SamplingParams(
            seed=(seed + index) % 2**64,
            temperature=temperature if temperature >= GREEDY_BELOW else 0.0,
            top_p=given(request.top_p, 1.0),
            top_k=min(max(0, given(request.top_k, 0)), vocab_size),
            min_p=given(request.min_p, 0.0),
            max_tokens=max_tokens,
            min_tokens=given(request.min_tokens, 0),
            stop_token_ids=stop_token_ids,
            ignore_eos=given(request.ignore_eos, False),
            frequency_penalty=given(request.frequency_penalty, 0.0),
            presence_penalty=given(request.presence_penalty, 0.0),
            repetition_penalty=given(request.repetition_penalty, 1.0),
            logit_bias=logit_bias,
            logprobs=logprobs,
            constraint=constraint,
        )
        for index in range(n)
    )


def _logit_bias(bias: Mapping[str, float], vocab_size: int) -> tuple[tuple[int, float], ...]:
    pairs = []
    for key, value in bias.items():
        # one spelling for each id, so that none can be given twice
        if not (key.isascii() and key.isdecimal() and len(key) < 10 and str(int(key)) == key and int(key) < vocab_size):
            raise not_a_token(key, vocab_size, "logit_bias")
        pairs.append((int(key), value))
    return tuple(pairs)
