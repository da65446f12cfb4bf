"""From a decoded completion request to a job."""

from __future__ import annotations

import json
from dataclasses import replace

from engine.api import Prompt, TokenPrompt
from service.detokenizer import IncrementalDetokenizer
from service.errors import invalid
from service.infill import infilled
from service.job import Arrival, Echo, GenerationJob
from service.lifespan import Services
from service.passing import passed_echo, passed_fields, passed_prompt
from service.prompts import forms
from service.requests import Plan, check_common, fan_out_of, in_thread, make_job
from service.sampling import check_sampling, given, show_rules, text_rules, truncated
from service.schemas.completions import CompletionRequest
from service.schemas.fields import COMPLETION_FIELDS
from service.structured import constraint_of
from service.tokenizer import Tokenizer

DEFAULT_COMPLETION_TOKENS = 16


async def prepare_completion(request: CompletionRequest, services: Services, arrival: Arrival) -> GenerationJob:
    """Raises ApiError (4xx), EngineNotReady and EngineDead."""
    check_common(request, services, COMPLETION_FIELDS)
    max_tokens = given(request.max_tokens, DEFAULT_COMPLETION_TOKENS)
    prompts = forms(request.prompt, "prompt")
    n = _num_drawn(request)
    check_sampling(request, max_tokens, n, len(prompts), services.settings)
    fan_out = fan_out_of(request, n, services, arrival.caller)
    has_best = n > given(request.n, 1)
    _check_echo(request)
    constraint = constraint_of(request)

    def encode(tokenizer: Tokenizer) -> tuple[list[list[int]], tuple[Echo, ...]]:
        encoded = [_encode(prompt, request, tokenizer) for prompt in prompts]
        if not request.echo:
            return encoded, ()
        with_offsets = request.logprobs is not None
        pairs = zip(prompts, encoded, strict=True)
        return encoded, tuple(_echo(prompt, token_ids, tokenizer, with_offsets) for prompt, token_ids in pairs)

    sent: dict[str, object] | None = None
    engine_prompts: list[Prompt]
    if services.passes_text:
        sent = passed_fields(request, arrival.caller) | ({"suffix": request.suffix} if request.suffix else {})
        engine_prompts, echo = list(map(passed_prompt, prompts)), passed_echo(request, prompts)
    else:
        token_ids, echo = await in_thread(encode, services)
        engine_prompts = [TokenPrompt(tuple(ids)) for ids in token_ids]
    plan = Plan(
        "completion",
        "cmpl-",
        "prompt",
        max_tokens,
        "max_tokens",
        n,
        replace(fan_out, rank=True, keep=given(request.n, 1)) if has_best else fan_out,
        replace(show_rules(request, request.logprobs), renumbered=has_best, echo=echo),
        text_rules(request, continues=True),
        constraint if sent is None else None,
        sent=sent,
    )
    job = make_job(request, plan, engine_prompts, services, arrival)
    if not services.keeps_content:
        return job
    texts = [prompt if isinstance(prompt, str) else json.dumps(prompt) for prompt in prompts]
    return replace(job, asked=[{"role": "user", "content": text} for text in texts])


def _encode(prompt: str | list[int], request: CompletionRequest, tokenizer: Tokenizer) -> list[int]:
    if request.suffix:
        token_ids = tokenizer.encode(prompt, add_special_tokens=False) if isinstance(prompt, str) else prompt
        return infilled(token_ids, request.suffix, tokenizer)
    token_ids = tokenizer.encode(prompt, add_special_tokens=True) if isinstance(prompt, str) else prompt
    return truncated(token_ids, request)


def _check_echo(request: CompletionRequest) -> None:
    if request.max_tokens == 0 and not request.echo:
        raise invalid("`max_tokens` 0 makes an answer with `echo` only.", "max_tokens")
    if request.echo and request.truncate_prompt_tokens is not None:
        raise invalid("`truncate_prompt_tokens` leaves out what `echo` is to repeat.", "truncate_prompt_tokens")
    if request.suffix and (request.echo or request.truncate_prompt_tokens is not None):
        raise invalid("`suffix` cannot be had with `echo` or `truncate_prompt_tokens`.", "suffix")


def _echo(prompt: str | list[int], token_ids: list[int], tokenizer: Tokenizer, with_offsets: bool) -> Echo:
    """A text is repeated as it came; what its tokens have before it (a special token at the start, say) has no room."""
    if isinstance(prompt, str) and not with_offsets:
        return Echo(prompt)
    detokenizer = IncrementalDetokenizer(tokenizer, continues=False, hides=lambda _: False)
    text, offsets = "", []
    for token_id in token_ids:
        offsets.append(len(text))
        text += detokenizer.feed(token_id)
    if not isinstance(prompt, str):
        return Echo(text, tuple(offsets))
    before = len(text) - len(prompt) if text.endswith(prompt) else 0
    return Echo(prompt, tuple(min(max(0, offset - before), len(prompt)) for offset in offsets))


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
