"""See conftest.py."""

DEFAULT = "SmolLM2-135M-Instruct"
EMBEDDER = "all-MiniLM-L6-v2"
QUESTION = "What is the capital of France?"
PARIS = "The capital of France is Paris."

NEAR_AND_FAR = ["The cat sits on the mat.", "A kitten rests on a rug.", "Shares of the bank fell today."]
"""The first two mean nearly the same."""


def cosine(a: list[float], b: list[float]) -> float:
    """Of vectors of length 1."""
    return sum(x * y for x, y in zip(a, b, strict=True))
