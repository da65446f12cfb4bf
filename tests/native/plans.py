"""Plans in the shapes that the scheduler makes, without a scheduler: sequences that hold pages of a pool."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field

from engine.api import SamplingParams
from engine.plan import KEY_TILE, PAGE_SIZE, AttentionSegment, SamplingRow, StepPlan

GREEDY = SamplingParams(seed=0, temperature=0.0)


@dataclass
class Text:
    """One sequence: its tokens, how many of them have keys and values in its pages, and how its next token is drawn."""

    token_ids: list[int]
    computed: int = 0
    pages: list[int] = field(default_factory=list)
    params: SamplingParams = GREEDY
    num_prompt: int = 0

    def __post_init__(self) -> None:
        self.num_prompt = self.num_prompt or len(self.token_ids)


class Pages:
    """Hands out pages in a scattered order, so that nothing relies on neighbours."""

    def __init__(self, num_pages: int, stride: int = 7) -> None:
        self._free: Iterator[int] = iter(sorted(range(num_pages), key=lambda page: (page * stride) % num_pages))

    def take(self, count: int = 1) -> list[int]:
        return list(itertools.islice(self._free, count))


class PlanBuilder:
    """Adds rows to one plan; `plan` is ready at any time. `sources`: the text and the position of each row."""

    def __init__(self, pages: Pages) -> None:
        self.plan = StepPlan()
        self.sources: list[tuple[Text, int]] = []
        self._pages = pages

    def add_chunk(self, text: Text, length: int | None = None, draws: int = 1, split_at: int = 0) -> None:
        """Prefill the next `length` tokens (None: all that are left); after the last one, draw `draws` first tokens.

        split_at: cover the keys before this multiple of KEY_TILE with a segment of their own (a cached prefix).
        """
        plan, first = self.plan, len(self.plan.token_ids)
        start = text.computed
        stop = len(text.token_ids) if length is None else min(len(text.token_ids), start + length)
        self._add_rows(text, start, stop)
        split_at = min(split_at, start // KEY_TILE * KEY_TILE)
        for base, end in ((0, split_at), (split_at, stop)):
            if base < end:
                pages = text.pages[base // PAGE_SIZE : -(-end // PAGE_SIZE)]
                plan.segments.append(AttentionSegment(first, stop - start, base, end - base, pages, causal=end == stop))
        text.computed = stop
        if stop == len(text.token_ids) and draws:
            plan.logit_rows.append(len(plan.token_ids) - 1)
            for choice in range(draws):
                self._add_draw(text, SamplingParams(**_with_seed(text.params, choice)))

    def add_decodes(self, texts: list[Text], num_shared: int = 0) -> None:
        """One row for each text's last token. The whole tiles of the first num_shared keys are read once for all."""
        plan, first = self.plan, len(self.plan.token_ids)
        shared = num_shared // KEY_TILE * KEY_TILE if len(texts) > 1 else 0
        if shared:
            pages = texts[0].pages[: shared // PAGE_SIZE]
            plan.segments.append(AttentionSegment(first, len(texts), 0, shared, pages, causal=False))
        for row, text in enumerate(texts, first):
            stop = len(text.token_ids)
            self._add_rows(text, text.computed, stop)
            pages = text.pages[shared // PAGE_SIZE : -(-stop // PAGE_SIZE)]
            plan.segments.append(AttentionSegment(row, 1, shared, stop - shared, pages, causal=bool(row % 2)))
            text.computed = stop
            plan.logit_rows.append(row)
            self._add_draw(text, text.params)

    def fork(self, text: Text, count: int) -> list[Text]:
        """`count` texts that share this one's full pages; this plan copies its last, partly filled one to each."""
        full = text.computed // PAGE_SIZE
        forks = []
        for choice in range(count):
            own = self._pages.take() if text.computed % PAGE_SIZE else []
            self.plan.copies += [(text.pages[full], page) for page in own]
            params = SamplingParams(**_with_seed(text.params, choice))
            forks.append(Text(list(text.token_ids), text.computed, text.pages[:full] + own, params, text.num_prompt))
        return forks

    def want_all_logits(self) -> None:
        for row in self.plan.sampling_rows:
            row.logits_row = self.plan.logit_rows[row.logits_row]
        self.plan.logit_rows = list(range(len(self.plan.token_ids)))

    def _add_rows(self, text: Text, start: int, stop: int) -> None:
        self.sources += [(text, position) for position in range(start, stop)]
        text.pages += self._pages.take(-(-stop // PAGE_SIZE) - len(text.pages))
        self.plan.token_ids += text.token_ids[start:stop]
        self.plan.positions += range(start, stop)
        self.plan.slots += [text.pages[p // PAGE_SIZE] * PAGE_SIZE + p % PAGE_SIZE for p in range(start, stop)]

    def _add_draw(self, text: Text, params: SamplingParams) -> None:
        prompt, output = text.token_ids[: text.num_prompt], text.token_ids[text.num_prompt :]
        row = SamplingRow(len(self.plan.logit_rows) - 1, len(text.token_ids), params, prompt, output)
        self.plan.sampling_rows.append(row)


def _with_seed(params: SamplingParams, choice: int) -> dict[str, object]:
    fields = {name: getattr(params, name) for name in params.__slots__}
    return fields | {"seed": params.seed + choice}
