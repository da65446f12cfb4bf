"""Attention of one step over a tree of shared KV segments, in plain torch, on any device.

Every segment is read once for all rows under it; what is private to a row is computed in a few padded calls for all
rows together. Partial results merge by log-sum-exp, which is exact. After Hydragen (Juravsky et al. 2024, arXiv
2402.05099) and FlashInfer's cascade attention.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from engine.plan import PAGE_SIZE, AttentionSegment, StepPlan

ATTENTION_NAME = "chorus_tree"
"""The attention implementation that models are loaded with."""

_NEVER = -1e30
"""Stands for minus infinity in maxima, where infinity minus infinity would be NaN."""


@dataclass(frozen=True, slots=True)
class _WideRun:
    """Rows first..stop-1 over the consecutive slots key_start..key_stop-1, whose first key has position base."""

    first: int
    stop: int
    key_start: int
    key_stop: int
    base: int
    causal: bool


@dataclass(frozen=True, slots=True)
class _OwnRuns:
    """Rows with keys of their own, padded. rows: [B]; slots, positions: [B, L]; valid: [B, L] bool."""

    rows: Tensor
    slots: Tensor
    positions: Tensor
    valid: Tensor


class TreeAttention:
    """Owns the KV tensors: keys and values of [layers, slots, kv_heads, head_dim]; a slot is page * 32 + offset."""

    def __init__(
        self,
        *,
        num_layers: int,
        num_pages: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = (num_layers, num_pages * PAGE_SIZE, num_kv_heads, head_dim)
        self.keys = _zeros(shape, dtype, device)
        self.values = _zeros(shape, dtype, device)
        self._device = device
        self._wide: list[_WideRun] = []
        self._own: list[_OwnRuns] = []
        self._slots = self._positions = torch.empty(0, dtype=torch.long, device=device)

    def plan(self, step: StepPlan) -> None:
        """Prepare what is the same for all layers, and copy forked pages."""
        for source, target in step.copies:
            old, new = (slice(page * PAGE_SIZE, (page + 1) * PAGE_SIZE) for page in (source, target))
            self.keys[:, new] = self.keys[:, old]
            self.values[:, new] = self.values[:, old]
        self._slots = torch.tensor(step.slots, device=self._device)
        self._positions = torch.tensor(step.positions, device=self._device)
        self._wide = [run for segment in step.segments if segment.num_rows > 1 for run in _extents(segment)]
        self._own = [self._pad(group) for group in _by_length(s for s in step.segments if s.num_rows == 1)]

    def run(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float, sliding_window: int | None
    ) -> Tensor:
        """Write the step's keys and values, then attend.

        query: [T, heads, head_dim]; key, value: [T, kv_heads, head_dim], rotary embedding applied. Returns the shape
        of query.
        """
        keys, values = self.keys[layer], self.values[layer]
        keys[self._slots] = key
        values[self._slots] = value
        num_rows, num_heads, head_dim = query.shape
        num_kv_heads = key.shape[1]
        grouped = (query * scaling).view(num_rows, num_kv_heads, num_heads // num_kv_heads, head_dim)
        merge = _Merge(grouped)
        for run in self._wide:
            rows = slice(run.first, run.stop)
            span = slice(run.key_start, run.key_stop)
            hidden = self._hidden(run, sliding_window)
            merge.add(rows, *_attend_wide(grouped[rows], keys[span], values[span], hidden))
        for own in self._own:
            hidden = ~own.valid
            if sliding_window is not None:
                hidden = hidden | (self._positions[own.rows, None] - own.positions >= sliding_window)
            merge.add(own.rows, *_attend_own(grouped[own.rows], keys[own.slots], values[own.slots], hidden))
        return merge.result().view(num_rows, num_heads, head_dim).to(query.dtype)

    def _hidden(self, run: _WideRun, sliding_window: int | None) -> Tensor | None:
        """[R, L] bool, True where a row must not see a key; None where all see all."""
        if not run.causal and sliding_window is None:
            return None
        rows = self._positions[run.first : run.stop, None]
        keys = torch.arange(run.base, run.base + run.key_stop - run.key_start, device=self._device)
        hidden = keys > rows
        if sliding_window is not None:
            hidden |= rows - keys >= sliding_window
        return hidden

    def _pad(self, segments: list[AttentionSegment]) -> _OwnRuns:
        longest = max(segment.num_keys for segment in segments)
        num_pages = -(-longest // PAGE_SIZE)
        pages = [[*s.pages[:num_pages], *[0] * (num_pages - len(s.pages))] for s in segments]
        offsets = torch.arange(PAGE_SIZE, device=self._device)
        slots = torch.tensor(pages, device=self._device)[:, :, None] * PAGE_SIZE + offsets
        places = torch.arange(longest, device=self._device)
        num_keys = torch.tensor([s.num_keys for s in segments], device=self._device)
        bases = torch.tensor([s.base for s in segments], device=self._device)
        return _OwnRuns(
            rows=torch.tensor([s.first_row for s in segments], device=self._device),
            slots=slots.flatten(1)[:, :longest],
            positions=bases[:, None] + places,
            valid=places < num_keys[:, None],
        )


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros that take no memory on a CPU before they are written; torch.zeros writes them all."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    integers = np.zeros(shape, dtype=f"u{dtype.itemsize}")
    return torch.from_numpy(integers).view(dtype)


class _Merge:
    """Adds partial attention results up: running maximum, sum and weighted values per row and head, in float32."""

    def __init__(self, grouped: Tensor) -> None:
        shape = grouped.shape[:-1]
        self._maximum = torch.full(shape, _NEVER, dtype=torch.float32, device=grouped.device)
        self._total = torch.zeros(shape, dtype=torch.float32, device=grouped.device)
        self._values = torch.zeros(grouped.shape, dtype=torch.float32, device=grouped.device)

    def add(self, rows: slice | Tensor, maximum: Tensor, total: Tensor, values: Tensor) -> None:
        old = self._maximum[rows]
        new = torch.maximum(old, maximum)
        keep, take = (old - new).exp(), (maximum - new).exp()
        self._maximum[rows] = new
        self._total[rows] = self._total[rows] * keep + total * take
        self._values[rows] = self._values[rows] * keep[..., None] + values * take[..., None]

    def result(self) -> Tensor:
        return self._values / self._total[..., None]


def _softmax_parts(scores: Tensor, hidden: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Maximum, sum and unnormalised weights over the last dimension, float32."""
    scores = scores.float()
    if hidden is not None:
        scores = scores.masked_fill(hidden, -torch.inf)
    maximum = scores.amax(dim=-1).clamp_(min=_NEVER)
    weights = (scores - maximum[..., None]).exp_()
    return maximum, weights.sum(dim=-1), weights


def _attend_wide(query: Tensor, keys: Tensor, values: Tensor, hidden: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """query: [R, K, G, D]; keys, values: [L, K, D] views; hidden: [R, L]. Returns [R, K, G], [R, K, G], [R, K, G,
    D].
    """
    num_rows, num_kv_heads, group, head_dim = query.shape
    flat = query.permute(1, 0, 2, 3).reshape(num_kv_heads, num_rows * group, head_dim)
    scores = torch.bmm(flat, keys.permute(1, 2, 0))
    if hidden is not None:
        hidden = hidden.repeat_interleave(group, dim=0)[None]
    maximum, total, weights = _softmax_parts(scores, hidden)
    result = torch.bmm(weights.to(values.dtype), values.permute(1, 0, 2)).float()
    shape = (num_kv_heads, num_rows, group)
    return (
        maximum.view(shape).transpose(0, 1),
        total.view(shape).transpose(0, 1),
        result.view(*shape, head_dim).transpose(0, 1),
    )


def _attend_own(query: Tensor, keys: Tensor, values: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """query: [B, K, G, D]; keys, values: [B, L, K, D]; hidden: [B, L]."""
    scores = query @ keys.permute(0, 2, 3, 1)  # [B, K, G, L]
    maximum, total, weights = _softmax_parts(scores, hidden[:, None, None])
    return maximum, total, (weights.to(values.dtype) @ values.permute(0, 2, 1, 3)).float()


def _extents(segment: AttentionSegment) -> list[_WideRun]:
    """A segment as runs of consecutive pages, which are views of the pool."""
    runs = []
    num_pages = -(-segment.num_keys // PAGE_SIZE)
    start = 0
    while start < num_pages:
        stop = start + 1
        while stop < num_pages and segment.pages[stop] == segment.pages[stop - 1] + 1:
            stop += 1
        num_keys = min(segment.num_keys, stop * PAGE_SIZE) - start * PAGE_SIZE
        key_start = segment.pages[start] * PAGE_SIZE
        base = segment.base + start * PAGE_SIZE
        first, end = segment.first_row, segment.first_row + segment.num_rows
        runs.append(_WideRun(first, end, key_start, key_start + num_keys, base, segment.causal))
        start = stop
    return runs


def _by_length(segments: Iterable[AttentionSegment]) -> list[list[AttentionSegment]]:
    """Group by the power of two that holds the length, so that padding at most doubles the work."""
    groups: dict[int, list[AttentionSegment]] = {}
    for segment in segments:
        groups.setdefault(segment.num_keys.bit_length(), []).append(segment)
    return list(groups.values())


def _attention_forward(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    tree_attention: TreeAttention,
    sliding_window: int | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """transformers' attention interface. query: [1, heads, T, head_dim]; returns [1, T, heads, head_dim]."""
    query, key, value = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    result = tree_attention.run(module.layer_idx, query, key, value, scaling, sliding_window)
    return result[None], None


AttentionInterface.register(ATTENTION_NAME, _attention_forward)
AttentionMaskInterface.register(ATTENTION_NAME, lambda *_, **__: None)
