"""A log line is one line, whatever is in it, and everybody's lines are alike."""

from __future__ import annotations

import io
import json
import logging
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from service.logs import LogFormat, formatter, log_event, wanted_format
from service.settings import SettingsError, read_settings

FORGED = 'two\n{"event":"forged"}\r\x1b[2J\u2028three'


def written(format_: LogFormat, write: Callable[[logging.Logger], object], name: str = "chorus.test") -> list[str]:
    """The lines that come of what `write` logs."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(formatter(format_))
    logger = logging.Logger(name)
    logger.addHandler(handler)
    write(logger)
    return stream.getvalue().splitlines()


def fail(logger: logging.Logger) -> None:
    try:
        raise ValueError(FORGED)
    except ValueError:
        logger.exception("failed: %s", "why")


def test_a_line_is_one_json_object_with_its_fields() -> None:
    (line,) = written("json", lambda logger: log_event(logger, "request", n=2, seed=2**64 - 1, path=b"x", key=None))
    found = json.loads(line)
    assert list(found)[:4] == ["time", "level", "logger", "event"]
    assert found["event"] == "request" and found["n"] == 2 and found["seed"] == 2**64 - 1 and found["key"] is None
    assert found["level"] == "info" and found["logger"] == "chorus.test" and found["time"].endswith("Z")


def test_a_traceback_is_part_of_its_line() -> None:
    (line,) = written("json", fail)
    found = json.loads(line)
    assert found["event"] == "failed: why" and "ValueError" in found["exception"]


def test_a_field_replaces_nothing_that_the_log_itself_says() -> None:
    (line,) = written("json", lambda logger: log_event(logger, "request", level="none", time="never"))
    found = json.loads(line)
    assert (found["level"], found["logger"]) == ("info", "chorus.test") and found["time"] != "never"


@pytest.mark.parametrize("format_", ["json", "console"])
@pytest.mark.parametrize("text", [FORGED, "half of a pair: \ud800"])
def test_no_text_can_forge_a_line_or_steer_a_terminal(format_: LogFormat, text: str) -> None:
    """Neither a field, nor what a library says, nor an error's message."""
    lines = written(format_, lambda logger: log_event(logger, "request", request_id=text, several=[text]))
    lines += written(format_, lambda logger: logger.warning("odd: %s", text), "some.package")
    assert len(lines) == 2 and all(line.isprintable() for line in lines), lines
    failure = written(format_, fail)
    assert all(line.isprintable() for line in failure)
    assert sum(not line.startswith("    ") for line in failure) == 1, "a traceback is indented under its line"


def test_people_get_lines_that_they_can_read() -> None:
    (line,) = written("console", lambda logger: log_event(logger, "request", n=2, outcome="ok", key=None))
    assert "[info" in line and "request" in line and "n=2 outcome='ok'" in line and "key" not in line


def test_a_terminal_gets_lines_for_people_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [wanted_format(chosen) for chosen in (None, "json", "console")] == ["json", "json", "console"]
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    assert [wanted_format(chosen) for chosen in (None, "json", "console")] == ["console", "json", "console"]
    with pytest.raises(SettingsError, match="CHORUS_LOG_FORMAT"):
        read_settings({"CHORUS_LOG_FORMAT": "xml"})


SPEAKERS = """
import logging, sys, warnings
from hypercorn.config import Config
from service.logs import configure_logging
config = Config()
config.accesslog = "-"
configure_logging("info", "json")
config.log  # plain hypercorn may make its handlers after the app has started
for name in ("chorus.app", "litestar", "opentelemetry.sdk", "asyncio", "hypercorn.error"):
    logging.getLogger(name).warning("said")
logging.getLogger("chorus.app").debug("left out")
logging.getLogger("litestar").info("left out")
warnings.warn("said")
"""


def test_everybodys_lines_are_alike_and_come_once() -> None:
    done = subprocess.run([sys.executable, "-c", SPEAKERS], capture_output=True, text=True, timeout=60, check=True)
    lines: list[dict[str, Any]] = [json.loads(line) for line in done.stderr.splitlines()]
    names = ["chorus.app", "litestar", "opentelemetry.sdk", "asyncio", "hypercorn.error", "py.warnings"]
    assert [line["logger"] for line in lines] == names
    assert all(line["event"].count("said") == 1 for line in lines[:5])
