"""Responses that are kept: an SQLite file, reached from one worker thread at a time.

What was confirmed is on the disk (WAL, synchronous=FULL). Whatever the file or the disk cannot do is a 503.
"""

from __future__ import annotations

import errno
import logging
import os
import sqlite3
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import anyio
import msgspec

from service.errors import ApiError, ErrorInfo, retry_after

logger = logging.getLogger("chorus.responses")

T = TypeVar("T")

LOCK_SECONDS = 1.0
"""How long another process may keep the file's lock."""

WAIT_SECONDS = 5.0
"""How long requests wait for those before them."""

MAX_CHAIN = 1000
MAX_CHAIN_BYTES = 64 * 2**20
"""Of one conversation: it is read into memory. Of a longer one the beginning is missing."""

DROP_SECONDS = 600.0

ROW_BYTES = 512
"""What a response counts beside its texts, so that a limit of bytes is one of rows too."""

_APPLICATION_ID = 0x43485253
_VERSION = 1
_SCHEMA = f"""
BEGIN IMMEDIATE;
PRAGMA application_id = {_APPLICATION_ID};
PRAGMA user_version = {_VERSION};
CREATE TABLE IF NOT EXISTS responses (
    id TEXT PRIMARY KEY,
    owner TEXT NOT NULL,
    previous_id TEXT,
    used_at REAL NOT NULL,
    bytes INTEGER NOT NULL,
    input BLOB NOT NULL,
    body BLOB NOT NULL
);
CREATE INDEX IF NOT EXISTS responses_by_use ON responses (used_at);
CREATE TABLE IF NOT EXISTS total (bytes INTEGER NOT NULL);
INSERT INTO total SELECT 0 WHERE NOT EXISTS (SELECT * FROM total);
CREATE TRIGGER IF NOT EXISTS added AFTER INSERT ON responses
    BEGIN UPDATE total SET bytes = bytes + new.bytes; END;
CREATE TRIGGER IF NOT EXISTS gone AFTER DELETE ON responses
    BEGIN UPDATE total SET bytes = bytes - old.bytes; END;
COMMIT;
"""
_CHAIN = """
WITH RECURSIVE chain (depth, size, id, previous_id) AS (
    SELECT 0, bytes, id, previous_id FROM responses WHERE id = :id AND owner = :owner AND used_at >= :oldest
    UNION ALL
    SELECT depth + 1, size + older.bytes, older.id, older.previous_id
    FROM chain JOIN responses AS older ON older.id = chain.previous_id
    WHERE older.owner = :owner AND depth + 1 < :most AND size + older.bytes <= :largest
)
"""
_BOUNDS = {"most": MAX_CHAIN, "largest": MAX_CHAIN_BYTES}
_READ_CHAIN = f"""
{_CHAIN} SELECT chain.id, chain.previous_id, input, body FROM chain JOIN responses USING (id) ORDER BY depth DESC
"""
_TOUCH_CHAIN = f"{_CHAIN} UPDATE responses SET used_at = :now WHERE id IN (SELECT id FROM chain)"


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """input, body: JSON, a list of items and the answer as its client got it."""

    id: str
    previous_id: str | None
    input: bytes
    body: bytes

    @property
    def num_bytes(self) -> int:
        return len(self.input) + len(self.body) + ROW_BYTES


class StoreFull(Exception):
    """A response is larger than the store may be."""


class Damaged(Exception):
    """What was kept is no JSON any more; SQLite itself does not look at what is in a row."""


def _read(row: tuple[str, str | None, bytes, bytes]) -> StoredResponse:
    found = StoredResponse(*row)
    try:
        msgspec.json.decode(found.input)
        msgspec.json.decode(found.body)
    except (msgspec.DecodeError, TypeError):
        raise Damaged(f"{found.id} is damaged") from None
    return found


class ResponseStore:
    """Every method raises ApiError (503) when the store cannot do it. owner: as in Caller; another's is not there."""

    def __init__(self, path: Path, *, max_bytes: int, max_age: float, clock: Callable[[], float] = time.time) -> None:
        """max_age: seconds since the last use: when it was made, or its conversation went on."""
        self._path = path
        self._max_bytes = max_bytes
        self._max_age = max_age
        self._clock = clock
        self._connection: sqlite3.Connection | None = None
        self._limiter = anyio.CapacityLimiter(1)

    async def check(self) -> None:
        """Whether something could be written now: better before a response is made than after it."""

        def check(connection: sqlite3.Connection) -> None:
            connection.execute("BEGIN IMMEDIATE")
            connection.execute("ROLLBACK")

        await self._run(check)

    async def save(self, response: StoredResponse, owner: str) -> None:
        """Kept when this returns. What is too old or too much goes, the longest unused first."""

        def save(connection: sqlite3.Connection) -> None:
            if response.num_bytes > self._max_bytes:
                raise StoreFull
            now = self._clock()
            connection.execute("BEGIN IMMEDIATE")
            connection.execute(_TOUCH_CHAIN, {**self._chain_of(response.previous_id, owner), "now": now})
            row = (response.id, owner, response.previous_id, now, response.num_bytes, response.input, response.body)
            connection.execute("INSERT INTO responses VALUES (?, ?, ?, ?, ?, ?, ?)", row)
            self._evict(connection, response.id, now)
            connection.execute("COMMIT")

        await self._run(save)

    def _evict(self, connection: sqlite3.Connection, newest: str, now: float) -> None:
        self._drop_old(connection, now)
        (total,) = connection.execute("SELECT bytes FROM total").fetchone()
        rows = connection.execute("SELECT id, bytes FROM responses WHERE id != ? ORDER BY used_at, rowid", (newest,))
        gone = []
        for id_, num_bytes in rows:
            if total <= self._max_bytes:
                break
            gone.append((id_,))
            total -= num_bytes
        rows.close()
        connection.executemany("DELETE FROM responses WHERE id = ?", gone)

    async def chain(self, response_id: str, owner: str) -> list[StoredResponse]:
        """The response and those that it goes on from, oldest first; empty when it is not there. An incomplete one
        begins with a response that has a previous_id.
        """

        def chain(connection: sqlite3.Connection) -> list[StoredResponse]:
            rows = connection.execute(_READ_CHAIN, self._chain_of(response_id, owner))
            return [_read(row) for row in rows]

        return await self._run(chain)

    def _chain_of(self, response_id: str | None, owner: str) -> dict[str, object]:
        return {"id": response_id, "owner": owner, "oldest": self._clock() - self._max_age, **_BOUNDS}

    async def get(self, response_id: str, owner: str) -> StoredResponse | None:
        def get(connection: sqlite3.Connection) -> StoredResponse | None:
            row = connection.execute(
                "SELECT id, previous_id, input, body FROM responses WHERE id = ? AND owner = ? AND used_at >= ?",
                (response_id, owner, self._clock() - self._max_age),
            ).fetchone()
            return None if row is None else _read(row)

        return await self._run(get)

    async def delete(self, response_id: str, owner: str) -> bool:
        """Whether it was there."""

        def delete(connection: sqlite3.Connection) -> bool:
            found = connection.execute("DELETE FROM responses WHERE id = ? AND owner = ?", (response_id, owner))
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()  # its text is not to stay behind
            return found.rowcount > 0

        return await self._run(delete)

    async def run(self) -> None:
        """Beside the app, until cancelled: what is too old goes, though nothing new comes. In the end it is closed."""
        try:
            while True:
                with suppress(ApiError):  # it has been logged
                    await self._run(lambda connection: self._drop_old(connection, self._clock()))
                await anyio.sleep(DROP_SECONDS)
        finally:
            with anyio.CancelScope(shield=True):  # no longer than the work that is being done, and that is bounded
                await anyio.to_thread.run_sync(self._close, limiter=self._limiter)

    def _drop_old(self, connection: sqlite3.Connection, now: float) -> None:
        connection.execute("DELETE FROM responses WHERE used_at < ?", (now - self._max_age,))

    async def _run(self, work: Callable[[sqlite3.Connection], T]) -> T:
        try:
            with anyio.fail_after(WAIT_SECONDS):
                return await anyio.to_thread.run_sync(self._work, work, limiter=self._limiter)
        except TimeoutError:
            raise _unavailable("it is busy") from None
        except StoreFull:
            raise _unavailable("this response is larger than the store may be") from None
        except (sqlite3.Error, OSError, Damaged) as error:
            logger.warning("the store of responses: %s", error)
            raise _unavailable(_reason(error)) from None

    def _work(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """In the thread. A connection that has failed is not used again."""
        connection = self._connection or self._open()
        try:
            return work(connection)
        except BaseException:
            self._close()
            raise

    def _open(self) -> sqlite3.Connection:
        os.close(os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600))  # SQLite would let everybody read it
        connection = sqlite3.connect(self._path, timeout=LOCK_SECONDS, isolation_level=None, check_same_thread=False)
        try:
            _prepare(connection)
        except BaseException:
            connection.close()
            raise
        self._connection = connection
        return connection

    def _close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def _prepare(connection: sqlite3.Connection) -> None:
    (application,) = connection.execute("PRAGMA application_id").fetchone()
    (tables,) = connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if (application or tables) and (application, version) != (_APPLICATION_ID, _VERSION):
        raise sqlite3.DatabaseError("the file is not this version's")
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute("PRAGMA secure_delete = ON")
    if not application:
        connection.executescript(_SCHEMA)


def _reason(error: sqlite3.Error | OSError | Damaged) -> str:
    """For the client: no path and nothing of what is stored."""
    if isinstance(error, Damaged):
        return "it is damaged"
    name = _ERRNOS.get(error.errno or 0, "") if isinstance(error, OSError) else getattr(error, "sqlite_errorname", "")
    for start, reason in _REASONS.items():
        if name.startswith(start):
            return reason
    return "it cannot be used"


_ERRNOS = {errno.ENOSPC: "SQLITE_FULL", errno.EROFS: "SQLITE_READONLY"}
_REASONS = {
    "SQLITE_BUSY": "it is locked",
    "SQLITE_FULL": "the disk is full",
    "SQLITE_READONLY": "it is read-only",
    "SQLITE_CORRUPT": "it is damaged",
    "SQLITE_NOTADB": "it is damaged",
    "SQLITE_CANTOPEN": "it cannot be opened",
    "SQLITE_IOERR": "the disk fails",
}


def _unavailable(reason: str) -> ApiError:
    message = f"The store of responses cannot be used now: {reason}. `store: false` does without it."
    headers = retry_after(1.0)
    return ApiError(ErrorInfo(503, message, "server_error", code="store_unavailable", headers=headers))
