"""A streamed answer folded into the choices of the body that it stands for, strictly: what a client relies on."""

from __future__ import annotations

import json
from typing import Any

from .apps import Client


def constant(name: str) -> Any:
    raise AssertionError(f"{name} is not JSON")


def strict_json(text: str) -> Any:
    """NaN and infinities are not JSON."""
    return json.loads(text, parse_constant=constant)


def whole(client: Client, path: str, body: dict[str, Any]) -> dict[str, Any]:
    response = client.post(path, json=body | {"stream": False})
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = strict_json(response.text)
    return answer


def chunks_of(client: Client, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    response = client.post(path, json=body | {"stream": True})
    assert response.status_code == 200, response.text
    *events, done, empty = response.text.split("\n\n")
    assert (done, empty) == ("data: [DONE]", "")
    chunks = [strict_json(event.removeprefix("data: ")) for event in events]
    assert len({(chunk["id"], chunk["object"], chunk["created"], chunk["model"]) for chunk in chunks}) == 1
    return chunks


def folded(chunks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The choices by index, in the shape that the body has them."""
    choices: dict[int, dict[str, Any]] = {}
    for given in (choice for chunk in chunks for choice in chunk["choices"]):
        new = dict(given)
        index = new.pop("index")
        choice = choices.setdefault(index, {"index": index, "finish_reason": None, "logprobs": None})
        assert choice["finish_reason"] is None, "nothing comes after the finish reason"
        if "delta" in new:
            _fold_delta(choice, new.pop("delta"))
        else:
            choice["text"] = choice.get("text", "") + new.pop("text")
        choice["logprobs"] = _joined(choice["logprobs"], new.pop("logprobs"))
        if "token_ids" in new:
            choice["token_ids"] = choice.get("token_ids", []) + new.pop("token_ids")
        choice.update(new)
    return [choices[index] for index in sorted(choices)]


def _fold_delta(choice: dict[str, Any], delta: dict[str, Any]) -> None:
    if "message" not in choice:
        assert delta["role"] == "assistant", "the first delta of a choice has the role"
        choice["message"] = {"role": delta.pop("role"), "content": delta.pop("content"), "refusal": None}
    message = choice["message"]
    for name in ("content", "reasoning_content"):
        if name in delta:
            assert delta[name], "an empty delta says nothing"
            message[name] = (message.get(name) or "") + delta.pop(name)
    for call in delta.pop("tool_calls", []):
        calls = message.setdefault("tool_calls", [])
        if call["index"] == len(calls):
            assert call["type"] == "function" and call["function"].keys() == {"name", "arguments"}
            assert call["function"]["arguments"] == ""
            calls.append({key: call[key] for key in ("id", "type", "function")})
        else:
            assert call.keys() == {"index", "function"} and call["function"].keys() == {"arguments"}
            assert call["index"] == len(calls) - 1
            calls[-1]["function"]["arguments"] += call["function"]["arguments"]
    assert delta == {}


def _joined(old: Any, new: Any) -> Any:
    if old is None or new is None:
        return old or new
    return {key: _added(old[key], new[key]) for key in old}


def _added(old: Any, new: Any) -> Any:
    return None if old is None else old + new


def same_both_ways(client: Client, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The choices; streamed they equal the whole, but for the ids of tool calls, which are random."""
    answer = whole(client, path, body)
    choices: list[dict[str, Any]] = answer["choices"]
    assert without_call_ids(folded(chunks_of(client, path, body))) == without_call_ids(choices)
    return choices


def without_call_ids(choices: list[dict[str, Any]]) -> list[dict[str, Any]]:
    copy: list[dict[str, Any]] = json.loads(json.dumps(choices))
    for choice in copy:
        for call in choice.get("message", {}).get("tool_calls", []):
            assert call.pop("id")
    return copy
