"""API keys: who a caller is. The file is read again when it changes; in memory there are hashes only."""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path

from service.logs import log_event

logger = logging.getLogger("chorus.auth")

MAX_FILE_BYTES = 2**20
_BEARER = re.compile(rb"[Bb][Ee][Aa][Rr][Ee][Rr] +([!-~]+) *")
_KEY = re.compile(r"[!-~]{1,512}")
_NAME = re.compile(r"[\w.@/-]{1,64}")
_NUMBER = re.compile(r"[0-9]{1,12}")


class KeysError(Exception):
    """The file of keys is no good; `str()` is one line that names the place and quotes no key."""


@dataclass(frozen=True, slots=True)
class Limits:
    """None for no limit. priority: the smallest that a request of this key can have (smaller runs first)."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    max_concurrent: int | None = None
    max_n: int | None = None
    priority: int | None = None


@dataclass(frozen=True, slots=True)
class Caller:
    """owner: who shares the engine fairly, has a cache of their own and sees their own requests; derived from the key,
    which it does not tell. name: the operator's word for the key, in logs.
    """

    owner: str = ""
    name: str | None = None
    limits: Limits = field(default_factory=Limits)


ANYONE = Caller()
"""Whoever calls a server without keys."""


class KeyFile:
    """One key a line: KEY [NAME] [LIMIT=NUMBER ...]. Empty lines, and lines that begin with #, are skipped."""

    def __init__(self, path: Path) -> None:
        """Raises KeysError."""
        self._path = path
        self._callers: Mapping[bytes, Caller] = {}
        self._version: object = None
        self._load()
        if not self._callers:
            raise KeysError(f"{path} has no keys")

    def caller(self, headers: Iterable[tuple[bytes, bytes]]) -> Caller | None:
        """Who sends these headers: None without a known key, or with more than one Authorization."""
        self._reload()
        given = [value for name, value in headers if name == b"authorization"]
        match = _BEARER.fullmatch(given[0]) if len(given) == 1 else None
        if match is None:
            return None
        digest, found = _digest(match[1]), None
        for known, caller in self._callers.items():  # all of them: the time tells nothing of which it was
            if hmac.compare_digest(known, digest):
                found = caller
        return found

    def _reload(self) -> None:
        """A file that has become unreadable changes nothing: the keys that were good stay so."""
        try:
            if self._version != self._current_version():
                self._load()
                log_event(logger, "keys", count=len(self._callers))
        except KeysError as error:
            logger.error("the file of API keys cannot be read again: %s", error)

    def _current_version(self) -> object:
        try:
            found = self._path.stat()
        except OSError:
            return None if self._version is None else self._version  # it is being replaced, or gone
        return found.st_mtime_ns, found.st_size, found.st_ino

    def _load(self) -> None:
        self._version = self._current_version()
        try:
            found = self._path.stat()
            if not stat.S_ISREG(found.st_mode) or found.st_size > MAX_FILE_BYTES:
                raise KeysError(f"{self._path} is no file of at most {MAX_FILE_BYTES} bytes")
            text = self._path.read_text(encoding="ascii")
        except (OSError, UnicodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not ASCII"
            raise KeysError(f"{self._path}: {reason}") from None
        callers = {}
        for number, line in enumerate(text.splitlines(), start=1):
            if line.strip() and not line.lstrip().startswith("#"):
                digest, caller = _parse(line.split(), f"{self._path}, line {number}")
                if digest in callers:
                    raise KeysError(f"{self._path}, line {number}: this key was there before")
                callers[digest] = caller
        self._callers = callers


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _parse(words: list[str], place: str) -> tuple[bytes, Caller]:
    key, *rest = words
    if not _KEY.fullmatch(key):
        raise KeysError(f"{place}: a key is up to 512 printable characters")
    name = rest.pop(0) if rest and "=" not in rest[0] else None
    if name is not None and not _NAME.fullmatch(name):
        raise KeysError(f"{place}: a name is up to 64 letters, digits and _ . @ / -")
    limits: dict[str, int] = {}
    known = [limit.name for limit in fields(Limits)]
    for word in rest:
        limit, _, value = word.partition("=")
        if limit not in known or limit in limits:
            raise KeysError(f"{place}: after key and name come limits, each once: {', '.join(known)}")
        if not _NUMBER.fullmatch(value):
            raise KeysError(f"{place}: {limit} needs a whole number")
        limits[limit] = int(value)
    owner = hashlib.sha256(b"chorus owner\0" + key.encode()).hexdigest()[:32]
    return _digest(key.encode()), Caller(owner, name, Limits(**limits))
