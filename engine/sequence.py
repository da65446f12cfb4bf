"""What the scheduler moves about: prompts, the choices under them, and the runs of tokens still to be computed."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Protocol

from engine.api import ChoiceUpdate, PromptInfo, SamplingParams
from engine.kv_cache import Segment
from engine.matchers import Matcher
from engine.plan import KEY_TILE, PAGE_SIZE
from engine.speculation import Drafter

PAGES_PER_TILE = KEY_TILE // PAGE_SIZE

_sequence_ids = itertools.count(1)


class UpdateSink(Protocol):
    """Where a sequence's updates go, read by the engine to see how far its reader is behind.

    num_taken: updates the reader has taken; it grows on the event loop and is only read here.
    """

    num_taken: int


@dataclass(frozen=True, slots=True)
class PromptState:
    """One prompt of an admitted batch, shared by its choices.

    owner: whose turn it is when others wait too. batch_id: the batch it came with. order: (priority, arrival), smaller
    runs first and is preempted last. num_logprobs: Request.prompt_logprobs; info.logprobs grows as rows are computed.
    kv_transfer_params: the request's.
    """

    token_ids: tuple[int, ...]
    owner: str
    namespace: str
    order: tuple[int, int]
    batch_id: int
    info: PromptInfo
    num_logprobs: int | None = None
    kv_transfer_params: dict[str, object] | None = None

    @property
    def is_scored(self) -> bool:
        """Rows of it are still wanted for their log probabilities: those from len(info.logprobs) on, less the last."""
        return self.num_logprobs is not None and len(self.info.logprobs) < len(self.token_ids) - 1


@dataclass(slots=True, eq=False)
class KVPath:
    """Where a run of tokens has its KV: held segments of the tree, then private pages.

    pages: the page table; pages[:num_shared] belong to the tree.
    """

    leaf: Segment
    pages: list[int]
    num_shared: int

    @property
    def private_pages(self) -> list[int]:
        return self.pages[self.num_shared :]

    def shared_tiles(self) -> tuple[int, ...]:
        """One number per whole shared key tile; sequences with equal numbers up to a depth share all tiles up to it."""
        return tuple(self.pages[PAGES_PER_TILE - 1 : self.num_shared : PAGES_PER_TILE])


@dataclass(slots=True, eq=False)
class Sequence:
    """One choice. While it decodes, `kv` is set and holds its first num_computed tokens: all but the last.

    num_ahead: tokens beside that one which its constraint has forced and nothing has computed yet. num_posted: updates
    made so far, against sink.num_taken. matcher: where it stands in its constraint; it goes on when a token is booked,
    and so takes no notice of preemption.
    """

    prompt: PromptState
    params: SamplingParams
    sink: UpdateSink
    max_tokens: int
    matcher: Matcher | None = None
    id: int = field(default_factory=lambda: next(_sequence_ids))
    output_ids: list[int] = field(default_factory=list)
    kv: KVPath | None = None
    tiles: tuple[int, ...] = ()
    num_posted: int = 0
    num_ahead: int = 0
    drafter: Drafter | None = None
    ended: bool = False

    @property
    def rank(self) -> tuple[int, int, int]:
        """Smaller runs first and is preempted last."""
        return (*self.prompt.order, self.id)

    @property
    def num_tokens(self) -> int:
        return len(self.prompt.token_ids) + len(self.output_ids)

    @property
    def token_ids(self) -> tuple[int, ...]:
        return (*self.prompt.token_ids, *self.output_ids)

    @property
    def num_computed(self) -> int:
        """Tokens that `kv` holds while it decodes."""
        return self.num_tokens - 1 - self.num_ahead

    def has_credit(self, limit: int) -> bool:
        return self.num_posted - self.sink.num_taken < limit


@dataclass(slots=True, eq=False)
class Prefill:
    """Tokens to be computed, and the sequences that go on from the last of them.

    A prompt with all its choices (fresh), the choices that an earlier wave left, or one sequence (its prompt and
    output) that was preempted or whose constraint forced tokens (is_forced). While it is under way `kv` is set and
    num_computed of its tokens are in it.
    """

    prompt: PromptState
    token_ids: tuple[int, ...]
    sequences: list[Sequence]
    fresh: bool = True
    is_forced: bool = False
    num_overtaken: int = 0
    kv: KVPath | None = None
    num_computed: int = 0

    @property
    def rank(self) -> tuple[int, int, int]:
        return (*self.prompt.order, self.sequences[0].id)

    @property
    def num_left(self) -> int:
        return len(self.token_ids) - self.num_computed


Update = tuple[Sequence, ChoiceUpdate]
