"""Logs, rendered by structlog: a JSON object a line, or lines for people; on standard error, libraries' records too."""

from __future__ import annotations

import errno
import logging
import sys
import traceback
from functools import partial
from typing import Any, Literal

import structlog
from structlog.typing import EventDict, Processor, WrappedLogger

LogFormat = Literal["json", "console"]

MAX_CAUSES = 8
HEAD = ("time", "level", "logger", "event")


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


def wanted_format(chosen: str | None) -> LogFormat:
    """chosen: json or console; None: console on a terminal, where somebody reads, and json elsewhere."""
    if chosen is None:
        return "console" if sys.stderr.isatty() else "json"
    return "console" if chosen == "console" else "json"


def formatter(format_: LogFormat, *, colors: bool = False) -> logging.Formatter:
    """time, level, logger and event, then the fields given to `log_event`, then a traceback where there is one.

    A record is one line whatever is in it; on a console its traceback follows, indented.
    """
    rendering: list[Processor] = [structlog.processors.JSONRenderer(default=str, separators=(",", ":"))]
    if format_ == "console":
        renderer = structlog.dev.ConsoleRenderer(
            colors=colors, timestamp_key="time", sort_keys=False, repr_native_str=True
        )
        rendering = [_for_people, renderer]
    return structlog.stdlib.ProcessorFormatter(
        processors=[
            structlog.processors.TimeStamper(fmt="iso", utc=True, key="time"),
            structlog.stdlib.add_log_level,
            structlog.stdlib.add_logger_name,
            structlog.processors.format_exc_info,
            _add_fields,
            structlog.stdlib.ProcessorFormatter.remove_processors_meta,
            *rendering,
        ]
    )


def configure_logging(level: str, format_: LogFormat) -> None:
    """For the process: lines of ours from `level` on, warnings of all others, hypercorn's what it says by itself."""
    form = formatter(format_, colors=sys.stderr.isatty())
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(form)
    logging.getLogger("asyncio").addFilter(_is_not_a_cut_connection)
    logging.getLogger().handlers = [handler]
    logging.captureWarnings(True)
    logging.getLogger("chorus").setLevel(level.upper())
    for name in ("hypercorn.error", "hypercorn.access"):
        logging.getLogger(name).addFilter(partial(_take_over, form))


def _take_over(form: logging.Formatter, record: logging.LogRecord) -> bool:
    """Plain hypercorn makes handlers of its own, some of them after the app has started: they write in our form."""
    logger = logging.getLogger(record.name)
    logger.propagate = not logger.handlers
    for handler in logger.handlers:
        handler.setFormatter(form)
    return True


def _add_fields(_logger: WrappedLogger, _method: str, line: EventDict) -> EventDict:
    """In the order in which they are read; no field replaces what is in front of it."""
    fields: dict[str, Any] = getattr(line["_record"], "fields", {})
    head = {name: line[name] for name in HEAD}
    return {**head, **{name: fields[name] for name in fields if name not in HEAD}, **line}


def _for_people(_logger: WrappedLogger, _method: str, line: EventDict) -> EventDict:
    """Without what says nothing, and with no control character of a text that is not ours: it could forge lines."""
    shown: EventDict = {name: value for name, value in line.items() if value is not None}
    shown["event"] = _printable(str(line["event"]))
    if "exception" in line:
        shown["exception"] = "\n".join(f"    {_printable(each)}" for each in line["exception"].splitlines())
    return shown


def _printable(text: str) -> str:
    return text if text.isprintable() else text.encode("unicode_escape", "backslashreplace").decode()


def _is_not_a_cut_connection(record: logging.LogRecord) -> bool:
    """The kernel's end of a connection whose client took nothing is no news; hypercorn lets it through on asyncio."""
    error = record.exc_info[1] if record.exc_info else None
    return not (isinstance(error, OSError) and error.errno == errno.ETIMEDOUT)
