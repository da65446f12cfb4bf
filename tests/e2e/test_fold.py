"""A stream, folded, is the body that is not streamed; choice i is the answer of seed + i."""

from __future__ import annotations

from typing import Any

import pytest

from tests.e2e.answers import ask, ask_streamed, letters
from tests.e2e.fixtures import MODEL
from tests.e2e.server import Server

USER = {"role": "user", "content": "Zähle drei Vögel auf: 🦜, 鳥 und …"}
LONG_PROMPT = "The quick brown fox jumps over the lazy dog. " * 12

REQUESTS: dict[str, dict[str, Any]] = {
    "one": {"prompt": "hello"},
    "eight": {"prompt": "hello", "n": 8, "max_tokens": 24},
    "no seed, greedy": {"prompt": "hello", "seed": None, "temperature": 0, "n": 2},
    "chat": {"messages": [USER], "n": 3},
    "chat of parts": {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}], "n": 2},
    "chat of turns": {"messages": [USER, {"role": "assistant", "content": "eins"}, USER], "n": 2, "max_tokens": 40},
    "unicode": {"prompt": "日本語と\U0001f9ea emoji", "n": 3, "max_tokens": 48},
    "list of texts": {"prompt": ["alpha", "beta", "gamma"], "n": 2},
    "token ids": {"prompt": [40, 41, 42, 43], "n": 2},
    "list of token ids": {"prompt": [[40, 41], [50, 51, 52]], "n": 2},
    "one list of token ids": {"prompt": [[40, 41]]},
    "stop": {"prompt": "hello", "n": 4, "max_tokens": 60, "stop": ["e", "th"]},
    "one stop": {"prompt": "hello", "n": 4, "max_tokens": 60, "stop": "a"},
    "stop token ids": {"prompt": "hello", "n": 4, "max_tokens": 60, "stop_token_ids": [100, 101, 102, 103, 104, 105]},
    "penalties": {
        "prompt": LONG_PROMPT,
        "n": 2,
        "frequency_penalty": 1.5,
        "presence_penalty": -1,
        "repetition_penalty": 1.3,
    },
    "top_k": {"prompt": "hello", "n": 2, "top_k": 5, "temperature": 1.7},
    "top_p": {"prompt": "hello", "n": 2, "top_p": 0.4},
    "min_p": {"prompt": "hello", "n": 2, "min_p": 0.05, "temperature": 1.3},
    "logit_bias": {"prompt": "hello", "n": 2, "logit_bias": {"104": 100}, "max_tokens": 5},
    "past the end": {"prompt": "hello", "n": 2, "ignore_eos": True, "max_tokens": 64},
    "min_tokens": {"prompt": "hello", "n": 4, "min_tokens": 12, "max_tokens": 40, "stop": ["e", "a", "i"]},
    "long prompt": {"prompt": LONG_PROMPT, "n": 4, "max_tokens": 20},
    "one token": {"prompt": "hello", "n": 4, "max_tokens": 1},
    "max_completion_tokens": {"messages": [USER], "n": 2, "max_completion_tokens": 7},
}


@pytest.fixture(params=REQUESTS.values(), ids=[name.replace(" ", "-") for name in REQUESTS])
def body(request: pytest.FixtureRequest) -> dict[str, Any]:
    return {"model": MODEL, "seed": 100, "max_tokens": 16} | request.param | _without_default(request.param)


def _without_default(body: dict[str, Any]) -> dict[str, Any]:
    return {"max_tokens": None} if "max_completion_tokens" in body else {}


def _without_cache(usage: Any) -> tuple[int, int]:
    """The second of two equal requests finds more in the cache."""
    return usage.prompt_tokens, usage.completion_tokens


def test_stream_says_what_the_body_says_of_a_model_with_exact_arithmetic(tiny: Server, body: dict[str, Any]) -> None:
    whole, streamed = ask(tiny, body), ask_streamed(tiny, body)
    assert streamed.choices == whole.choices
    assert _without_cache(streamed.usage) == _without_cache(whole.usage)


def test_stream_says_what_the_body_says_of_an_engine_without_a_model(one_fake: Server, body: dict[str, Any]) -> None:
    assert ask_streamed(one_fake, body) == ask(one_fake, body)


def test_choice_is_the_single_answer_of_its_seed(one_tiny: Server, body: dict[str, Any]) -> None:
    """With siblings and other prompts beside it, or alone."""
    n = body.get("n") or 1
    prompt = body.get("prompt")
    prompts = prompt if isinstance(prompt, list) and not isinstance(prompt[0], int) else [prompt]
    together = ask(one_tiny, body).choices
    for index in {0, 1, len(together) - 1} & set(range(len(together))):
        alone = body | {"n": 1}
        if body["seed"] is not None:
            alone["seed"] = body["seed"] + index % n
        if prompt is not None:
            alone["prompt"] = prompts[index // n]
        assert ask(one_tiny, alone).choices == [together[index]], f"choice {index}"


@pytest.mark.parametrize("n", range(1, 9))
def test_every_choice_and_token_is_counted(one_fake: Server, n: int) -> None:
    prompts = ["a", "bb", "ccc"]
    answer = ask_streamed(one_fake, {"model": MODEL, "prompt": prompts, "n": n, "seed": 5, "max_tokens": 9})
    assert answer.texts == [letters(5 + choice, len(prompt), 9) for prompt in prompts for choice in range(n)]
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (6, 3 * n * 9)


def test_preemption_and_waves_change_no_choice(cramped: Server, one_tiny: Server) -> None:
    """Eight choices of up to 130 tokens do not fit into eight pages, nor into four slots."""
    body = {"model": MODEL, "prompt": "x" * 40, "n": 8, "seed": 3, "max_tokens": 130, "ignore_eos": True}
    assert ask_streamed(cramped, body).choices == ask(one_tiny, body).choices
    cramped.wait_idle()


def test_what_runs_beside_it_changes_no_choice(one_tiny: Server, cramped: Server) -> None:
    """In chunks of 16 tokens on one server, whole on the other, next to other prompts and penalties."""
    long = LONG_PROMPT[:200]
    bodies = [
        {"model": MODEL, "prompt": [long, long[:100], "z"], "n": 2, "seed": 9, "max_tokens": 24},
        {"model": MODEL, "prompt": long[:150], "n": 4, "seed": 10, "temperature": 0.3, "repetition_penalty": 1.2},
    ]
    for body in bodies:
        assert ask(cramped, body).choices == ask(one_tiny, body).choices
