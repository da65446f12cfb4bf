"""What is kept of responses: their conversations put together again, and what a new one leaves behind."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import anyio
import msgspec

from service.auth import Caller
from service.errors import INVALID, ApiError, ErrorInfo, invalid, not_found
from service.response_input import Placed, no_such_item, read_item
from service.response_store import ResponseStore, StoredResponse
from service.schemas.kept_responses import ItemList
from service.schemas.response_items import (
    CallItem,
    CallOutput,
    InputItem,
    InputMessage,
    InputText,
    ItemReference,
    PastText,
    ReasoningItem,
)
from service.schemas.responses import Response

if TYPE_CHECKING:
    from service.job import GenerationJob

MAX_REFERRED = 100

_ITEM_ID = re.compile("[a-z]+_([0-9a-f]{32})i?[0-9a-f]{4,}")
_PREFIXES: dict[type[InputItem], str] = {
    InputMessage: "msg",
    CallItem: "fc",
    CallOutput: "fco",
    ReasoningItem: "rs",
}


async def kept_conversation(
    previous_id: str | None, given: Sequence[Placed], store: ResponseStore | None, caller: Caller
) -> list[Placed]:
    """The items of earlier responses, then the given ones, references replaced. Raises ApiError (400, 404, 503)."""
    earlier = [] if previous_id is None else await _earlier(previous_id, store, caller)
    return [*earlier, *await _resolved(given, store, caller)]


async def _earlier(previous_id: str, store: ResponseStore | None, caller: Caller) -> list[Placed]:
    chain = [] if store is None else await store.chain(previous_id, caller.owner)
    if not chain:
        raise _no_previous(f"Previous response with id '{previous_id}' not found.")
    if chain[0].previous_id is not None:
        first = chain[0].previous_id
        message = f"The response '{first}', which '{previous_id}' goes on from, is gone, or the conversation too long."
        raise _no_previous(message)
    return await anyio.to_thread.run_sync(_items_of, chain)


def _items_of(chain: Sequence[StoredResponse]) -> list[Placed]:
    return [
        Placed(item, "previous_response_id")
        for response in chain
        for item in map(_decoded, [*input_of(response), *_output_of(response)])
        # a call that was cut short cannot be shown again, nor answered
        if not (isinstance(item, CallItem) and item.status == "incomplete")
    ]


async def _resolved(given: Sequence[Placed], store: ResponseStore | None, caller: Caller) -> list[Placed]:
    resolved: list[Placed] = []
    known: dict[str, dict[str, Any]] = {}  # by item, of the responses that were referred to
    responses: set[str] = set()
    for placed in given:
        if not isinstance(placed.item, ItemReference):
            resolved.append(placed)
            continue
        match = _ITEM_ID.fullmatch(placed.item.id)
        if store is not None and match is not None and match[1] not in responses:
            responses.add(match[1])
            if len(responses) > MAX_REFERRED:
                raise invalid(f"`input` refers to items of more than {MAX_REFERRED} responses.", placed.place)
            found = await store.get(f"resp_{match[1]}", caller.owner)
            items = [] if found is None else [*input_of(found), *_output_of(found)]
            known |= {item["id"]: item for item in items}
        if placed.item.id not in known:
            raise no_such_item(placed.item.id, placed.place)
        resolved.append(Placed(_decoded(known[placed.item.id]), placed.place))
    return resolved


def input_of(response: StoredResponse) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = msgspec.json.decode(response.input)
    return items


def _output_of(response: StoredResponse) -> list[dict[str, Any]]:
    output: list[dict[str, Any]] = msgspec.json.decode(response.body)["output"]
    return output


def _decoded(item: Mapping[str, Any]) -> InputItem:
    return read_item(item, "previous_response_id").item


def to_be_kept(job: GenerationJob, response: Response) -> StoredResponse:
    assert job.kept_input is not None
    suffix = response.id.partition("_")[2]
    items = [_shown(item, f"{suffix}i{number:04x}") for number, item in enumerate(job.kept_input)]
    body = msgspec.json.encode(response)
    return StoredResponse(response.id, response.previous_response_id, msgspec.json.encode(items), body)


def _shown(item: InputItem, id_suffix: str) -> InputItem:
    """With an id of its own where it has none, and texts as parts, which is how they are listed."""
    changed: dict[str, Any] = {}
    if not isinstance(item, ItemReference):
        changed = {"status": "completed"} if item.status is None else {}
    if item.id is None:
        changed["id"] = f"{_PREFIXES[type(item)]}_{id_suffix}"
    if isinstance(item, InputMessage) and isinstance(item.content, str):
        is_answer = item.role == "assistant"
        part = PastText(text=item.content, annotations=[]) if is_answer else InputText(text=item.content)
        changed["content"] = [part]
    return msgspec.structs.replace(item, **changed)


def response_not_found(response_id: str) -> ApiError:
    return not_found(f"Response with id '{response_id}' not found.")


def _no_previous(message: str) -> ApiError:
    return ApiError(ErrorInfo(404, message, INVALID, "previous_response_id", "previous_response_not_found"))


def item_list(items: Sequence[dict[str, Any]], query: Mapping[str, str]) -> ItemList:
    """query: limit (1 to 100, else 20), order (desc unless asc), after (an item's id). Raises ApiError (400)."""
    limit, order = query.get("limit", "20"), query.get("order", "desc")
    if not re.fullmatch("[1-9][0-9]?|100", limit):
        raise invalid("`limit` must be a number from 1 to 100.", "limit")
    if order not in ("asc", "desc"):
        raise invalid("`order` must be asc or desc.", "order")
    rest = list(items if order == "asc" else reversed(items))
    if "after" in query:
        places = [number for number, item in enumerate(rest) if item["id"] == query["after"]]
        if not places:
            raise invalid(f"There is no item `{query['after']}`.", "after")
        rest = rest[places[0] + 1 :]
    data = rest[: int(limit)]
    ids = [item["id"] for item in data] or [None]
    return ItemList(data=data, first_id=ids[0], last_id=ids[-1], has_more=len(rest) > len(data))
