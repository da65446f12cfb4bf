"""How the values of environment variables are read; each raises ValueError with the form that was expected."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

TRUE, FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")
UNITS = {"": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30}


def text(raw: str) -> str:
    return raw


def path(raw: str) -> Path:
    try:
        return Path(raw).expanduser()
    except RuntimeError:
        raise ValueError("this user has no home folder") from None


def switch(raw: str) -> bool:
    if raw.lower() in TRUE + FALSE:
        return raw.lower() in TRUE
    raise ValueError("expected true or false")


def choice(*names: str) -> Callable[[str], str]:
    def parse(raw: str) -> str:
        if raw not in names:
            raise ValueError(f"expected one of {', '.join(names)}")
        return raw

    return parse


def integer(low: int, high: int | None = None) -> Callable[[str], int]:
    def parse(raw: str) -> int:
        if not re.fullmatch(r"[+-]?\d{1,18}", raw):
            raise ValueError("expected a whole number")
        return _bounded(int(raw), low, high)

    return parse


def seconds(low: float) -> Callable[[str], float]:
    def parse(raw: str) -> float:
        if not re.fullmatch(r"\d{1,9}(\.\d+)?", raw):
            raise ValueError("expected a number of seconds")
        return _bounded(float(raw), low, None)

    return parse


def fraction(raw: str) -> float:
    if not re.fullmatch(r"\d?\.\d{1,9}|1", raw):
        raise ValueError("expected a number from 0 to 1, such as 0.9")
    return _bounded(float(raw), 0, 1)


def json_object(raw: str) -> dict[str, object]:
    try:
        value = json.loads(raw)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise ValueError("expected a JSON object")
    return value


def size(raw: str) -> int:
    match = re.fullmatch(r"(\d{1,15}) ?(|kib|mib|gib)", raw.lower())
    if match is None:
        raise ValueError("expected a number of bytes, such as 1048576 or 1MiB")
    return _bounded(int(match[1]) * UNITS[match[2]], 1, None)


def origins(raw: str) -> tuple[str, ...]:
    origins = tuple(origin.strip() for origin in raw.split(","))
    for origin in origins:
        if not re.fullmatch(r"\*|https?://[^/\s*]+", origin):
            raise ValueError("expected origins such as https://example.com, or *")
    return origins


def url(raw: str) -> str:
    if not re.fullmatch(r"https?://[^/\s?#@]+(/[^\s?#]*)?", raw):
        raise ValueError("expected a URL such as http://collector:4318")
    return raw


def urls(raw: str) -> tuple[str, ...]:
    """Each once, and without the /v1 that all of an API's paths begin with."""
    found = [url(one.strip()).rstrip("/").removesuffix("/v1") for one in raw.split(",")]
    return tuple(dict.fromkeys(found))


def bind(raw: str) -> tuple[str, int]:
    match = re.fullmatch(r"(?:\[([0-9a-fA-F:.]+)\]|([^\s:\[\]]+)):(\d{1,5})", raw)
    if match is None or int(match[3]) > 65535:
        raise ValueError("expected host:port")
    return match[1] or match[2], int(match[3])


def _bounded(value: T, low: float, high: float | None) -> T:
    if value < low or (high is not None and value > high):  # type: ignore[operator]
        raise ValueError(f"expected at least {low}" if high is None else f"expected {low} to {high}")
    return value
