"""A streamed response folded into the body that it stands for, strictly: every event in its place, nothing lost."""

from __future__ import annotations

import json
from typing import Any

from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from .apps import Client
from .folding import strict_json

PATH = "/v1/responses"
SDK_EVENT: TypeAdapter[ResponseStreamEvent] = TypeAdapter(ResponseStreamEvent)
LAST = {"response.completed", "response.incomplete", "response.failed"}


def whole_response(client: Client, body: dict[str, Any], status: int = 200) -> dict[str, Any]:
    response = client.post(PATH, json=body | {"stream": False})
    assert response.status_code == status, response.text
    answer: dict[str, Any] = strict_json(response.text)
    Response.model_validate(answer, strict=True)
    return answer


def events_of(client: Client, body: dict[str, Any]) -> list[dict[str, Any]]:
    response = client.post(PATH, json=body | {"stream": True})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    return parsed(response.text)


def parsed(text: str) -> list[dict[str, Any]]:
    *blocks, empty = text.split("\n\n")
    assert empty == ""
    found = []
    for block in (block for block in blocks if not block.startswith(":")):
        name, data = block.split("\n")
        event = strict_json(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        SDK_EVENT.validate_python(event)
        found.append(event)
    return found


def folded(events: list[dict[str, Any]]) -> dict[str, Any]:
    """What the last event says, which all before it must come to."""
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    created, in_progress, *between, last = events
    assert (created["type"], in_progress["type"]) == ("response.created", "response.in_progress")
    assert last["type"] in LAST
    assert created["response"] == in_progress["response"]
    assert (created["response"]["status"], created["response"]["output"]) == ("in_progress", [])
    items: list[dict[str, Any]] = []
    while between:
        item, between = _folded_item(between, len(items))
        items.append(item)
    response: dict[str, Any] = last["response"]
    assert response["output"] == items
    assert response.keys() - created["response"].keys() <= {"end_reason", "stop_reason"}
    return response


def _folded_item(events: list[dict[str, Any]], index: int) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The first item, and the events behind it: one item is done before the next begins."""
    added = events[0]
    assert added["type"] == "response.output_item.added" and added["output_index"] == index
    item = added["item"]
    assert item["status"] == "in_progress"
    for number, event in enumerate(events[1:], start=1):
        assert event["output_index"] == index
        if event["type"] == "response.output_item.done":
            done: dict[str, Any] = event["item"]
            assert done | {"status": "in_progress"} == item, "the item is what its events made of it"
            return done, events[number + 1 :]
        assert event["item_id"] == item["id"]
        _grow(item, event)
    raise AssertionError("an item that is never done")


def _grow(item: dict[str, Any], event: dict[str, Any]) -> None:
    match event["type"].removeprefix("response."):
        case "content_part.added":
            assert item["content"] == [] and event["content_index"] == 0
            item["content"].append(event["part"])
        case "output_text.delta" | "reasoning_text.delta":
            assert event["delta"]
            item["content"][0]["text"] += event["delta"]
            item["content"][0].get("logprobs", []).extend(event.get("logprobs", []))
        case "output_text.done":
            assert event["text"] == item["content"][0]["text"]
            told = item["content"][0]["logprobs"]
            assert event["logprobs"][: len(told)] == told
            item["content"][0]["logprobs"] = event["logprobs"]  # the end has no text, but a probability
        case "reasoning_text.done":
            assert event["text"] == item["content"][0]["text"]
        case "content_part.done":
            assert event["part"] == item["content"][0]
        case "function_call_arguments.delta":
            assert event["delta"]
            item["arguments"] += event["delta"]
        case "function_call_arguments.done":
            assert (event["arguments"], event["name"]) == (item["arguments"], item["name"])
        case other:
            raise AssertionError(other)


def same_both_ways(client: Client, body: dict[str, Any]) -> dict[str, Any]:
    """The body; streamed it is the same, but for ids and times."""
    answer = whole_response(client, body)
    events = events_of(client, body)
    assert _without_chance(folded(events)) == _without_chance(answer)
    assert events[-1]["type"] == f"response.{answer['status']}"
    return answer


def _without_chance(response: dict[str, Any]) -> dict[str, Any]:
    copy: dict[str, Any] = json.loads(json.dumps(response))
    assert all(item["id"].endswith(f"{copy['id'].partition('_')[2]}{n:04x}") for n, item in enumerate(copy["output"]))
    for item in copy["output"]:
        item["id"] = item["id"].partition("_")[0]
        item.pop("call_id", None)
    assert (copy["completed_at"] is not None) == (copy["status"] == "completed")
    details = copy["usage"]["input_tokens_details"]
    return {
        name: value for name, value in copy.items() if name not in ("id", "created_at", "completed_at", "usage")
    } | {"usage": copy["usage"] | {"input_tokens_details": details | {"cached_tokens": 0}}}
