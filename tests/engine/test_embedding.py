"""Which inputs make a batch: by whose turn it is, by length, and beside generation."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from engine.api import Embedding, EmbeddingFailed, EmbeddingInfo, EmbedRequest
from engine.embedding import DropEmbedding, EmbeddingJob, EmbeddingSteps
from engine.stats import Histogram


class Lengths:
    """A vector says how long its input is. batches: the lengths of each."""

    info = EmbeddingInfo("e")

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.is_full = False

    def embed(self, batch: Sequence[EmbedRequest]) -> list[array[float] | None]:
        if self.is_full:
            raise MemoryError
        self.batches.append([len(request.token_ids) for request in batch])
        return [array("f", [len(request.token_ids)]) if request.token_ids[0] else None for request in batch]


def steps(max_tokens: int) -> tuple[EmbeddingSteps, Lengths]:
    embedder = Lengths()
    return EmbeddingSteps(embedder, max_tokens, Histogram([1.0])), embedder


def job(owner: str, *lengths: int, first: int = 1) -> EmbeddingJob:
    return EmbeddingJob([EmbedRequest((first, *[1] * (length - 1)), owner=owner) for length in lengths])


def run(stepped: EmbeddingSteps) -> None:
    while stepped.step(beside_generation=False) is not None:
        pass
    assert not stepped.has_work


def test_a_batch_is_of_like_lengths_and_no_larger_than_it_may_be_when_padded() -> None:
    stepped, embedder = steps(100)
    stepped.handle(job("a", 3, 50, 4, 49, 2, 99))
    run(stepped)
    assert embedder.batches == [[99], [50, 49], [4, 3, 2]]


def test_an_input_larger_than_a_batch_makes_one() -> None:
    stepped, embedder = steps(10)
    stepped.handle(job("a", 30, 30))
    run(stepped)
    assert embedder.batches == [[30], [30]]


def test_several_callers_share_a_batch_unless_it_would_be_padding_for_the_most_part() -> None:
    stepped, embedder = steps(100)
    for owner in ("a", "b", "c"):
        stepped.handle(job(owner, 10, 9))
    stepped.handle(job("d", 1))
    run(stepped)
    assert embedder.batches == [[10, 9, 10, 9, 10, 9, 1]]
    stepped.handle(job("a", 80))
    stepped.handle(job("b", 1))
    run(stepped)
    assert embedder.batches[1:] == [[80], [1]], "80 and 1 would be 79 of padding"


def test_owners_take_turns_and_so_do_the_requests_of_one() -> None:
    stepped, embedder = steps(10)
    for owner, length in (("a", 10), ("a", 9), ("b", 8)):
        stepped.handle(job(owner, *[length] * 3))
    run(stepped)
    assert embedder.batches == [[10], [8], [9], [8], [10], [8], [9], [10], [9]]


def test_what_is_dropped_is_not_computed() -> None:
    stepped, embedder = steps(10)
    left, kept = job("a", 10, 10, 10), job("a", 9)
    stepped.handle(left)
    stepped.handle(kept)
    assert stepped.step(beside_generation=False) == [(left, 0, Embedding(array("f", [10])))]
    stepped.handle(DropEmbedding(left))
    stepped.handle(DropEmbedding(left))
    run(stepped)
    assert embedder.batches == [[10], [9]]


def test_beside_generation_a_batch_is_small_and_waits_as_long_as_the_last_one_took() -> None:
    stepped, embedder = steps(40)
    stepped.handle(job("a", *[10] * 8))
    assert stepped.step(beside_generation=True) is not None
    assert embedder.batches == [[10]]
    stepped._resume_at += 3600  # as if it had taken an hour
    assert stepped.step(beside_generation=True) is None
    assert stepped.has_work
    assert stepped.step(beside_generation=False) is not None, "nothing else is there to be held up"
    assert embedder.batches == [[10], [10] * 4]


def test_one_input_may_fail_and_the_others_of_its_batch_do_not() -> None:
    stepped, embedder = steps(100)
    bad, good = job("a", 5, first=0), job("b", 5)
    stepped.handle(bad)
    stepped.handle(good)
    (first, second) = stepped.step(beside_generation=False) or []
    assert first[0] is bad and isinstance(first[2], EmbeddingFailed)
    assert second == (good, 0, Embedding(array("f", [5])))
    embedder.is_full = True
    stepped.handle(good := job("b", 5))
    (failed,) = stepped.step(beside_generation=False) or []
    assert failed[0] is good and isinstance(failed[2], EmbeddingFailed)
