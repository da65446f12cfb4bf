from __future__ import annotations

import json
import logging

from service.logs import JsonFormatter, log_event


def test_a_line_is_one_json_object_with_its_fields() -> None:
    records: list[logging.LogRecord] = []
    logger = logging.Logger("chorus.test")
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    logger.addHandler(handler)
    log_event(logger, "request", n=2, seed=2**64 - 1, path=b"x")
    try:
        raise ValueError("two\nlines")
    except ValueError:
        logger.exception("failed: %s", "why")
    event, failure = (json.loads(line) for line in map(JsonFormatter().format, records) if "\n" not in line)
    assert event["event"] == "request" and event["n"] == 2 and event["seed"] == 2**64 - 1
    assert event["level"] == "info" and event["logger"] == "chorus.test" and event["time"].endswith("+00:00")
    assert failure["event"] == "failed: why" and "ValueError" in failure["traceback"]
