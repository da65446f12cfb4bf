"""From an HTTP request to a request Struct: media type, size and time limits, strict decoding that names the field."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from typing import Any, TypeVar

import anyio
import msgspec
from litestar.types import Receive
from msgspec import inspect

from service.errors import ApiError, body_too_large, body_too_slow, invalid, unsupported_media_type
from service.settings import Settings

T = TypeVar("T", bound=msgspec.Struct)

MAX_INLINE_BYTES = 64 * 1024
"""Larger bodies are decoded in a worker thread, so that the event loop does not stand still."""

LINGER_SECONDS = 1.0
"""How long a body that is too large is read on and thrown away: a client that is reset mid-send never sees the 413."""

_ERROR = re.compile(r"(?P<message>.*?)(?: - at (?:`key` in )?`\$(?P<path>.*)`)?", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(?P<name>.*)`", re.DOTALL)
_UNKNOWN = re.compile(r"Object contains unknown field `(?P<name>.*)`", re.DOTALL)


def check_media_type(content_type: str | None, content_encoding: str | None) -> None:
    """An absent type is taken for JSON, as most servers do."""
    if content_type and content_type.partition(";")[0].strip().lower() != "application/json":
        raise unsupported_media_type(f"Content-Type must be application/json, not `{content_type}`.")
    if content_encoding and content_encoding.strip().lower() != "identity":
        raise unsupported_media_type(f"Content-Encoding `{content_encoding}` is not supported.")


async def read_body(receive: Receive, content_length: str | None, settings: Settings) -> bytes:
    """The whole body; raises 413 as soon as it is known to be too large, 400 when it takes too long."""
    body = bytearray()
    with anyio.move_on_after(settings.body_timeout):
        if content_length and content_length.isdecimal() and int(content_length) > settings.max_body_bytes:
            await _discard(receive)
            raise body_too_large(settings.max_body_bytes)
        while True:
            message = await receive()
            if message["type"] != "http.request":
                raise invalid("The client went away before its request was complete.")
            body += message["body"]
            if len(body) > settings.max_body_bytes:
                if message["more_body"]:
                    await _discard(receive)
                raise body_too_large(settings.max_body_bytes)
            if not message["more_body"]:
                return bytes(body)
    raise body_too_slow(settings.body_timeout)


async def _discard(receive: Receive) -> None:
    with anyio.move_on_after(LINGER_SECONDS):
        while True:
            message = await receive()
            if message["type"] != "http.request" or not message["more_body"]:
                return


async def decode_body(body: bytes, type_: type[T]) -> T:
    if len(body) <= MAX_INLINE_BYTES:
        return decode(body, type_)
    return await anyio.to_thread.run_sync(decode, body, type_)


def decode(body: bytes, type_: type[T]) -> T:
    """Strict: no coercion, no unknown fields, no text that is not Unicode. Raises ApiError with status 400."""
    try:
        return msgspec.json.decode(body, type=type_)
    except msgspec.ValidationError as error:
        raise validation_error(str(error), type_) from None
    except msgspec.DecodeError as error:
        detail = str(error) if body.strip() else "it is empty"
        raise invalid(f"The request body is not valid JSON: {detail}.") from None
    except RecursionError:
        raise invalid("The request body is nested too deeply.") from None


def validation_error(text: str, type_: type[msgspec.Struct], place: str = "") -> ApiError:
    """text: msgspec's, of a value of this type. place: where it stands in the request."""
    match = _ERROR.fullmatch(text)
    assert match is not None
    message, path = match["message"], (match["path"] or "").removesuffix("[...]").removeprefix(".")
    within, path = path, _join(place, path) if path and place else place or path
    if missing := _MISSING.fullmatch(message):
        param = _join(path, missing["name"])
        return invalid(f"Missing required parameter: `{param}`.", param, "missing_required_parameter")
    if unknown := _UNKNOWN.fullmatch(message):
        param = _join(path, unknown["name"])
        near = _nearest(unknown["name"], _field_names(type_, within))
        hint = f" The nearest known one is `{near}`." if near else ""
        return invalid(f"Unknown parameter: `{param}`.{hint}", param, "unknown_parameter")
    return invalid(f"Invalid request: {message}{f' at `{path}`' if path else ''}.", path or None, "invalid_value")


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _nearest(name: str, known: set[str]) -> str | None:
    matches = difflib.get_close_matches(name[:64], sorted(known - {name}), n=1)
    return matches[0] if matches else None


def _field_names(type_: type[msgspec.Struct], path: str) -> set[str]:
    """Names of all fields that some object at that path may have."""
    kinds: list[inspect.Type] = [inspect.type_info(type_)]
    for step in re.findall(r"[^.\[\]]+", path):
        kinds = [below for kind in kinds for below in _step_into(kind, step)]
    structs = [kind for root in kinds for kind in _alternatives(root) if isinstance(kind, inspect.StructType)]
    names = {field.encode_name for struct in structs for field in struct.fields}
    return names | {str(struct.tag_field) for struct in structs if struct.tag_field}


def _step_into(kind: inspect.Type, step: str) -> Iterator[inspect.Type]:
    for alternative in _alternatives(kind):
        if isinstance(alternative, inspect.StructType):
            yield from (field.type for field in alternative.fields if field.encode_name == step)
        elif isinstance(alternative, inspect.ListType) and step.isdecimal():
            yield alternative.item_type


def _alternatives(kind: Any) -> Iterator[inspect.Type]:
    if isinstance(kind, inspect.Metadata):
        yield from _alternatives(kind.type)
    elif isinstance(kind, inspect.UnionType):
        for inner in kind.types:
            yield from _alternatives(inner)
    else:
        yield kind
