"""The file that responses are kept in: what was confirmed stays, what cannot be done is a 503."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, closing, contextmanager
from pathlib import Path

import anyio
import pytest

from service.errors import ApiError
from service.response_store import _BOUNDS, ROW_BYTES, ResponseStore, StoredResponse

pytestmark = pytest.mark.anyio
MANY = 10**9
DAY = 86400.0


class Clock:
    now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(autouse=True)
def short_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("service.response_store.LOCK_SECONDS", 0.01)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "responses.sqlite"


@pytest.fixture
async def store(path: Path) -> AsyncIterator[ResponseStore]:
    async with running(ResponseStore(path, max_bytes=MANY, max_age=DAY)) as store:
        yield store


@asynccontextmanager
async def running(store: ResponseStore) -> AsyncIterator[ResponseStore]:
    """As the app hosts it."""
    async with anyio.create_task_group() as group:
        group.start_soon(store.run)
        yield store
        group.cancel_scope.cancel()


def response(name: str, previous: str | None = None, size: int = 10) -> StoredResponse:
    return StoredResponse(name, previous, b"[]", b'"' + b"x" * (size - 2) + b'"')


def write(path: Path, content: bytes) -> None:
    path.write_bytes(content)


def read(path: Path) -> bytes:
    return path.read_bytes()


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """As by another process."""
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        yield


async def test_what_was_saved_is_there_after_a_restart(path: Path) -> None:
    async with running(ResponseStore(path, max_bytes=MANY, max_age=DAY)) as store:
        await store.save(response("a"), "me")
        await store.save(response("b", "a"), "me")
    async with running(ResponseStore(path, max_bytes=MANY, max_age=DAY)) as store:
        assert await store.chain("b", "me") == [response("a"), response("b", "a")]


async def test_what_was_confirmed_survives_a_crash(store: ResponseStore, path: Path, tmp_path: Path) -> None:
    """The files as they are at that moment, with nothing closed."""
    await store.save(response("a"), "me")
    (tmp_path / "crash").mkdir()
    for file in path.parent.glob("responses.sqlite*"):
        if not file.name.endswith("-shm"):  # memory that processes share
            shutil.copy(file, tmp_path / "crash")
    async with running(ResponseStore(tmp_path / "crash" / path.name, max_bytes=MANY, max_age=DAY)) as after:
        assert await after.get("a", "me") == response("a")


async def test_nobody_else_sees_it(store: ResponseStore) -> None:
    await store.save(response("a"), "me")
    assert await store.get("a", "you") is None
    assert await store.chain("a", "you") == []
    assert not await store.delete("a", "you")
    await store.save(response("b", "a"), "you")
    assert await store.chain("b", "you") == [response("b", "a")], "another's response is no part of it"
    assert await store.get("a", "me") == response("a")


async def test_nobody_else_reads_the_file(store: ResponseStore, path: Path) -> None:
    await store.save(response("a"), "me")
    for file in path.parent.glob("responses.sqlite*"):
        assert file.stat().st_mode & 0o077 == 0, file


async def test_a_deleted_text_is_not_on_the_disk(store: ResponseStore, path: Path) -> None:
    secret = StoredResponse("a", None, b'["a secret"]', b'"another secret"' * 1000)
    await store.save(secret, "me")
    assert any(b"secret" in file.read_bytes() for file in path.parent.iterdir())
    assert await store.delete("a", "me")
    assert not any(b"secret" in file.read_bytes() for file in path.parent.iterdir())


async def test_a_conversation_ends_at_what_is_gone(store: ResponseStore) -> None:
    for name, previous in (("a", None), ("b", "a"), ("c", "b")):
        await store.save(response(name, previous), "me")
    assert await store.delete("a", "me")
    assert [one.id for one in await store.chain("c", "me")] == ["b", "c"]
    assert not await store.delete("a", "me")


async def test_no_more_of_a_conversation_is_read_than_memory_can_take(
    store: ResponseStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, previous in (("a", None), ("b", "a"), ("c", "b")):
        await store.save(response(name, previous, 1000), "me")
    monkeypatch.setitem(_BOUNDS, "largest", 2 * (1002 + ROW_BYTES))
    assert [one.id for one in await store.chain("c", "me")] == ["b", "c"]
    monkeypatch.setitem(_BOUNDS, "most", 1)
    assert [one.id for one in await store.chain("c", "me")] == ["c"]


async def test_the_longest_unused_go_first_when_there_is_too_much(path: Path) -> None:
    clock, size = Clock(), 1000
    three = 3 * (size + 2 + ROW_BYTES)
    async with running(ResponseStore(path, max_bytes=three, max_age=DAY, clock=clock)) as store:
        for name, previous in (("a", None), ("b", None), ("c", None), ("d", "a")):
            clock.now += 1
            await store.save(response(name, previous, size), "me")
        kept = [name for name in "abcd" if await store.get(name, "me") is not None]
        assert kept == ["a", "c", "d"], "a was used when d went on from it"
        with pytest.raises(ApiError) as refused:
            await store.save(response("e", None, three), "me")
        assert refused.value.info.status == 503
        assert await store.get("d", "me") is not None, "what can never fit takes no other's place"


async def test_what_was_not_used_for_long_is_gone(path: Path) -> None:
    clock = Clock()
    async with running(ResponseStore(path, max_bytes=MANY, max_age=DAY, clock=clock)) as store:
        await store.save(response("a"), "me")
        await store.save(response("b"), "me")
        clock.now += DAY / 2
        await store.save(response("c", "b"), "me")
        clock.now += DAY / 2 + 1
        assert await store.get("a", "me") is None
        assert [one.id for one in await store.chain("c", "me")] == ["b", "c"]
        await store.save(response("d"), "me")
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("SELECT id FROM responses ORDER BY id").fetchall() == [("b",), ("c",), ("d",)]
        assert connection.execute("SELECT bytes FROM total").fetchone() == (3 * (12 + ROW_BYTES),)


async def test_a_lock_of_another_process_is_a_503_and_loses_nothing(store: ResponseStore, path: Path) -> None:
    await store.save(response("a"), "me")
    with locked(path):
        attempts: list[Callable[[], Awaitable[object]]] = [
            store.check,
            lambda: store.save(response("b"), "me"),
            lambda: store.delete("a", "me"),
        ]
        for attempt in attempts:
            with pytest.raises(ApiError) as refused:
                await attempt()
            assert (refused.value.info.status, refused.value.info.code) == (503, "store_unavailable")
            assert "locked" in refused.value.info.message
        assert await store.get("a", "me") == response("a"), "reading needs no lock"
    await store.save(response("b"), "me")
    assert [await store.get(name, "me") for name in "ab"] == [response("a"), response("b")]


async def test_a_full_disk_is_a_503_and_loses_nothing(store: ResponseStore) -> None:
    await store.save(response("a"), "me")
    await store._run(lambda connection: connection.execute("PRAGMA max_page_count = 20").fetchall())
    with pytest.raises(ApiError) as refused:
        await store.save(response("b", None, 200_000), "me")
    assert refused.value.info.status == 503
    assert "full" in refused.value.info.message
    assert await store.get("a", "me") == response("a")
    assert await store.get("b", "me") is None
    await store.save(response("b"), "me")


@pytest.mark.parametrize("content", [b"This is no database. " * 500, b"SQLite format 3\0" + b"\xff" * 5000])
async def test_a_damaged_file_is_a_503_and_stays_as_it_is(path: Path, content: bytes) -> None:
    write(path, content)
    async with running(ResponseStore(path, max_bytes=MANY, max_age=DAY)) as store:
        attempts: list[Callable[[], Awaitable[object]]] = [
            store.check,
            lambda: store.get("a", "me"),
            lambda: store.save(response("a"), "me"),
        ]
        for attempt in attempts:
            with pytest.raises(ApiError) as refused:
                await attempt()
            assert refused.value.info.status == 503
            assert str(path) not in refused.value.info.message
    assert read(path) == content


@pytest.mark.parametrize("column", ["input", "body"])
async def test_a_damaged_response_is_a_503_and_the_others_are_there(
    store: ResponseStore, path: Path, column: str
) -> None:
    for one in (response("a"), response("b", "a"), response("c")):
        await store.save(one, "me")
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute(f"UPDATE responses SET {column} = zeroblob(20) WHERE id = 'a'")
    for attempt in (lambda: store.get("a", "me"), lambda: store.chain("b", "me")):
        with pytest.raises(ApiError) as refused:
            await attempt()
        assert (refused.value.info.status, refused.value.info.code) == (503, "store_unavailable")
    assert await store.get("c", "me") == response("c")
    assert await store.delete("a", "me")


async def test_another_programs_database_is_left_alone(path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE responses (id TEXT)")
    async with running(ResponseStore(path, max_bytes=MANY, max_age=DAY)) as store:
        with pytest.raises(ApiError):
            await store.save(response("a"), "me")
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("SELECT count(*) FROM sqlite_schema").fetchone() == (1,)


async def test_a_folder_that_comes_later_is_no_reason_to_start_again(tmp_path: Path) -> None:
    path = tmp_path / "later" / "responses.sqlite"
    async with running(ResponseStore(path, max_bytes=MANY, max_age=DAY)) as store:
        with pytest.raises(ApiError):
            await store.save(response("a"), "me")
        path.parent.mkdir()
        await store.save(response("a"), "me")
        assert await store.get("a", "me") == response("a")
