"""Responses that are kept, over HTTP: continued, looked at, deleted, by whoever made them and nobody else."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
from openai.types.responses import ResponseItemList

from service.settings import Settings

from .apps import SETTINGS, Client, check_error, serving
from .constrained import ConstrainedEngine
from .response_folding import PATH, folded, parsed, same_both_ways, whole_response
from .test_responses import prompt_of

BODY: dict[str, Any] = {"model": "org/m", "input": "hi", "seed": 0, "max_output_tokens": 3}
GONE = "resp_" + "0" * 32


@pytest.fixture(autouse=True)
def short_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("service.response_store.LOCK_SECONDS", 0.01)


@pytest.fixture(params=["asyncio", "trio"])
def backend(request: pytest.FixtureRequest) -> Literal["asyncio", "trio"]:
    name: Literal["asyncio", "trio"] = request.param
    return name


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return replace(SETTINGS, responses_store=tmp_path / "responses.sqlite", max_model_len=2048)


@contextmanager
def keeping(
    settings: Settings, backend: Literal["asyncio", "trio"] = "asyncio"
) -> Iterator[tuple[Client, ConstrainedEngine]]:
    engine = ConstrainedEngine(settings.engine_config())
    with serving(settings, engine=engine, backend=backend) as client:
        yield client, engine


@pytest.fixture
def client(settings: Settings, backend: Literal["asyncio", "trio"]) -> Iterator[Client]:
    with keeping(settings, backend) as (client, _):
        yield client


def next_turn(answer: dict[str, Any], text: str = "more") -> dict[str, Any]:
    return BODY | {"previous_response_id": answer["id"], "input": text}


def text_of(answer: dict[str, Any]) -> str:
    text: str = answer["output"][0]["content"][0]["text"]
    return text


def test_a_conversation_goes_on_after_a_restart(settings: Settings, backend: Literal["asyncio", "trio"]) -> None:
    """Without the earlier instructions, which each request gives for itself."""
    with keeping(settings, backend) as (client, _):
        first = whole_response(client, BODY | {"instructions": "Be brief."})
        second = folded(parsed(client.post(PATH, json=next_turn(first) | {"stream": True}).text))
        assert second["previous_response_id"] == first["id"]
    with keeping(settings, backend) as (client, engine):
        whole_response(client, next_turn(second, "and more"))
        assert prompt_of(engine).split("\n") == [
            "user: hi",
            f"assistant: {text_of(first)}",
            "user: more",
            f"assistant: {text_of(second)}",
            "user: and more",
            "assistant: ",
        ]


def test_what_is_kept_is_the_answer(client: Client) -> None:
    whole = whole_response(client, BODY | {"metadata": {"a": "b"}})
    streamed = folded(parsed(client.post(PATH, json=BODY | {"stream": True}).text))
    for answer in (whole, streamed):
        assert answer["store"] is True
        kept = client.get(f"{PATH}/{answer['id']}", params={"include[]": "message.output_text.logprobs"})
        assert kept.json() == answer
    check_error(client.get(f"{PATH}/{whole['id']}", params={"stream": "true"}), 400, "stream")
    check_error(client.get(f"{PATH}/{whole['id']}", params={"mood": "x"}), 400, "mood")


def test_what_is_not_to_be_kept_is_not(client: Client) -> None:
    answer = whole_response(client, BODY | {"store": False})
    assert answer["store"] is False
    check_error(client.get(f"{PATH}/{answer['id']}"), 404, code="not_found")
    check_error(client.post(PATH, json=next_turn(answer)), 404, "previous_response_id")
    same_both_ways(client, next_turn(whole_response(client, BODY)) | {"store": False})


def test_input_items_are_listed_in_pages(client: Client) -> None:
    items: list[dict[str, Any]] = [
        *({"role": "user", "content": f"question {number}"} for number in range(5)),
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "t"}]},
        {"role": "assistant", "content": "yes"},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "7"},
    ]
    answer = whole_response(client, BODY | {"input": items})
    place = f"{PATH}/{answer['id']}/input_items"
    whole = client.get(place, params={"order": "asc", "limit": 100}).json()
    ResponseItemList.model_validate(whole)
    assert [item["type"] for item in whole["data"]] == [item.get("type", "message") for item in items]
    assert (whole["first_id"], whole["last_id"]) == (whole["data"][0]["id"], whole["data"][-1]["id"])
    assert not whole["has_more"]
    found: list[dict[str, Any]] = []
    page: dict[str, Any] = {"has_more": True}
    while page["has_more"]:
        page = client.get(place, params={"limit": 2, **({"after": found[-1]["id"]} if found else {})}).json()
        found += page["data"]
    assert found == whole["data"][::-1], "the newest first, unless told otherwise"
    for name, value in {"limit": "0", "order": "up", "after": "msg_1"}.items():
        check_error(client.get(place, params={name: value}), 400, name)


def test_an_item_can_be_referred_to(settings: Settings) -> None:
    with keeping(settings) as (client, engine):
        answer = whole_response(client, BODY)
        (asked,) = client.get(f"{PATH}/{answer['id']}/input_items").json()["data"]
        items = [{"type": "item_reference", "id": asked["id"]}, {"id": answer["output"][0]["id"]}]
        referring = whole_response(client, BODY | {"input": [*items, {"role": "user", "content": "x"}]})
        assert prompt_of(engine).split("\n")[:2] == ["user: hi", f"assistant: {text_of(answer)}"]
        listed = client.get(f"{PATH}/{referring['id']}/input_items", params={"order": "asc"}).json()["data"]
        assert [item["id"] for item in listed[:2]] == [item["id"] for item in (asked, answer["output"][0])]
        client.delete(f"{PATH}/{answer['id']}")
        whole_response(client, next_turn(referring))
        assert prompt_of(engine).split("\n")[:3] == ["user: hi", f"assistant: {text_of(answer)}", "user: x"]
        check_error(client.post(PATH, json=BODY | {"input": [{"id": "msg_1"}]}), 400, "input[0].id", "item_not_found")


def test_a_request_refers_to_so_many_responses_only(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("service.kept_responses.MAX_REFERRED", 1)
    answers = [whole_response(client, BODY) for _ in range(2)]
    items = [{"id": answer["output"][0]["id"]} for answer in answers]
    whole_response(client, BODY | {"input": [items[0], items[0]]})
    check_error(client.post(PATH, json=BODY | {"input": items}), 400, "input[1]")


def test_a_deleted_response_ends_the_conversations_that_went_on_from_it(client: Client) -> None:
    first = whole_response(client, BODY)
    second = whole_response(client, next_turn(first))
    third = whole_response(client, next_turn(second))
    deleted = client.delete(f"{PATH}/{second['id']}")
    assert deleted.json() == {"id": second["id"], "object": "response", "deleted": True}
    check_error(client.delete(f"{PATH}/{second['id']}"), 404, code="not_found")
    error = check_error(client.post(PATH, json=next_turn(third)), 404, "previous_response_id")
    assert second["id"] in error["message"]
    assert client.get(f"{PATH}/{third['id']}").json() == third
    whole_response(client, next_turn(first))


def test_a_call_that_was_cut_short_is_left_out(settings: Settings) -> None:
    call = '<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>'
    settings = replace(settings, tool_parser="hermes")
    tools = [{"type": "function", "name": "f"}]
    engine = ConstrainedEngine(settings.engine_config(), rule=lambda _, position, __: call.encode()[position])
    with serving(settings, engine=engine) as client:
        answer = whole_response(client, BODY | {"tools": tools, "max_output_tokens": call.index("1")})
        assert answer["output"][0]["status"] == "incomplete"
        whole_response(client, next_turn(answer))
        assert prompt_of(engine).split("\n") == ["user: hi", "user: more", "assistant: "]


def test_what_was_cancelled_is_kept_as_that_and_not_as_too_long(
    settings: Settings, backend: Literal["asyncio", "trio"]
) -> None:
    clients: list[Client] = []

    def rule(_: int, position: int, __: int) -> int:
        if position == 2:
            (running,) = clients[0].app.state.services.running.of("")
            running.cancel()
        return ord("a")

    engine = ConstrainedEngine(settings.engine_config(), rule=rule)
    with serving(settings, engine=engine, backend=backend) as client:
        clients.append(client)
        answer = whole_response(client, BODY | {"max_output_tokens": 100})
        assert (answer["status"], answer["end_reason"]) == ("cancelled", "cancelled")
        assert answer["incomplete_details"] is None
        assert client.get(f"{PATH}/{answer['id']}").json() == answer


def test_only_what_runs_can_be_cancelled(client: Client) -> None:
    answer = whole_response(client, BODY)
    check_error(client.post(f"{PATH}/{answer['id']}/cancel"), 400, "response_id")
    check_error(client.post(f"{PATH}/{GONE}/cancel"), 404, code="not_found")


def test_another_key_sees_nothing(settings: Settings, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("mine\nyours\n")
    mine, yours = {"Authorization": "Bearer mine"}, {"Authorization": "Bearer yours"}
    with keeping(replace(settings, api_keys_file=keys)) as (client, _):
        answer = client.post(PATH, json=BODY, headers=mine).json()
        place = f"{PATH}/{answer['id']}"
        item = BODY | {"input": [{"id": answer["output"][0]["id"]}]}
        assert client.get(place, headers=mine).status_code == 200
        missing = client.get(f"{PATH}/{GONE}", headers=yours).json()["error"]["message"]
        for method, path in (("GET", ""), ("DELETE", ""), ("GET", "/input_items"), ("POST", "/cancel")):
            error = check_error(client.request(method, place + path, headers=yours), 404, code="not_found")
            assert error["message"] == missing.replace(GONE, answer["id"])
            assert client.request(method, place + path).status_code == 401
        check_error(client.post(PATH, json=next_turn(answer), headers=yours), 404, "previous_response_id")
        check_error(client.post(PATH, json=item, headers=yours), 400, "input[0].id")
        assert client.get(place, headers=mine).json() == answer


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_cannot_be_kept_is_no_success(
    settings: Settings, backend: Literal["asyncio", "trio"], stream: bool
) -> None:
    """The file is locked while the answer is made; what was confirmed before is there afterwards."""
    path = str(settings.responses_store)
    other: list[sqlite3.Connection] = []

    def rule(_: int, position: int, num_prompt_tokens: int) -> int:
        if position == 2 and num_prompt_tokens > 30 and not other:
            other.append(sqlite3.connect(path, isolation_level=None, check_same_thread=False))
            other[0].execute("BEGIN IMMEDIATE")
        return ord("a")

    engine = ConstrainedEngine(settings.engine_config(), rule=rule)
    with serving(settings, engine=engine, backend=backend) as client:
        before = whole_response(client, BODY)
        locking = BODY | {"input": "x" * 40, "stream": stream}
        response = client.post(PATH, json=locking)
        if stream:
            *_, error, failed = parsed(response.text)
            assert (error["code"], failed["type"]) == ("store_unavailable", "response.failed")
            assert "response.completed" not in response.text
        else:
            check_error(response, 503, code="store_unavailable")
        check_error(client.post(PATH, json=BODY), 503, code="store_unavailable")
        check_error(client.delete(f"{PATH}/{before['id']}"), 503, code="store_unavailable")
        whole_response(client, BODY | {"store": False})
        other[0].close()
        assert client.get(f"{PATH}/{before['id']}").json() == before
        kept = whole_response(client, next_turn(before))
        assert client.get(f"{PATH}/{kept['id']}").json() == kept


def test_a_store_that_cannot_be_opened_stops_nothing_else(tmp_path: Path) -> None:
    with keeping(replace(SETTINGS, responses_store=tmp_path / "missing" / "x.sqlite")) as (client, _):
        check_error(client.post(PATH, json=BODY), 503, code="store_unavailable")
        check_error(client.get(f"{PATH}/{GONE}"), 503, code="store_unavailable")
        whole_response(client, BODY | {"store": False})
        assert client.get("/health/ready").status_code == 200


def test_without_a_store_there_is_nothing() -> None:
    with serving() as client:
        for method, path in (("GET", ""), ("DELETE", ""), ("GET", "/input_items"), ("POST", "/cancel")):
            check_error(client.request(method, f"{PATH}/{GONE}{path}"), 404, code="not_found")
