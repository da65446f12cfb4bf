"""Log probabilities of prompts: `echo` with `logprobs`, as evaluation harnesses read it, and `prompt_logprobs`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from engine.fake import FakeEngine
from service.completion_request import _echo
from service.tokenizer import ByteTokenizer

from .apps import SETTINGS, Client, check_error, serving
from .folding import chunks_of, same_both_ways, whole

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
BODY: dict[str, Any] = {"model": "org/m", "prompt": "kl\u00e9m", "max_tokens": 3, "seed": 0, "n": 2, "temperature": 0}
TOKENS = ["k", "l", "bytes:\\xc3", "bytes:\\xa9", "m"]
OFFSETS = [0, 1, 2, 2, 3]


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    engine = FakeEngine(SETTINGS.engine_config(), logprob_rule=lambda seed, position: -0.5 * (position + 1))
    with serving(engine=engine) as client:
        yield client


@pytest.mark.parametrize("k", [0, 1, 3])
@pytest.mark.parametrize("prompt", ["kl\u00e9m", list("kl\u00e9m".encode())])
def test_echo_has_the_logprobs_of_the_prompt_before_the_answers(client: Client, k: int, prompt: Any) -> None:
    for choice in same_both_ways(client, COMPLETIONS, BODY | {"prompt": prompt, "echo": True, "logprobs": k}):
        logprobs, answer = choice["logprobs"], list(choice["text"].removeprefix("kl\u00e9m"))
        assert len(answer) == 3
        assert logprobs["tokens"] == TOKENS + answer
        assert logprobs["token_logprobs"] == [None, -1, -2, -3, -4, -0.5, -1, -1.5]
        assert logprobs["text_offset"] == [*OFFSETS, 4, 5, 6]
        if not k:
            assert logprobs["top_logprobs"] is None
            continue
        assert logprobs["top_logprobs"][0] is None
        for token, logprob, top in list(zip(logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True))[1:]:  # fmt: skip  # noqa: E501
            assert (len(top), max(top, key=top.get), top[token]) == (k, token, logprob)


def test_max_tokens_0_answers_with_the_prompt_alone(client: Client) -> None:
    body = BODY | {"prompt": ["kl", "m"], "echo": True, "logprobs": 1, "max_tokens": 0}
    choices = same_both_ways(client, COMPLETIONS, body)
    assert [choice["text"] for choice in choices] == ["kl", "kl", "m", "m"]
    assert [choice["logprobs"]["token_logprobs"] for choice in choices] == [[None, -1], [None, -1], [None], [None]]
    assert {choice["finish_reason"] for choice in choices} == {"length"}
    assert whole(client, COMPLETIONS, body)["usage"]["completion_tokens"] == 0
    assert [choice["text"] for choice in whole(client, COMPLETIONS, BODY | {"echo": True, "max_tokens": 0})["choices"]] == ["kl\u00e9m"] * 2  # fmt: skip  # noqa: E501


def test_a_prompt_as_long_as_the_context_can_be_scored(client: Client) -> None:
    body = BODY | {"prompt": [100] * 256, "echo": True, "logprobs": 0}
    (first, _) = whole(client, COMPLETIONS, body | {"max_tokens": 0})["choices"]
    assert len(first["logprobs"]["tokens"]) == 256
    check_error(client.post(COMPLETIONS, json=body | {"max_tokens": 1}), 400, code="context_length_exceeded")


def test_best_of_ranks_by_the_answers_alone(client: Client) -> None:
    body = BODY | {"echo": True, "logprobs": 0, "n": 1, "best_of": 3, "fan_out": None}
    (choice,) = whole(client, COMPLETIONS, body)["choices"]
    assert len(choice["logprobs"]["tokens"]) == len(TOKENS) + 3
    whole(client, COMPLETIONS, body | {"max_tokens": 0})


def test_a_token_before_the_text_has_its_entry_and_no_room() -> None:
    class Starting(ByteTokenizer):
        """Its token 1 stands before every prompt."""

        def token_bytes(self, token_id: int) -> bytes:
            return b"<s>" if token_id == 1 else super().token_bytes(token_id)

    echo = _echo("ab", [1, *b"ab"], Starting(), True)
    assert (echo.text, echo.offsets) == ("ab", (0, 0, 1))
    assert _echo([1, *b"ab"], [1, *b"ab"], Starting(), True).offsets == (0, 3, 4)


@pytest.mark.parametrize("k", [0, 2])
def test_prompt_logprobs_are_by_token_id_as_vllm_has_them(client: Client, k: int) -> None:
    expected: list[Any] = [None]
    for place, token_id in enumerate(b"lm", start=1):
        best = [token_id, token_id + 1][: max(1, k)]
        expected.append({str(t): {"logprob": -place - n, "rank": n + 1 if k else None, "decoded_token": chr(t)} for n, t in enumerate(best)})  # fmt: skip  # noqa: E501
    body = BODY | {"prompt": "klm", "prompt_logprobs": k}
    for choice in same_both_ways(client, COMPLETIONS, body):
        assert choice["prompt_logprobs"] == expected
        assert choice["logprobs"] is None and len(choice["text"]) == 3
    chat = {"model": "org/m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, "n": 3}
    told = whole(client, CHAT, chat | {"prompt_logprobs": k})["prompt_logprobs"]
    assert told[0] is None and all(len(entry) == max(1, k) for entry in told[1:])
    first = [chunk for chunk in chunks_of(client, CHAT, chat | {"prompt_logprobs": k}) if "prompt_logprobs" in chunk]
    assert [chunk["choices"][0]["index"] for chunk in first] == [0, 1, 2]
    assert all(chunk["prompt_logprobs"] == told for chunk in first)
    assert "prompt_logprobs" not in whole(client, CHAT, chat)


def test_each_of_two_wishes_gets_its_own_number(client: Client) -> None:
    body = BODY | {"prompt": "klm", "echo": True, "logprobs": 1, "prompt_logprobs": 3}
    for choice in same_both_ways(client, COMPLETIONS, body):
        assert [len(top) for top in choice["logprobs"]["top_logprobs"][1:]] == [1] * 5
        assert [len(entry) for entry in choice["prompt_logprobs"][1:]] == [3, 3]
