"""Which bits a text's logits have when it is computed in one go, alone; and whether a schedule gives the same ones."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from engine.native.runner import NativeRunner
from engine.plan import SampledToken
from tests.native.models import poison, tokens
from tests.native.plans import Pages, PlanBuilder, Text

NUM_PAGES = 160

Bits = NDArray[np.uint32]


def logits_alone(runner: NativeRunner, token_ids: list[int]) -> Bits:
    """The bits of every position's logits, from one prefill of all tokens into a pool full of NaN."""
    poison(runner)
    builder = PlanBuilder(Pages(NUM_PAGES))
    builder.add_chunk(Text(list(token_ids)))
    builder.want_all_logits()
    runner.execute(builder.plan)
    return runner.last_logits.copy().view(np.uint32)


class Checker:
    """Runs plans and compares each row's logits, bit by bit, with those that `texts` gave alone.

    texts: the full token ids by their first tokens, which tell them apart (forks of one text may be any of them).
    """

    def __init__(self, runner: NativeRunner, expected: Callable[[Text], Bits], *, all_rows: bool = True) -> None:
        self.runner = runner
        self._expected = expected
        self._all_rows = all_rows
        self.num_different = 0
        self.num_compared = 0

    def run(self, builder: PlanBuilder) -> list[SampledToken]:
        if self._all_rows:
            builder.want_all_logits()
        drawn = self.runner.execute(builder.plan)
        got = self.runner.last_logits.view(np.uint32)
        for row, bits in zip(builder.plan.logit_rows, got, strict=True):
            text, position = builder.sources[row]
            self.num_compared += 1
            self.num_different += not np.array_equal(bits, self._expected(text)[position])
        return drawn

    @property
    def same(self) -> bool:
        assert self.num_compared > 0
        return self.num_different == 0


def is_bitwise(runner: NativeRunner, alone: Bits) -> bool:
    """Whether a text of 560 tokens, in chunks and then token by token, gives the bits that it gave alone."""
    poison(runner)
    check = Checker(runner, lambda text: alone)
    pages = Pages(NUM_PAGES)
    text = Text(tokens(545))
    while text.computed < 545:
        builder = PlanBuilder(pages)
        builder.add_chunk(text, 109)
        check.run(builder)
    while len(text.token_ids) < 560:
        text.token_ids.append(tokens(560)[len(text.token_ids)])
        builder = PlanBuilder(pages)
        builder.add_decodes([text])
        check.run(builder)
    return check.same
