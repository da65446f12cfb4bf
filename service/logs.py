"""Structured logs: one JSON object a line, on standard error."""

from __future__ import annotations

import errno
import logging
import sys
import traceback
from datetime import UTC, datetime

import msgspec

MAX_CAUSES = 8


class JsonFormatter(logging.Formatter):
    """time, level, logger and event, then the fields given to `log_event`, then a traceback where there is one."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": record.getMessage(),
        }
        line |= getattr(record, "fields", {})
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line, enc_hook=str).decode()


def log_event(logger: logging.Logger, event: str, **fields: object) -> None:
    """Write one line at level info. Fields must hold no text of prompts or answers."""
    logger.info(event, extra={"fields": fields})


def log_unexpected(logger: logging.Logger, event: str, error: BaseException, **fields: object) -> None:
    """Write where an error came from, but not what it says: that may quote a prompt."""
    chain: list[dict[str, object]] = []
    cause: BaseException | None = error
    while cause is not None and len(chain) < MAX_CAUSES:
        frames = [
            f"{frame.filename}:{frame.lineno} {frame.name}" for frame in traceback.extract_tb(cause.__traceback__)
        ]
        chain.append({"type": type(cause).__name__, "frames": frames})
        cause = cause.__cause__ or cause.__context__
    logger.error(event, extra={"fields": {**fields, "errors": chain}})


def configure_logging(level: str) -> None:
    """For the process: lines of ours. The root is left alone: hypercorn's own loggers write by themselves."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter())
    logging.getLogger("asyncio").addFilter(_is_not_a_cut_connection)
    ours = logging.getLogger("chorus")
    ours.handlers = [handler]
    ours.propagate = False
    ours.setLevel(level.upper())


def _is_not_a_cut_connection(record: logging.LogRecord) -> bool:
    """The kernel's end of a connection whose client took nothing is no news; hypercorn lets it through on asyncio."""
    error = record.exc_info[1] if record.exc_info else None
    return not (isinstance(error, OSError) and error.errno == errno.ETIMEDOUT)
