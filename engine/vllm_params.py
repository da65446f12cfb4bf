"""From the contract's words to vLLM's and back. Imports vllm inside functions only: most installations have none."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from engine.api import (
    Constraint,
    EndReason,
    InvalidConstraint,
    OnlyTokens,
    SamplingParams,
    TokenLogprobs,
    WithoutWords,
)
from engine.grammar_source import source_of

SpecialToken = Callable[[str], int | None]


def vllm_seed(seed: int) -> int:
    """vLLM takes signed 64 bits and reads -1 as none: that one seed draws as its neighbour does."""
    signed = seed if seed < 2**63 else seed - 2**64
    return -2 if signed == -1 else signed


def vllm_sampling(
    params: SamplingParams,
    max_tokens: int,
    eos_token_ids: frozenset[int],
    special_token: SpecialToken,
    *,
    prompt_logprobs: int | None = None,
    kv_transfer_params: dict[str, object] | None = None,
) -> Any:
    """vLLM's SamplingParams of one choice. max_tokens: at least 1. Raises ValueError, InvalidConstraint."""
    from vllm.sampling_params import RequestOutputKind
    from vllm.sampling_params import SamplingParams as VllmSampling

    ends = params.ignore_eos and not is_closed(params.constraint)
    stops = params.stop_token_ids if ends else (*params.stop_token_ids, *sorted(eos_token_ids))
    greedy = params.top_p == 0.0  # of probabilities that sum to nothing only the likeliest is left
    allowed = list(params.constraint.token_ids) if isinstance(params.constraint, OnlyTokens) else None
    return VllmSampling(
        seed=vllm_seed(params.seed),
        temperature=params.temperature,
        top_p=1.0 if greedy else params.top_p,
        top_k=1 if greedy else params.top_k,
        min_p=params.min_p,
        max_tokens=max_tokens,
        min_tokens=min(params.min_tokens, max_tokens),
        stop_token_ids=list(stops),
        ignore_eos=ends,
        frequency_penalty=params.frequency_penalty,
        presence_penalty=params.presence_penalty,
        repetition_penalty=params.repetition_penalty,
        logit_bias=dict(params.logit_bias) or None,
        logprobs=params.logprobs,
        prompt_logprobs=prompt_logprobs,
        allowed_token_ids=allowed,
        structured_outputs=structured_outputs(params.constraint, special_token),
        extra_args=None if kv_transfer_params is None else {"kv_transfer_params": kv_transfer_params},
        output_kind=RequestOutputKind.DELTA,
        detokenize=False,
    )


def is_closed(constraint: Constraint | None) -> bool:
    """The text comes to an end of its own, at which nothing may follow."""
    return constraint is not None and not isinstance(constraint, OnlyTokens | WithoutWords)


def check_together(params: SamplingParams, eos_token_ids: frozenset[int]) -> None:
    """vLLM masks ends before min_tokens and what a constraint forbids apart, and draws from nothing where both leave
    nothing. Raises InvalidConstraint naming the field.
    """
    constraint = params.constraint
    if params.min_tokens and is_closed(constraint):
        raise InvalidConstraint("this engine cannot keep a text to a grammar and to a least length", "min_tokens")
    if isinstance(constraint, OnlyTokens) and params.min_tokens:
        ends = {*params.stop_token_ids, *eos_token_ids}
        if ends.issuperset(constraint.token_ids):
            raise InvalidConstraint("the tokens that are allowed all end the text", constraint.param)
    if isinstance(constraint, WithoutWords) and params.ignore_eos:
        raise InvalidConstraint("this engine cannot keep words out of a text that goes on after its end", "ignore_eos")


def structured_outputs(constraint: Constraint | None, special_token: SpecialToken) -> Any:
    """vLLM's StructuredOutputsParams for its backend `guidance`, which reads the grammars that the torch engine does.

    Raises ValueError.
    """
    from vllm.sampling_params import StructuredOutputsParams

    match constraint:
        case None | OnlyTokens():
            return None
        case WithoutWords(words=words):
            return StructuredOutputsParams(grammar=_without(words))
    source = source_of(constraint, special_token)
    match source.language:
        case "json":
            return StructuredOutputsParams(json=source.text)
        case "regex":
            return StructuredOutputsParams(regex=source.text)
        case "lark":
            return StructuredOutputsParams(grammar=source.text)


def _without(words: Sequence[str]) -> str:
    """A text may end wherever it is; vLLM's own `bad_words` only forbid one way to cut each into tokens."""
    patterns = "|".join("".join(f"\\x{{{ord(char):x}}}" for char in word) for word in words)
    return f"start: TEXT\nTEXT: /(?s:.*)/ & ~/(?s:.*({patterns}).*)/"


def end_of(
    finish_reason: str, stop_reason: object, params: SamplingParams, eos_token_ids: frozenset[int]
) -> tuple[EndReason, int | None, str | None]:
    """(reason, stop token, error)."""
    if finish_reason == "length":
        return EndReason.LENGTH, None, None
    if finish_reason == "stop":
        is_eos = stop_reason in eos_token_ids and not (params.ignore_eos and stop_reason in params.stop_token_ids)
        return EndReason.STOP, stop_reason if isinstance(stop_reason, int) and not is_eos else None, None
    return EndReason.ERROR, None, f"vLLM gave this choice up: {finish_reason}"


def logprobs_of(token_ids: Sequence[int], entries: Any, num_best: int) -> tuple[TokenLogprobs, ...]:
    """entries: per token {token id: Logprob}, the drawn one and the best."""
    return tuple(_position(token_id, entry, num_best) for token_id, entry in zip(token_ids, entries, strict=True))


def prompt_logprobs_of(token_ids: Sequence[int], entries: Any, num_best: int) -> list[TokenLogprobs | None]:
    """Of each token but the first; None where a number is not finite. entries: as above, None for the first."""
    rows = (_position(*row, num_best) for row in zip(token_ids[1:], entries[1:], strict=True))
    return [row if math.isfinite(row.logprob) else None for row in rows]


def _position(token_id: int, entry: Any, num_best: int) -> TokenLogprobs:
    best = sorted((found.rank, other, found.logprob) for other, found in entry.items())
    top = tuple((other, logprob) for rank, other, logprob in best if rank <= num_best and math.isfinite(logprob))
    return TokenLogprobs(token_id, entry[token_id].logprob, top)
