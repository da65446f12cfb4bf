"""All choices of a request are admitted or none, while clients race for the last places."""

from __future__ import annotations

import json
import threading
from typing import Any

import openai
import pytest

from tests.e2e.answers import ask, check_error, fold, letters, read_body
from tests.e2e.fixtures import MODEL, PLACES, SLOTS, WORKERS, fake_spec
from tests.e2e.server import Server, Servers
from tests.e2e.wire import Wire

PATH = "/v1/completions"
TIGHT = {"CHORUS_MAX_NUM_SEQS": 4, "CHORUS_MAX_QUEUED_SEQS": 0}
BODY: dict[str, Any] = {"model": MODEL, "prompt": "abc", "n": 3, "seed": 1, "max_tokens": 40}


@pytest.fixture(params=WORKERS)
def tight(request: pytest.FixtureRequest, servers: Servers) -> Server:
    """Room for four choices, and no queue."""
    return servers.get(fake_spec("service", request.param, **TIGHT))


def test_race_for_four_places_gives_three_choices_or_a_429(tight: Server) -> None:
    expected = [letters(1 + choice, 3, 40) for choice in range(3)]
    statuses = []
    with Wire(tight) as first, Wire(tight) as second:
        for _ in range(100):
            first.post(PATH, BODY)
            second.post(PATH, BODY | {"stream": True})
            for wire in (first, second):
                head = wire.read_head()
                statuses.append(head.status)
                if head.status == 429:
                    assert int(head.headers["retry-after"]) >= 1
                    assert json.loads(b"".join(wire.pieces()))["error"]["code"] == "rate_limit_exceeded"
                else:
                    whole = fold(wire.events(), 3) if wire is second else read_body(b"".join(wire.pieces()))
                    assert whole.texts == expected
    tight.wait_idle()
    assert statuses.count(200) >= 100
    assert set(statuses) <= {200, 429}


def test_request_that_does_not_fit_takes_no_place_from_one_that_does(tight: Server) -> None:
    with Wire(tight) as first:
        first.post(PATH, BODY | {"max_tokens": 500_000})
        tight.wait_metric("chorus_sequences_running", lambda value: value == 3)
        check_error(tight.post(PATH, BODY | {"stream": True}), 429, code="rate_limit_exceeded")
        check_error(tight.post(PATH, BODY | {"n": 5}), 400, "n")
        check_error(tight.post(PATH, BODY | {"n": 1, "prompt": ["a"] * 5}), 400, "prompt")
        assert ask(tight, BODY | {"n": 1, "max_tokens": 2}).texts == [letters(1, 3, 2)]
        assert tight.metric("chorus_sequences_running") == 3
    tight.wait_idle()


def test_official_client_raises_its_own_error_for_a_full_queue(tight: Server) -> None:
    with Wire(tight) as first, openai.OpenAI(base_url=f"{tight.url}/v1", api_key="none", max_retries=0) as client:
        first.post(PATH, BODY | {"max_tokens": 500_000})
        tight.wait_metric("chorus_sequences_running", lambda value: value == 3)
        with pytest.raises(openai.RateLimitError) as refused:
            client.completions.create(model=MODEL, prompt="abc", n=2)
    assert refused.value.code == "rate_limit_exceeded"
    tight.wait_idle()


def test_crowd_gets_its_own_choices_or_429s(fake: Server) -> None:
    """24 clients with 5 choices each for 68 places, of which 4 run."""
    found: dict[int, Any] = {}

    def client(seed: int, stream: bool) -> None:
        with Wire(fake) as wire:
            wire.post(PATH, BODY | {"n": 5, "seed": seed, "max_tokens": 50, "stream": stream})
            head = wire.read_head()
            if head.status != 200:
                found[seed] = json.loads(b"".join(wire.pieces()))["error"]["code"]
            elif stream:
                found[seed] = fold(wire.events(), 5).texts
            else:
                found[seed] = read_body(b"".join(wire.pieces())).texts

    threads = [threading.Thread(target=client, args=(100 * k, k % 2 == 0)) for k in range(24)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 24
    for seed, texts in found.items():
        assert texts in ("rate_limit_exceeded", [letters(seed + k, 3, 50) for k in range(5)])
    fake.wait_idle()


def test_as_many_choices_as_there_are_places_run_in_waves(fake: Server) -> None:
    body = BODY | {"n": PLACES, "max_tokens": 6}
    assert ask(fake, body).texts == [letters(1 + k, 3, 6) for k in range(PLACES)]
    assert PLACES > SLOTS
    check_error(fake.post(PATH, body | {"n": PLACES + 1}), 400, "n")
    fake.wait_idle()


def test_requests_are_counted_once_and_their_choices_all(one_fake: Server) -> None:
    names = ('chorus_requests_total{outcome="ok"}', "chorus_choices_total", "chorus_generation_tokens_total")
    before = one_fake.metrics()
    for stream in (False, True):
        with Wire(one_fake) as wire:
            wire.post(PATH, BODY | {"n": 5, "max_tokens": 7, "stream": stream})
            assert wire.read().status == 200
    one_fake.wait_metric(names[0], lambda value: value == before[names[0]] + 2)
    after = one_fake.metrics()
    assert [after[name] - before[name] for name in names] == [2, 10, 70]
