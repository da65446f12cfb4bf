"""Continuous batching: which tokens the next step computes, who may run, and who gives way when memory is short.

The oldest work comes first; where several owners wait, the one that has least. A step decodes one token of every
running sequence whose reader keeps up, then fills its token budget with chunks of prompts. Memory that is short is
taken from the newest sequence, which is computed again later.
"""

from __future__ import annotations

import bisect
import time
from collections import Counter

from engine.kv_cache import KVCache, path_pages
from engine.plan import PAGE_SIZE
from engine.schedule import Chunk, Schedule
from engine.sequence import KVPath, Prefill, Sequence
from engine.speculation import Drafter

MAX_SCORED_ROWS = 256
"""Rows of prompts in one step whose log probabilities are wanted: each takes a float for every token there is."""


class Scheduler:
    def __init__(
        self,
        cache: KVCache,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        stream_credit: int,
        num_speculative_tokens: int = 0,
    ) -> None:
        """max_num_batched_tokens is raised to max_num_seqs, so that every running sequence fits into a step."""
        self.cache = cache
        self.waiting: list[Prefill] = []
        self.prefilling: list[Prefill] = []
        self.running: list[Sequence] = []
        self.num_preemptions = 0
        self.num_looked_up = 0  # tokens of prompts as they began
        self.num_found = 0  # those of them that the cache had
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max(max_num_batched_tokens, max_num_seqs)
        self._stream_credit = stream_credit
        self.num_speculative_tokens = num_speculative_tokens
        self._copies: dict[int, int] = {}  # target page -> source page

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.prefilling or self.waiting)

    def add(self, prefill: Prefill) -> None:
        bisect.insort(self.waiting, prefill, key=lambda item: item.rank)

    def schedule(self) -> Schedule | None:
        """Decide the next step; None when nothing can run now (no work, or only readers that are behind)."""
        budget = self._max_num_batched_tokens
        decodes = self._schedule_decodes()
        budget -= len(decodes)
        chunks: list[Chunk] = []
        for prefill in self.prefilling:
            budget -= self._schedule_chunk(prefill, budget, chunks)
        while budget > 0 and (admitted := self._admit()) is not None:
            budget -= self._schedule_chunk(admitted, budget, chunks)
        if not decodes and not chunks:
            return None
        for chunk in chunks:
            if chunk.num_tokens == chunk.prefill.num_left:
                self._choose_starts(chunk)
        copies = [(source, target) for target, source in self._copies.items()]
        self._copies.clear()
        draft = self._draft(decodes[0]) if len(decodes) == 1 and not chunks else ()
        return Schedule(decodes, chunks, copies, draft)

    def advance(self, schedule: Schedule) -> None:
        """Book what the step has computed: prompts that are complete become shared segments with a fork per choice."""
        for chunk in schedule.chunks:
            chunk.prefill.num_computed += chunk.num_tokens
            if chunk.starts:
                self._fork(chunk)

    def has_credit(self, sequence: Sequence) -> bool:
        """Whether its reader keeps up."""
        return sequence.has_credit(self._stream_credit)

    @property
    def num_running(self) -> int:
        return len(self.running) + sum(prefill.is_forced for prefill in self.prefilling)

    def fast_forward(self, sequence: Sequence) -> None:
        """Compute the tokens that were forced as one chunk, before any prompt's."""
        kv = sequence.kv
        assert kv is not None
        token_ids, num_computed = sequence.token_ids, sequence.num_computed
        pages = self.cache.allocate(-(-len(token_ids) // PAGE_SIZE) - len(kv.pages))
        if pages is None:
            self._preempt(sequence)
        else:
            kv.pages += pages
            self.running.remove(sequence)
            sequence.kv = None
            prefill = Prefill(sequence.prompt, token_ids, [sequence], fresh=False, is_forced=True)
            prefill.kv, prefill.num_computed = kv, num_computed
            self.prefilling.insert(0, prefill)
        sequence.num_ahead = 0

    def discard(self, schedule: Schedule) -> list[Sequence]:
        """Take all that a failed step was to compute out, and return it; what earlier steps computed stays cached."""
        for sequence in schedule.decodes:
            self.end(sequence, keep=False)
        lost = list(schedule.decodes)
        for chunk in schedule.chunks:
            self.cache.free(chunk.fork_pages)
            for sequence in chunk.starts:
                self.running.remove(sequence)
            if chunk.prefill in self.prefilling:
                self.prefilling.remove(chunk.prefill)
            self._drop(chunk.prefill)
            lost += chunk.prefill.sequences
        for sequence in lost:
            sequence.ended = True
        return lost

    def end(self, sequence: Sequence, *, keep: bool) -> None:
        """Take a sequence out, wherever it is. keep: leave its whole pages in the cache, for the next turn of that
        chat.
        """
        sequence.ended = True
        if sequence.kv is not None:
            self.running.remove(sequence)
            self._retire(sequence.kv, sequence, keep=keep)
            sequence.kv = None
            return
        for queue in (self.prefilling, self.waiting):
            for prefill in queue:
                if sequence in prefill.sequences:
                    prefill.sequences.remove(sequence)
                    if not prefill.sequences:
                        queue.remove(prefill)
                        self._drop(prefill)
                    return

    # -- running sequences

    def _schedule_decodes(self) -> list[Sequence]:
        decodes = []
        for sequence in list(self.running):
            if sequence.kv is None or not self.has_credit(sequence):
                continue
            if self._ensure_slot(sequence, sequence.kv):
                decodes.append(sequence)
        return decodes

    def _ensure_slot(self, sequence: Sequence, kv: KVPath) -> bool:
        """Give the sequence a page for its last drawn token; False when it had to give way itself."""
        if (sequence.num_tokens - 1) // PAGE_SIZE < len(kv.pages):
            return True
        while (pages := self.cache.allocate(1)) is None:
            if not self._preempt_for(sequence):
                return False
        kv.pages += pages
        return True

    def _draft(self, sequence: Sequence) -> tuple[int, ...]:
        """A guess at what follows the last token, with pages for it. A constraint's masks would depend on the guess."""
        kv, room = sequence.kv, sequence.max_tokens - len(sequence.output_ids) - 1
        limit = min(self.num_speculative_tokens, room)
        if kv is None or limit <= 0 or sequence.matcher is not None:
            return ()
        if sequence.drafter is None:
            sequence.drafter = Drafter()
        draft = sequence.drafter.draft(sequence.prompt.token_ids, sequence.output_ids, limit)
        missing = -(-(sequence.num_tokens + len(draft)) // PAGE_SIZE) - len(kv.pages)
        if missing > 0:
            kv.pages += self.cache.allocate(missing) or []
        return draft[: len(kv.pages) * PAGE_SIZE - sequence.num_tokens]

    def _preempt_for(self, sequence: Sequence) -> bool:
        """Free memory for `sequence`; False when it was the newest and has been preempted itself."""
        if self._preempt_stalled(sequence):
            return True
        newest_prefill = max(self.prefilling, key=lambda p: p.rank, default=None)
        newest = self.running[-1]
        if newest_prefill is not None and newest_prefill.rank > newest.rank:
            self._preempt_prefill(newest_prefill)
            return True
        self._preempt(newest)
        return newest is not sequence

    def _preempt_stalled(self, spare: Sequence | None = None) -> bool:
        """Preempt the newest sequence whose reader is behind."""
        for sequence in reversed(self.running):
            if sequence is not spare and not self.has_credit(sequence):
                self._preempt(sequence)
                return True
        return False

    def _preempt(self, sequence: Sequence) -> None:
        assert sequence.kv is not None
        self.num_preemptions += 1
        self.running.remove(sequence)
        self._retire(sequence.kv, sequence, keep=True)
        sequence.kv = None
        self.add(Prefill(sequence.prompt, sequence.token_ids, [sequence], fresh=False))

    # -- prompts

    def _schedule_chunk(self, prefill: Prefill, budget: int, chunks: list[Chunk]) -> int:
        num_tokens = min(budget, prefill.num_left)
        if prefill.prompt.is_scored:
            scored = sum(chunk.num_tokens for chunk in chunks if chunk.prefill.prompt.is_scored)
            num_tokens = min(num_tokens, MAX_SCORED_ROWS - scored)
        if num_tokens > 0:
            chunks.append(Chunk(prefill, num_tokens))
        return num_tokens

    def _admit(self) -> Prefill | None:
        """Start the next waiting prefill if a slot and its pages are to be had; stalled readers make room for it."""
        prefill = self._next_waiting()
        if prefill is None:
            return None
        while len(self.running) + len(self.prefilling) >= self._max_num_seqs:
            if not self._preempt_stalled():
                return None
        while not self._allocate(prefill):
            if not self._preempt_stalled():
                return None
        position = self.waiting.index(prefill)
        for overtaken in self.waiting[:position]:
            overtaken.num_overtaken += 1
        del self.waiting[position]
        self.prefilling.append(prefill)
        return prefill

    def _next_waiting(self) -> Prefill | None:
        """Whose turn it is: of the first priority, the owner with the fewest running choices, then the oldest.

        Who has been overtaken as often as there are slots comes first all the same, so that nobody waits for ever.
        """
        ready = [p for p in self.waiting if self.has_credit(p.sequences[0])]
        if not ready:
            return None
        priority = ready[0].prompt.order[0]
        ready = [p for p in ready if p.prompt.order[0] == priority]
        if (starved := next((p for p in ready if p.num_overtaken >= self._max_num_seqs), None)) is not None:
            return starved
        shares = Counter(s.prompt.owner for s in self.running)
        shares.update(p.prompt.owner for p in self.prefilling)
        return min(ready, key=lambda p: shares[p.prompt.owner])

    def _allocate(self, prefill: Prefill) -> bool:
        """Hold the cached prefix and allocate the rest, leaving a page to grow for each that runs."""
        prompt = prefill.prompt
        wanted = len(prompt.info.logprobs) if prompt.is_scored else len(prefill.token_ids) - 1
        leaf = self.cache.match(prompt.namespace, prefill.token_ids, wanted)
        shared = path_pages(leaf)
        num_pages = -(-len(prefill.token_ids) // PAGE_SIZE) - len(shared)
        reserve = len(self.running) + len(self.prefilling)
        pages = self.cache.allocate(num_pages) if self.cache.num_available >= num_pages + reserve else None
        if pages is None:
            self.cache.release(leaf)
            return False
        if prefill.fresh:
            earlier = sum(len(node.pages) for node in leaf.up_to_root() if node.origin != prompt.batch_id)
            prompt.info.num_cached_tokens = earlier * PAGE_SIZE
            self.num_looked_up += len(prefill.token_ids)
            self.num_found += earlier * PAGE_SIZE
            prompt.info.started_at = time.monotonic()
            prefill.fresh = False
        prefill.kv = KVPath(leaf, shared + pages, len(shared))
        prefill.num_computed = len(shared) * PAGE_SIZE
        return True

    def _choose_starts(self, chunk: Chunk) -> None:
        """As many choices start from a finished prompt as there are slots and pages; the others are a later wave."""
        prefill = chunk.prefill
        free_slots = self._max_num_seqs - len(self.running) - len(self.prefilling)
        count = min(len(prefill.sequences), 1 + max(0, free_slots))
        if len(prefill.token_ids) % PAGE_SIZE:
            count = min(count, 1 + self.cache.num_available)
            chunk.fork_pages = self.cache.allocate(count - 1) or []
        self.prefilling.remove(prefill)
        chunk.starts = prefill.sequences[:count]
        for sequence in chunk.starts:
            bisect.insort(self.running, sequence, key=lambda item: item.rank)

    def _fork(self, chunk: Chunk) -> None:
        """Share the prompt's whole pages among the choices that start, and copy its last, partly filled page into
        each.
        """
        prefill = chunk.prefill
        kv = prefill.kv
        assert kv is not None
        self._share(kv, prefill.token_ids, prefill.prompt.batch_id)
        partial = kv.private_pages
        for number, sequence in enumerate(chunk.starts):
            if number:
                self.cache.hold(kv.leaf)
            own = partial if number == 0 else chunk.fork_pages[number - 1 : number]
            if number and partial:
                self._copies[own[0]] = partial[0]
            sequence.kv = KVPath(kv.leaf, kv.pages[: kv.num_shared] + own, kv.num_shared)
            sequence.tiles = sequence.kv.shared_tiles()
        left = prefill.sequences[len(chunk.starts) :]
        if left:
            self.add(Prefill(prefill.prompt, prefill.token_ids, left, fresh=False))

    def _preempt_prefill(self, prefill: Prefill) -> None:
        self.num_preemptions += len(prefill.sequences)
        self.prefilling.remove(prefill)
        self._drop(prefill)
        prefill.is_forced = False
        self.add(prefill)

    def _drop(self, prefill: Prefill) -> None:
        if prefill.kv is not None:
            computed = prefill.token_ids[: prefill.num_computed]
            self._release(prefill.kv, computed, prefill.prompt.batch_id)
            prefill.kv, prefill.num_computed = None, 0

    # -- pages

    def _retire(self, kv: KVPath, sequence: Sequence, *, keep: bool) -> None:
        """Give a sequence's pages back."""
        computed = sequence.token_ids[: sequence.num_computed] if keep else ()
        self._release(kv, computed, sequence.prompt.batch_id)

    def _release(self, kv: KVPath, computed: tuple[int, ...], origin: int) -> None:
        self._share(kv, computed, origin)
        for page in kv.private_pages:
            self._copies.pop(page, None)
        self.cache.free(kv.private_pages)
        self.cache.release(kv.leaf)

    def _share(self, kv: KVPath, token_ids: tuple[int, ...], origin: int) -> None:
        """Move the whole pages of `token_ids` from the private tail into the tree."""
        num_pages = len(token_ids) // PAGE_SIZE
        if num_pages <= kv.num_shared:
            return
        span = token_ids[kv.num_shared * PAGE_SIZE : num_pages * PAGE_SIZE]
        kv.leaf = self.cache.extend(kv.leaf, span, kv.pages[kv.num_shared : num_pages], origin)
        kv.pages[:num_pages] = path_pages(kv.leaf)
        kv.num_shared = num_pages
