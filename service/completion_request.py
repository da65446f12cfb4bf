"""From a decoded completion request to a job."""

from __future__ import annotations

from dataclasses import replace

from service.detokenizer import IncrementalDetokenizer
from service.errors import invalid
from service.job import Arrival, GenerationJob
from service.lifespan import Services
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
    prompts = _prompts(request.prompt)
    n = _num_drawn(request)
    check_sampling(request, max_tokens, n, len(prompts), services.settings)
    fan_out = fan_out_of(request, n, services, arrival.caller)
    has_best = n > given(request.n, 1)
    if request.echo and request.truncate_prompt_tokens is not None:
        raise invalid("`truncate_prompt_tokens` leaves out what `echo` is to repeat.", "truncate_prompt_tokens")
    if request.echo and request.logprobs is not None:
        message = "`echo` with `logprobs` needs log probabilities of the prompt, which this engine does not give."
        raise invalid(message, "echo", "unsupported_parameter")

    plan = Plan(
        "completion",
        "cmpl-",
        "prompt",
        max_tokens,
        "max_tokens",
        n,
        replace(fan_out, rank=True, keep=given(request.n, 1)) if has_best else fan_out,
        replace(show_rules(request, request.logprobs), renumbered=has_best),
        text_rules(request, continues=True),
        constraint_of(None, request.structured_outputs),
    )

    def encode(tokenizer: Tokenizer) -> list[list[int]]:
        return [
            truncated(tokenizer.encode(prompt, add_special_tokens=True) if isinstance(prompt, str) else prompt, request)
            for prompt in prompts
        ]

    job = make_job(request, plan, await in_thread(encode, services), services, arrival)
    if not request.echo:
        return job
    texts = await in_thread(lambda tokenizer: tuple(_text(prompt, tokenizer) for prompt in prompts), services)
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
