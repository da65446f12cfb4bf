"""What only completions have: echo and best_of."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from engine.fake import FakeEngine
from service.errors import ApiError
from service.infill import infilled
from service.tokenizer import ByteTokenizer

from .apps import SETTINGS, Client, serving
from .folding import same_both_ways, whole

PATH = "/v1/completions"
BODY = {"model": "org/m", "prompt": "hi", "max_tokens": 4, "seed": 0}
MEANS = {0: -3.0, 1: -1.0, 2: -2.0, 3: -4.0}


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    engine = FakeEngine(SETTINGS.engine_config(), logprob_rule=lambda seed, position: MEANS[seed] + position % 2)
    with serving(engine=engine) as client:
        yield client


def test_the_best_by_mean_logprob_come_first_and_count_from_0(client: Client) -> None:
    drawn = {choice["index"]: choice["text"] for choice in whole(client, PATH, BODY | {"n": 4})["choices"]}
    answer = whole(client, PATH, BODY | {"n": 2, "best_of": 4, "prompt": ["hi", "ho"]})
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert [choice["text"] for choice in answer["choices"]] == [drawn[1], drawn[2]] * 2
    assert answer["usage"]["completion_tokens"] == 2 * 4 * 4, "all that was drawn counts"
    assert all(choice["logprobs"] is None for choice in answer["choices"])


def test_best_of_n_is_n(client: Client) -> None:
    plain = whole(client, PATH, BODY | {"n": 2})
    same = whole(client, PATH, BODY | {"n": 2, "best_of": 2})
    assert same["choices"] == plain["choices"]


@pytest.mark.parametrize("stop", [None, "ab", "kl"])
def test_echo_puts_the_prompt_before_each_choice_and_stops_in_the_answer_only(client: Client, stop: str | None) -> None:
    for prompt, text in (("kl🧪<|eos|>", "kl🧪<|eos|>"), ([107, 108, 256], "kl<|eos|>"), (["a", "kl"], None)):
        body = BODY | {"prompt": prompt, "n": 2, "stop": stop}
        plain = whole(client, PATH, body)["choices"]
        echoed = same_both_ways(client, PATH, body | {"echo": True})
        texts = [text] * 2 if text is not None else ["a", "a", "kl", "kl"]
        assert [choice["text"] for choice in echoed] == [
            before + choice["text"] for before, choice in zip(texts, plain, strict=True)
        ]
        assert [choice["stop_reason"] for choice in echoed] == [choice["stop_reason"] for choice in plain]


def test_an_answer_stands_between_prompt_and_suffix(client: Client) -> None:
    for prompt in ("kl", [107, 108]):
        body = BODY | {"prompt": prompt, "suffix": "\u00e9", "return_token_ids": True, "n": 2}
        for choice in same_both_ways(client, PATH, body):
            assert choice["prompt_token_ids"] == [259, 107, 108, 260, *"\u00e9".encode(), 261]


def test_a_suffix_needs_tokens_for_it() -> None:
    class Plain(ByteTokenizer):
        special_spellings = frozenset({"<fim_prefix>", "<fim_suffix>"})

    with pytest.raises(ApiError) as caught:
        infilled([1], "x", Plain())
    assert caught.value.info.param == "suffix"
