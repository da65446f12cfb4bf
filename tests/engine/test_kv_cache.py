"""The KV tree under random use: every page has one owner, and what is matched is what was put in."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.kv_cache import KVCache, Segment, path_pages
from engine.plan import PAGE_SIZE

NUM_PAGES = 24


def tokens(pages: list[int]) -> list[int]:
    """A prompt of whole pages, written as one small number per page."""
    return [number * PAGE_SIZE + offset for number in pages for offset in range(PAGE_SIZE)]


class TreeMachine(RuleBasedStateMachine):
    """Model: what each page number was written with, and the paths that are held."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = KVCache(NUM_PAGES)
        self.paths: list[tuple[Segment, str, list[int]]] = []
        self.private: list[int] = []
        self.written: dict[int, tuple[str, tuple[int, ...]]] = {}  # page -> the namespace and all tokens up to its end

    @rule(prompt=st.lists(st.integers(0, 2), max_size=8), namespace=st.sampled_from(["", "other"]))
    def start(self, prompt: list[int], namespace: str) -> None:
        leaf = self.cache.match(namespace, tokens(prompt), len(prompt) * PAGE_SIZE)
        shared = path_pages(leaf)
        for depth, page in enumerate(shared):
            assert self.written[page] == (namespace, tuple(prompt[: depth + 1])), "a match gave another prompt's page"
        pages = self.cache.allocate(len(prompt) - len(shared))
        if pages is None:
            self.cache.release(leaf)
            return
        for depth, page in enumerate(pages, len(shared)):
            self.written[page] = (namespace, tuple(prompt[: depth + 1]))
        leaf = self.cache.extend(leaf, tokens(prompt[len(shared) :]), pages, origin=0)
        assert [self.written[page][1] for page in path_pages(leaf)] == [
            tuple(prompt[: d + 1]) for d in range(len(prompt))
        ]
        self.paths.append((leaf, namespace, prompt))

    @precondition(lambda self: self.paths)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        leaf, namespace, prompt = data.draw(st.sampled_from(self.paths))
        self.cache.hold(leaf)
        self.paths.append((leaf, namespace, prompt))

    @precondition(lambda self: self.paths)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        leaf, _, _ = self.paths.pop(data.draw(st.integers(0, len(self.paths) - 1)))
        self.cache.release(leaf)

    @rule(count=st.integers(0, NUM_PAGES + 1))
    def allocate(self, count: int) -> None:
        available = self.cache.num_available
        pages = self.cache.allocate(count)
        assert (pages is None) == (count > available)
        self.private += pages or []

    @rule()
    def free(self) -> None:
        self.cache.free(self.private)
        self.private.clear()

    @invariant()
    def is_sound(self) -> None:
        self.cache.check()
        held = {page for leaf, _, _ in self.paths for page in path_pages(leaf)}
        assert self.cache.num_held == len(held) + len(self.private)

    def teardown(self) -> None:
        while self.paths:
            self.cache.release(self.paths.pop()[0])
        self.free()
        self.cache.check()
        assert self.cache.num_held == 0


TestTree = TreeMachine.TestCase
TestTree.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def test_least_recently_used_leaf_goes_first() -> None:
    cache = KVCache(3)
    for number in (1, 2, 3):
        pages = cache.allocate(1)
        assert pages is not None
        leaf = cache.extend(cache.match("", [], 0), tokens([number]), pages, origin=0)
        cache.release(leaf)
    cache.release(cache.match("", tokens([1]), PAGE_SIZE))  # used again, so 2 is the oldest now
    assert cache.allocate(1) is not None
    assert [len(path_pages(cache.match("", tokens([n]), PAGE_SIZE))) for n in (1, 2, 3)] == [1, 0, 1]


def test_without_prefix_caching_nothing_stays() -> None:
    cache = KVCache(4, prefix_caching=False)
    pages = cache.allocate(2)
    assert pages is not None
    cache.release(cache.extend(cache.match("", [], 0), tokens([1, 2]), pages, origin=0))
    assert (cache.num_free, cache.num_cached) == (4, 0)
    assert path_pages(cache.match("", tokens([1, 2]), 2 * PAGE_SIZE)) == []


def test_a_pool_without_pages_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one page"):
        KVCache(0)
