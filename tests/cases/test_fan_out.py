"""C01 to C07: choices, indices, usage, seeds and determinism, on a real server and a random float32 model."""

from __future__ import annotations

import threading
from typing import Any

import httpx
import pytest

from tests.e2e.answers import ask, ask_streamed, check_error
from tests.e2e.server import Server

BIRDS = [{"role": "user", "content": "list three birds"}]


def chat(server: Server, **fields: Any) -> dict[str, Any]:
    return {"model": server.model, "messages": BIRDS, "max_tokens": 24, "ignore_eos": True, **fields}


def completion(server: Server, **fields: Any) -> dict[str, Any]:
    return {"model": server.model, "prompt": "hi there", "max_tokens": 8, "ignore_eos": True, **fields}


def test_c01_a_stream_sorted_by_index_is_the_body(one_tiny: Server) -> None:
    """ask_streamed checks that every index has its own role, text and exactly one end."""
    body = chat(one_tiny, n=4, temperature=1, seed=11)
    assert ask_streamed(one_tiny, body).choices == ask(one_tiny, body).choices


def test_c01_prompts_of_a_list_have_indices_of_their_own(one_tiny: Server) -> None:
    body = completion(one_tiny, prompt=["aa", "bb", "cc"], n=1, seed=3)
    folded = ask_streamed(one_tiny, body)
    assert folded.choices == ask(one_tiny, body).choices
    alone = [ask(one_tiny, completion(one_tiny, prompt=prompt, seed=3)).texts[0] for prompt in ("aa", "bb", "cc")]
    assert folded.texts == alone


@pytest.mark.parametrize("prompt", ["hi there", ["hi there", "and here"]])
def test_c02_usage_counts_a_prompt_once_and_every_choice(one_tiny: Server, prompt: Any) -> None:
    num_prompts = 1 if isinstance(prompt, str) else len(prompt)
    single = ask(one_tiny, completion(one_tiny, prompt=prompt)).usage
    three = completion(one_tiny, prompt=prompt, n=3)
    for usage in (ask(one_tiny, three).usage, ask_streamed(one_tiny, three).usage):
        assert usage is not None and single is not None
        assert usage.prompt_tokens == single.prompt_tokens
        assert usage.completion_tokens == 3 * 8 * num_prompts


def test_c03_choice_i_belongs_to_prompt_i_div_n(one_tiny: Server) -> None:
    body = completion(one_tiny, prompt=["alpha", "beta"], n=2, max_tokens=3, seed=5)
    texts = ask(one_tiny, body).texts
    for index, prompt in enumerate(("alpha", "beta")):
        assert texts[2 * index : 2 * index + 2] == ask(one_tiny, {**body, "prompt": prompt}).texts


def test_c03_token_ids_and_lists_of_them_are_prompts_too(one_tiny: Server) -> None:
    ids = ask(one_tiny, completion(one_tiny, prompt=[100, 101, 102], n=2, seed=1)).texts
    lists = ask(one_tiny, completion(one_tiny, prompt=[[100, 101, 102], [103]], n=2, seed=1)).texts
    assert len(lists) == 4 and lists[:2] == ids


def _race(server: Server, body: dict[str, Any]) -> list[httpx.Response]:
    """The answers to the same request, sent twice at once."""
    responses: list[httpx.Response] = []
    racers = [threading.Thread(target=lambda: responses.append(server.post("/v1/completions", body))) for _ in "ab"]
    for racer in racers:
        racer.start()
    for racer in racers:
        racer.join()
    assert len(responses) == 2
    return responses


def test_c04_choices_are_admitted_together_or_not_at_all(cramped: Server) -> None:
    """Two requests of 40 choices race for 68 places: one gets all of its choices, the other a 429."""
    body = completion(cramped, n=40, max_tokens=12)
    for _ in range(5):
        responses = _race(cramped, body)
        for response in responses:
            if response.status_code == 200:
                assert len(response.json()["choices"]) == 40
            else:
                check_error(response, 429, code="rate_limit_exceeded")
                assert int(response.headers["retry-after"]) >= 1
        assert any(response.status_code == 200 for response in responses)
        cramped.wait_idle()


def test_c04_a_request_counts_once_whatever_n_is(one_tiny: Server) -> None:
    names = ('chorus_requests_total{outcome="ok"}', "chorus_choices_total")
    before = [one_tiny.metric(name) for name in names]
    ask(one_tiny, completion(one_tiny, n=5))
    assert [one_tiny.metric(name) for name in names] == [before[0] + 1, before[1] + 5]


def test_c05_choices_differ_and_a_seed_repeats_them(one_tiny: Server) -> None:
    hot = chat(one_tiny, n=8, temperature=1.2, top_p=1, max_tokens=32)
    assert len(set(ask(one_tiny, hot).texts)) >= 6
    assert ask(one_tiny, hot).texts != ask(one_tiny, hot).texts
    seeded = {**hot, "seed": 42}
    texts = ask(one_tiny, seeded).texts
    assert texts == ask(one_tiny, seeded).texts
    assert texts[0] == ask(one_tiny, {**seeded, "n": 1}).texts[0]


@pytest.mark.parametrize("make", [chat, completion], ids=["chat", "completion"])
@pytest.mark.parametrize(
    ("seed", "status"),
    [
        *[(-1, 400), (0, 200), (-(2**63), 400), (2**63 - 1, 200), (2**63, 400), (2**64, 400)],
        *[(1.5, 400), ("7", 400), (True, 400), (None, 200)],
    ],
)
def test_c06_a_seed_is_checked_before_anything_draws_from_it(
    one_tiny: Server, make: Any, seed: object, status: int
) -> None:
    body = make(one_tiny, n=3, seed=seed, max_tokens=4)
    if status == 400:
        path = "/v1/chat/completions" if make is chat else "/v1/completions"
        check_error(one_tiny.post(path, body), 400, "seed")
    elif seed is not None:
        assert ask(one_tiny, body).texts == ask(one_tiny, body).texts
    ask(one_tiny, completion(one_tiny, max_tokens=1))


def test_c07_greedy_tokens_do_not_depend_on_what_runs_beside_them(one_tiny: Server) -> None:
    """The promise of the torch path: equal tokens in float32. The native step's bits are held in tests/native."""
    body = completion(one_tiny, prompt="the same prompt", temperature=0, max_tokens=20)
    alone = ask(one_tiny, body).texts
    assert ask(one_tiny, body).texts == alone, "a warm cache changed it"
    neighbours = [
        threading.Thread(target=ask, args=(one_tiny, completion(one_tiny, n=8, max_tokens=5 + 7 * k, prompt="x" * k)))
        for k in range(1, 8)
    ]
    for neighbour in neighbours:
        neighbour.start()
    try:
        for _ in range(4):
            assert ask(one_tiny, body).texts == alone
    finally:
        for neighbour in neighbours:
            neighbour.join()
