from __future__ import annotations

from typing import Any

import anyio
import pytest

from service.decoding import read_body
from service.errors import ApiError
from service.settings import Settings

pytestmark = pytest.mark.anyio

SETTINGS = Settings(max_body_bytes=10, body_timeout=60.0)


def body_of(*chunks: bytes) -> Any:
    """An ASGI receive that gives these chunks and fails when asked for more."""
    messages = [{"type": "http.request", "body": chunk, "more_body": True} for chunk in chunks]
    messages[-1]["more_body"] = False
    left = iter(messages)

    async def receive() -> Any:
        await anyio.lowlevel.checkpoint()
        return next(left)

    return receive


async def endless() -> Any:
    await anyio.lowlevel.checkpoint()
    return {"type": "http.request", "body": b"x" * 4, "more_body": True}


async def test_a_body_arrives_in_chunks() -> None:
    assert await read_body(body_of(b"12345", b"", b"67890"), None, SETTINGS) == b"1234567890"


@pytest.mark.parametrize("content_length", [None, "11", "3", "lies"])
async def test_a_body_is_not_read_beyond_the_limit(content_length: str | None) -> None:
    """Whatever its length is said to be: nothing of it may be kept."""
    with pytest.raises(ApiError) as caught:
        await read_body(body_of(b"123456", b"78901"), content_length, SETTINGS)
    assert caught.value.info.status == 413 and caught.value.info.headers == {"Connection": "close"}


async def test_a_body_without_end_is_refused_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("service.decoding.LINGER_SECONDS", 0.01)
    with pytest.raises(ApiError) as caught:
        await read_body(endless, None, SETTINGS)
    assert caught.value.info.status == 413


async def test_a_body_that_trickles_in_ends_with_400_and_the_connection() -> None:
    settings = Settings(max_body_bytes=10, body_timeout=0.01)
    sent = iter([{"type": "http.request", "body": b"x", "more_body": True}])

    async def receive() -> Any:
        for message in sent:
            return message
        await anyio.sleep_forever()

    with pytest.raises(ApiError) as caught:
        await read_body(receive, None, settings)
    assert caught.value.info.status == 400 and caught.value.info.headers == {"Connection": "close"}


async def test_a_client_that_leaves_mid_body_is_not_taken_for_a_whole_request() -> None:
    messages = iter([{"type": "http.request", "body": b"{}", "more_body": True}, {"type": "http.disconnect"}])

    async def receive() -> Any:
        return next(messages)

    with pytest.raises(ApiError) as caught:
        await read_body(receive, None, SETTINGS)
    assert caught.value.info.status == 400
