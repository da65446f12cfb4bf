"""Draws one token per row on any torch device.

A row's draw depends on its logits, seed and position alone: one counter-based uniform (Philox4x32-10, Salmon et al.
2011) and the inverse CDF in token-index order over the kept set. No generator state, no sorting of the vocabulary.
The native step draws alike.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.api import TokenLogprobs
from engine.plan import SampledToken, SamplingRow

_NUM_CANDIDATES = 256
"""Top-p usually keeps fewer tokens than this; more than that are found by bisection instead."""


def sample(logits: Tensor, rows: Sequence[SamplingRow]) -> list[SampledToken]:
    """Draw one token per row.

    logits: [R, V] float32, the distinct logits rows of the step. rows: their `logits_row` says which is theirs.
    """
    if not rows:
        return []
    index = torch.tensor([row.logits_row for row in rows], device=logits.device)
    scores = logits[index]  # [B, V], a copy
    finite = torch.isfinite(scores.amax(dim=-1)).tolist()
    logprobs = _logprobs(scores, rows)
    _apply_penalties(scores, rows)
    _apply_masks(scores, rows, finite)
    greedy = scores.argmax(dim=-1)
    drawn = _draw(scores, rows, greedy)
    chosen = drawn.tolist()
    tokens = []
    for number, row in enumerate(rows):
        if not finite[number]:
            tokens.append(SampledToken(-1))
        else:
            tokens.append(SampledToken(chosen[number], _token_logprobs(logprobs, number, row, chosen[number])))
    return tokens


def uniforms(seeds: Sequence[int], positions: Sequence[int]) -> NDArray[np.float64]:
    """One number in [0, 1) per (seed, position), both below 2**64: 53 bits of Philox4x32-10."""
    key = np.array([[seed & 0xFFFFFFFF, seed >> 32] for seed in seeds], dtype=np.uint64).T
    counter = np.zeros((4, len(positions)), dtype=np.uint64)
    counter[:2] = np.array([[p & 0xFFFFFFFF, p >> 32] for p in positions], dtype=np.uint64).T
    low = np.uint64(0xFFFFFFFF)
    for _ in range(10):
        first = np.uint64(0xD2511F53) * counter[0]
        second = np.uint64(0xCD9E8D57) * counter[2]
        counter = np.stack(
            [
                (second >> np.uint64(32)) ^ counter[1] ^ key[0],
                second & low,
                (first >> np.uint64(32)) ^ counter[3] ^ key[1],
                first & low,
            ]
        )
        key = np.stack([(key[0] + np.uint64(0x9E3779B9)) & low, (key[1] + np.uint64(0xBB67AE85)) & low])
    high_bits = (counter[0] >> np.uint64(5)).astype(np.float64)
    low_bits = (counter[1] >> np.uint64(6)).astype(np.float64)
    return (high_bits * 67108864.0 + low_bits) / 9007199254740992.0


def _apply_penalties(scores: Tensor, rows: Sequence[SamplingRow]) -> None:
    """Bias, block and penalise in place, in vLLM's order. Only rows that ask for it cost anything."""
    for number, row in enumerate(rows):
        params, scores_row = row.params, scores[number]
        if params.logit_bias:
            ids, biases = zip(*params.logit_bias, strict=True)
            scores_row[list(ids)] += torch.tensor(biases, dtype=scores.dtype, device=scores.device)
        if row.blocked_ids:
            scores_row[list(row.blocked_ids)] = -math.inf
        if params.repetition_penalty != 1.0:
            seen = torch.tensor(sorted({*row.prompt_ids, *row.output_ids}), device=scores.device)
            old = scores_row[seen]
            scores_row[seen] = torch.where(old > 0, old / params.repetition_penalty, old * params.repetition_penalty)
        if (params.frequency_penalty or params.presence_penalty) and row.output_ids:
            made = torch.tensor(row.output_ids, device=scores.device)
            made, counts = made.unique(return_counts=True)
            scores_row[made] -= params.frequency_penalty * counts + params.presence_penalty


def _apply_masks(scores: Tensor, rows: Sequence[SamplingRow], finite: list[bool]) -> None:
    """Take what is not allowed out, in place. finite: cleared for rows that nothing is left of."""
    masks = {number: row.allowed for number, row in enumerate(rows) if row.allowed is not None}
    if not masks:
        return
    masked = list(masks)
    packed = torch.from_numpy(np.stack(list(masks.values())).view(np.uint8)).to(scores.device)  # [M, bytes]
    bits = packed[:, :, None] >> torch.arange(8, dtype=torch.uint8, device=scores.device) & 1
    allowed = bits.flatten(1)[:, : scores.shape[-1]].bool()
    scores[masked] = scores[masked].masked_fill(~allowed, -math.inf)
    for number, is_left in zip(masked, torch.isfinite(scores[masked].amax(dim=-1)).tolist(), strict=True):
        finite[number] = finite[number] and is_left


def _draw(scores: Tensor, rows: Sequence[SamplingRow], greedy: Tensor) -> Tensor:
    """[B] token ids: greedy where a row asks for it, drawn elsewhere."""
    random = [n for n, row in enumerate(rows) if row.params.temperature > 0 and row.params.top_p > 0]
    if not random:
        return greedy
    everything = len(random) == len(rows)
    subset = scores if everything else scores[random]
    params = [rows[n].params for n in random]
    temperatures = torch.tensor([p.temperature for p in params], dtype=torch.float64, device=scores.device)
    shifted = (subset.double() - subset.amax(dim=-1, keepdim=True).double()) / temperatures[:, None]
    weights = shifted.exp().float()  # relative to the likeliest token, which has 1
    _keep_top_k(weights, [p.top_k for p in params])
    _keep_top_p(weights, [p.top_p for p in params])
    min_p = torch.tensor([p.min_p for p in params], dtype=weights.dtype, device=scores.device)
    weights[weights < min_p[:, None]] = 0.0
    cumulative = weights.double().cumsum(dim=-1)
    u = uniforms([p.seed for p in params], [rows[n].position for n in random])
    total = cumulative[:, -1:]
    targets = torch.from_numpy(u).to(scores.device)[:, None] * total
    targets = torch.minimum(targets, torch.nextafter(total, torch.zeros_like(total)))  # never past the last kept token
    tokens = torch.searchsorted(cumulative, targets, right=True).squeeze(-1)
    if everything:
        return tokens
    drawn = greedy.clone()
    drawn[random] = tokens
    return drawn


def _keep_top_k(weights: Tensor, top_ks: Sequence[int]) -> None:
    """Zero what is below the k-th largest weight; ties with it are kept. 0 keeps all."""
    limited = [n for n, k in enumerate(top_ks) if 0 < k < weights.shape[-1]]
    if not limited:
        return
    ks = torch.tensor([top_ks[n] for n in limited], device=weights.device)
    best = weights[limited].topk(int(ks.max()), dim=-1).values
    threshold = best.gather(1, ks[:, None] - 1)
    subset = weights[limited]
    weights[limited] = torch.where(subset < threshold, 0.0, subset)


def _keep_top_p(weights: Tensor, top_ps: Sequence[float]) -> None:
    """Keep the weights >= t, for the largest t whose kept share of the sum is at least p; ties are kept."""
    limited = [n for n, p in enumerate(top_ps) if p < 1.0]
    if not limited:
        return
    subset = weights[limited]
    wanted = torch.tensor([top_ps[n] for n in limited], dtype=torch.float64, device=weights.device)
    wanted = (wanted * subset.double().sum(dim=-1))[:, None]
    best = subset.topk(min(_NUM_CANDIDATES, subset.shape[-1]), dim=-1).values
    mass = best.double().cumsum(dim=-1)
    position = torch.searchsorted(mass, wanted)
    inside = position < best.shape[-1]
    threshold = best.gather(1, position.clamp(max=best.shape[-1] - 1))
    for n in (~inside).squeeze(1).nonzero().flatten().tolist():
        threshold[n] = _bisect_threshold(subset[n], float(wanted[n]), float(best[n, -1]))
    weights[limited] = torch.where(subset < threshold, 0.0, subset)


def _bisect_threshold(weights: Tensor, wanted: float, high: float) -> float:
    """The largest t, one of the weights, with sum(weights[weights >= t]) >= wanted.

    Non-negative floats are ordered like their bit patterns, so 31 halvings at most find it exactly.
    """
    low_bits, high_bits = 0, int(np.float32(high).view(np.int32)) + 1  # the sum at low is enough, at high it is not
    while high_bits - low_bits > 1:
        middle = (low_bits + high_bits) // 2
        t = float(np.int32(middle).view(np.float32))
        if float(weights[weights >= t].double().sum()) >= wanted:
            low_bits = middle
        else:
            high_bits = middle
    return float(np.int32(low_bits).view(np.float32))


def _logprobs(scores: Tensor, rows: Sequence[SamplingRow]) -> Tensor | None:
    """[B, V] log-probabilities of the model itself, before temperature, bias and penalties; None if nobody wants
    them.
    """
    if all(row.params.logprobs is None for row in rows):
        return None
    return scores.log_softmax(dim=-1)


def _token_logprobs(logprobs: Tensor | None, number: int, row: SamplingRow, token_id: int) -> TokenLogprobs | None:
    if logprobs is None or row.params.logprobs is None:
        return None
    values = logprobs[number].clamp(min=-9999.0)
    top: tuple[tuple[int, float], ...] = ()
    if row.params.logprobs:
        best = values.topk(min(row.params.logprobs, values.shape[-1]))
        top = tuple(zip(best.indices.tolist(), best.values.tolist(), strict=True))
    return TokenLogprobs(token_id, float(values[token_id]), top)
