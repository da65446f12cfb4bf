"""Flattens a `StepPlan` into the arrays that the C++ step reads. Imports no torch."""

from __future__ import annotations

import ctypes
import struct
from array import array
from collections.abc import Sequence
from ctypes import c_float, c_int32
from itertools import chain

from engine.api import TokenLogprobs
from engine.native.binding import Plan, Sample
from engine.plan import AttentionSegment, SampledToken, SamplingRow, StepPlan

_SAMPLING_ROW = struct.Struct("=14Q6d")  # SamplingRow in plan.h

_WORD = 2**64


class PlanArrays:
    """`plan` points into arrays that live as long as this object; `results()` reads what the step wrote.

    Making one raises ValueError for numbers that do not fit the arrays.
    """

    def __init__(self, step: StepPlan) -> None:
        self.plan = Plan()
        self._rows = step.sampling_rows
        self._arrays: list[array[int] | array[float] | bytearray | ctypes.Array[c_int32] | ctypes.Array[c_float]] = []
        try:
            self._add_rows(step)
            self._add_segments(step.segments)
            self._add_sampling_rows(step.sampling_rows)
        except (OverflowError, TypeError, struct.error) as exc:
            raise ValueError(f"a plan holds a number that is out of range: {exc}") from exc

    def results(self) -> list[SampledToken]:
        return [self._result(row, sample) for row, sample in zip(self._rows, self._samples, strict=True)]

    def _keep(self, typecode: str, values: Sequence[int] | Sequence[float] | array[int] | array[float]) -> int:
        """The address of an array of these values."""
        kept = array(typecode, values)
        self._arrays.append(kept)
        return kept.buffer_info()[0]

    def _add_rows(self, step: StepPlan) -> None:
        plan = self.plan
        plan.num_rows = len(step.token_ids)
        if not plan.num_rows == len(step.positions) == len(step.slots):
            raise ValueError("token_ids, positions and slots of a plan must be equally long")
        plan.token_ids = self._keep("i", step.token_ids)
        plan.positions = self._keep("i", step.positions)
        plan.slots = self._keep("q", step.slots)
        plan.num_copies = len(step.copies)
        plan.copies = self._keep("i", list(chain.from_iterable(step.copies)))
        plan.num_logit_rows = len(step.logit_rows)
        plan.logit_rows = self._keep("i", step.logit_rows)

    def _add_segments(self, segments: Sequence[AttentionSegment]) -> None:
        flat: list[int] = []
        pages: list[int] = []
        for segment in segments:
            flat += (segment.first_row, segment.num_rows, segment.base, segment.num_keys, segment.causal)
            flat += (len(pages), len(segment.pages))
            pages += segment.pages
        self.plan.num_segments = len(segments)
        self.plan.segments = self._keep("i", flat)
        self.plan.num_pages = len(pages)
        self.plan.pages = self._keep("i", pages)

    def _add_sampling_rows(self, rows: Sequence[SamplingRow]) -> None:
        prompts = array("i")
        first_prompt: dict[int, int] = {}  # choices of one prompt share its list
        ids = array("i")
        biases = array("f")
        mask_words = array("I")
        packed = bytearray()
        self._samples = (Sample * len(rows))()
        for row, sample in zip(rows, self._samples, strict=True):
            params = row.params
            start = (len(ids), len(biases))
            looks_back = params.repetition_penalty != 1.0
            if looks_back and id(row.prompt_ids) not in first_prompt:
                first_prompt[id(row.prompt_ids)] = len(prompts)
                prompts.extend(row.prompt_ids)
            output = row.output_ids if looks_back or params.frequency_penalty or params.presence_penalty else ()
            ids.extend(output)
            ids.extend(token_id for token_id, _ in params.logit_bias)
            ids.extend(row.blocked_ids)
            biases.extend(bias for _, bias in params.logit_bias)
            num_logprobs = 0 if params.logprobs is None else params.logprobs + 1
            if num_logprobs > 1:
                self._add_room_for_best(sample, params.logprobs or 0)
            packed += _SAMPLING_ROW.pack(
                row.logits_row, row.position, params.seed % _WORD, params.top_k, num_logprobs,
                len(row.prompt_ids) if looks_back else 0, len(output), len(params.logit_bias), len(row.blocked_ids),
                0 if row.allowed is None else row.allowed.size,
                first_prompt.get(id(row.prompt_ids), 0), *start, len(mask_words),
                params.temperature, params.top_p, params.min_p,
                params.repetition_penalty, params.frequency_penalty, params.presence_penalty,
            )  # fmt: skip
            if row.allowed is not None:
                mask_words.frombytes(row.allowed.tobytes())
        plan = self.plan
        plan.num_samples = len(rows)
        plan.results = self._samples
        plan.samples = self._keep("B", packed)
        plan.num_prompt_ids, plan.prompt_ids = len(prompts), self._keep("i", prompts)
        plan.num_ids, plan.ids = len(ids), self._keep("i", ids)
        plan.num_biases, plan.biases = len(biases), self._keep("f", biases)
        plan.num_mask_words, plan.mask_words = len(mask_words), self._keep("I", mask_words)

    def _add_room_for_best(self, sample: Sample, count: int) -> None:
        best_ids, best_logprobs = (c_int32 * count)(), (c_float * count)()
        self._arrays += [best_ids, best_logprobs]
        sample.best_ids, sample.best_logprobs = best_ids, best_logprobs

    @staticmethod
    def _result(row: SamplingRow, sample: Sample) -> SampledToken:
        count = row.params.logprobs
        if count is None or sample.token < 0:
            return SampledToken(sample.token)
        best = [(sample.best_ids[i], sample.best_logprobs[i]) for i in range(count)]
        top = tuple((token_id, logprob) for token_id, logprob in best if token_id >= 0)
        return SampledToken(sample.token, TokenLogprobs(sample.token, sample.logprob, top))
