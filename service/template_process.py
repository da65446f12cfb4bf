"""The process that renders clients' own chat templates: a JSON line in, a JSON line out, until its input ends.

Run as a file by service/template_workers.py, which kills it when a template takes too long. The sandbox is
transformers'; that it is a process of its own bounds what the sandbox does not, time and memory.
"""

from __future__ import annotations

import json
import math
import os
import sys
from contextlib import suppress
from typing import Any

MAX_MEMORY = 2**30
"""Bytes of address space; importing takes 200 MiB of it."""

MAX_MESSAGE = 500
"""Characters of an error: it may quote what a template was given."""


def main() -> None:
    # nothing that a library prints may come between the lines
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    from transformers.utils.chat_template_utils import render_jinja_template

    _confine()
    _send(replies, {})
    for line in sys.stdin.buffer:
        call = json.loads(line)
        _bound_time(call.pop("seconds"))
        max_length = call.pop("max_length")
        try:
            (text,), _ = render_jinja_template(**call)
            if len(text) > max_length:
                raise ValueError(f"more than {max_length} characters come of it")
            text.encode()  # halves of surrogate pairs are no text
            _send(replies, {"text": text})
        except Exception as error:  # it is the client's program that failed, whatever it was
            message = f"{type(error).__name__}: {error}"[:MAX_MESSAGE]
            _send(replies, {"error": message.encode(errors="replace").decode()})


def _send(replies: Any, reply: dict[str, str]) -> None:
    replies.write(json.dumps(reply).encode() + b"\n")
    replies.flush()


def _confine() -> None:
    """No more memory than a template needs, and no files."""
    with suppress(ImportError):
        import resource

        for limit, value in ((resource.RLIMIT_AS, MAX_MEMORY), (resource.RLIMIT_FSIZE, 0), (resource.RLIMIT_CORE, 0)):
            with suppress(ValueError, OSError):  # not on this system, or less is allowed already
                resource.setrlimit(limit, (value, value))


def _bound_time(seconds: float) -> None:
    """For a parent that is no longer there to kill: no process stays behind in a loop."""
    with suppress(ImportError, ValueError, OSError):
        import resource

        used = resource.getrusage(resource.RUSAGE_SELF)
        _, hard = resource.getrlimit(resource.RLIMIT_CPU)
        resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(used.ru_utime + used.ru_stime + seconds) + 1, hard))


if __name__ == "__main__":
    main()
