"""The KV cache as a prefix tree of pages: bookkeeping only, the tensors belong to the model runner.

A page holds 32 tokens and has one owner: the free list, a `Segment` of the tree, or a sequence's private tail.
Segments are immutable, ref-counted runs of whole pages; those that nobody holds stay as a cache and are evicted from
the leaves, least recently used first. After RadixAttention (Zheng et al. 2023, arXiv 2312.07104).
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator, Sequence

from engine.plan import PAGE_SIZE


class Segment:
    """A run of whole pages in the tree. The root of a namespace has no pages.

    token_ids: PAGE_SIZE * len(pages) of them. ref_count: how many paths run through it. origin: the batch that
    computed it.
    """

    __slots__ = ("children", "last_used", "namespace", "origin", "pages", "parent", "ref_count", "token_ids")

    namespace: str  # of a root only

    def __init__(self, parent: Segment | None, token_ids: tuple[int, ...], pages: list[int], origin: int) -> None:
        self.parent = parent
        self.token_ids = token_ids
        self.pages = pages
        self.children: dict[tuple[int, ...], Segment] = {}
        self.ref_count = 0
        self.origin = origin
        self.last_used = 0

    def up_to_root(self) -> Iterator[Segment]:
        node: Segment | None = self
        while node is not None:
            yield node
            node = node.parent


class KVCache:
    """Who owns which page. In pages, num_free + num_cached + num_held == num_pages, always."""

    def __init__(self, num_pages: int, *, prefix_caching: bool = True) -> None:
        if num_pages < 1:
            raise ValueError("the KV cache needs at least one page")
        self.num_pages = num_pages
        self.num_cached = 0
        self._prefix_caching = prefix_caching
        self._free = list(range(num_pages))  # a heap: the lowest page first keeps runs contiguous
        self._roots: dict[str, Segment] = {}
        self._evictable: list[tuple[int, int, Segment]] = []  # lazily cleaned heap of unheld leaves
        self._clock = itertools.count(1)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_available(self) -> int:
        """Pages that `allocate` could give."""
        return len(self._free) + self.num_cached

    @property
    def num_held(self) -> int:
        return self.num_pages - self.num_available

    def allocate(self, count: int) -> list[int] | None:
        """Give `count` pages, evicting cached ones where needed; None, and nothing changed, where there are too few."""
        if count > self.num_available:
            return None
        if count > len(self._free):
            self._evict(count - len(self._free))
        return [heapq.heappop(self._free) for _ in range(count)]

    def free(self, pages: Sequence[int]) -> None:
        """Take private pages back."""
        for page in pages:
            heapq.heappush(self._free, page)

    def match(self, namespace: str, token_ids: Sequence[int], max_tokens: int) -> Segment:
        """Find and hold the longest cached prefix of token_ids[:max_tokens], in whole pages.

        Returns the path's last segment (the root where nothing matches), to be given to `release`.
        """
        root = self._roots.get(namespace)
        if root is None:
            root = self._roots[namespace] = Segment(None, (), [], origin=-1)
            root.namespace = namespace
        node, position = root, 0
        limit = max_tokens - max_tokens % PAGE_SIZE if self._prefix_caching else 0
        while position < limit:
            child = node.children.get(tuple(token_ids[position : position + PAGE_SIZE]))
            if child is None:
                break
            num_pages = _common_pages(child, token_ids, position, limit)
            node = child if num_pages == len(child.pages) else self._split(child, num_pages)
            position += PAGE_SIZE * num_pages
        self.hold(node)
        return node

    def extend(self, leaf: Segment, token_ids: Sequence[int], pages: list[int], origin: int) -> Segment:
        """Turn private pages into segments below a held path, and hold the longer path in place of the shorter one.

        token_ids: exactly those of `pages`. Where the tree already has a page for the same tokens, that one is kept
        and the caller's is freed: read the page table again from `path_pages`.
        """
        node, done = leaf, 0
        while done < len(pages):
            start = done * PAGE_SIZE
            child = node.children.get(tuple(token_ids[start : start + PAGE_SIZE]))
            if child is None:
                child = self._add(node, tuple(token_ids[start:]), pages[done:], origin)
                done = len(pages)
            else:
                num_pages = _common_pages(child, token_ids, start, len(token_ids))
                child = child if num_pages == len(child.pages) else self._split(child, num_pages)
                self.free(pages[done : done + num_pages])
                done += num_pages
            node = child
        self.hold(node)
        self.release(leaf)
        return node

    def hold(self, leaf: Segment) -> None:
        """Hold a path once more (a fork)."""
        for node in leaf.up_to_root():
            if node.ref_count == 0:
                self.num_cached -= len(node.pages)
            node.ref_count += 1

    def release(self, leaf: Segment) -> None:
        """Let go of a path; what nobody holds any more is cached, or freed where caching is off."""
        now = next(self._clock)
        for node in list(leaf.up_to_root()):
            node.ref_count -= 1
            node.last_used = now
            if node.ref_count == 0:
                self.num_cached += len(node.pages)
                self._offer(node)
        if not self._prefix_caching:
            self._evict(self.num_cached)

    def check(self) -> None:
        """Raise AssertionError unless every page has exactly one owner, counters and reference counts agree."""
        seen = list(self._free)
        cached = held = 0
        stack = list(self._roots.values())
        while stack:
            node = stack.pop()
            stack += node.children.values()
            seen += node.pages
            assert len(node.token_ids) == PAGE_SIZE * len(node.pages), "a segment's tokens and pages disagree"
            assert all(child.parent is node for child in node.children.values()), "a child has another parent"
            assert node.ref_count >= sum(c.ref_count for c in node.children.values()), "a held child, an unheld parent"
            assert node.pages or node.parent is None, "an empty segment is in the tree"
            assert node.parent or node.ref_count or node.children, "an empty namespace was kept"
            if node.ref_count:
                held += len(node.pages)
            else:
                cached += len(node.pages)
        assert len(seen) == len(set(seen)), "a page has two owners"
        assert cached == self.num_cached, "the count of cached pages is off"
        assert held <= self.num_held, "more pages are held in the tree than at all"
        assert self.num_free + self.num_cached + self.num_held == self.num_pages

    def _add(self, parent: Segment, token_ids: tuple[int, ...], pages: list[int], origin: int) -> Segment:
        child = Segment(parent, token_ids, pages, origin)
        parent.children[token_ids[:PAGE_SIZE]] = child
        self.num_cached += len(pages)
        return child

    def _split(self, node: Segment, num_pages: int) -> Segment:
        """Cut a segment after num_pages pages; the new upper part is returned, the lower keeps its identity and
        holders.
        """
        assert node.parent is not None
        cut = num_pages * PAGE_SIZE
        upper = Segment(node.parent, node.token_ids[:cut], node.pages[:num_pages], node.origin)
        upper.ref_count, upper.last_used = node.ref_count, node.last_used
        node.parent.children[upper.token_ids[:PAGE_SIZE]] = upper
        node.token_ids, node.pages, node.parent = node.token_ids[cut:], node.pages[num_pages:], upper
        upper.children[node.token_ids[:PAGE_SIZE]] = node
        return upper

    def _offer(self, node: Segment) -> None:
        """Make an unheld leaf evictable; a namespace that has become empty is forgotten."""
        if node.ref_count or node.children:
            return
        if node.parent is None:
            del self._roots[node.namespace]
        else:
            heapq.heappush(self._evictable, (node.last_used, next(self._clock), node))

    def _evict(self, count: int) -> None:
        """Free at least `count` cached pages (there are as many), from the ends of the least recently used leaves."""
        while count > 0:
            last_used, _, node = heapq.heappop(self._evictable)
            if node.ref_count or node.children or node.last_used != last_used or not node.pages:
                continue
            assert node.parent is not None
            taken = node.pages[max(0, len(node.pages) - count) :]
            first_page = node.token_ids[:PAGE_SIZE]
            del node.pages[len(node.pages) - len(taken) :]
            node.token_ids = node.token_ids[: len(node.pages) * PAGE_SIZE]
            self.num_cached -= len(taken)
            count -= len(taken)
            self.free(taken)
            if not node.pages:
                del node.parent.children[first_page]
                self._offer(node.parent)
            else:
                self._offer(node)


def path_pages(leaf: Segment) -> list[int]:
    """The pages from the root to `leaf`, in order of position."""
    nodes = list(leaf.up_to_root())
    return [page for node in reversed(nodes) for page in node.pages]


def _common_pages(node: Segment, token_ids: Sequence[int], position: int, limit: int) -> int:
    """How many leading pages of `node` hold the tokens from `position` on (the first is known to)."""
    num_pages = 1
    while num_pages < len(node.pages) and position + (num_pages + 1) * PAGE_SIZE <= limit:
        start = num_pages * PAGE_SIZE
        span = tuple(token_ids[position + start : position + start + PAGE_SIZE])
        if node.token_ids[start : start + PAGE_SIZE] != span:
            break
        num_pages += 1
    return num_pages
