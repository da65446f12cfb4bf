"""What the fake engine draws for the contract tests."""

from __future__ import annotations

from engine.fake import letter_rule
from tests.contract.harness import FAILING_SEED


def failing_rule(seed: int, position: int, num_prompt_tokens: int) -> int:
    return -1 if (seed, position) == (FAILING_SEED, 2) else letter_rule(seed, position, num_prompt_tokens)
