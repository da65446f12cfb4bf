"""`kv_transfer_params`, in which vLLM's connectors say where keys and values are: in with a request, out per choice."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from engine.thread import EngineThread
from tests.contract.runners import SeededRunner

from .apps import SETTINGS, Client, check_error, serving
from .folding import chunks_of, whole

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
PARAMS = {"do_remote_decode": True, "remote": {"host": "prefill-0", "port": 5600}}
BODIES: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"model": "org/m", "prompt": "kl", "max_tokens": 3, "seed": 4},
    CHAT: {"model": "org/m", "messages": [{"role": "user", "content": "kl"}], "max_tokens": 3, "seed": 4},
}
both = pytest.mark.parametrize("path", [COMPLETIONS, CHAT])


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    with serving() as client:
        yield client


@both
def test_each_choice_ends_with_its_own(client: Client, path: str) -> None:
    body = BODIES[path] | {"n": 2, "kv_transfer_params": PARAMS}
    answer = whole(client, path, body)
    assert [choice["kv_transfer_params"] for choice in answer["choices"]] == [
        PARAMS | {"seed": 4},
        PARAMS | {"seed": 5},
    ]
    assert "kv_transfer_params" not in answer
    said = {
        choice["index"]: choice["kv_transfer_params"]
        for chunk in chunks_of(client, path, body)
        for choice in chunk["choices"]
        if "kv_transfer_params" in choice
    }
    assert said == {0: PARAMS | {"seed": 4}, 1: PARAMS | {"seed": 5}}


@both
def test_that_of_the_only_choice_is_the_answers_too(client: Client, path: str) -> None:
    """Where the routers of disaggregated servers look for it."""
    answer = whole(client, path, BODIES[path] | {"kv_transfer_params": PARAMS})
    assert answer["kv_transfer_params"] == answer["choices"][0]["kv_transfer_params"] == PARAMS | {"seed": 4}


@both
def test_without_it_nothing_is_said(client: Client, path: str) -> None:
    answer = whole(client, path, BODIES[path])
    assert "kv_transfer_params" not in answer | answer["choices"][0]


@both
def test_engine_that_moves_nothing_refuses_it_by_name(path: str) -> None:
    engine = EngineThread(SETTINGS.engine_config(), lambda _: SeededRunner(num_pages=64, max_model_len=256))
    with serving(engine=engine) as client:
        refused = client.post(path, json=BODIES[path] | {"kv_transfer_params": PARAMS})
        check_error(refused, 400, "kv_transfer_params")
