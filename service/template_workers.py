"""Clients' own chat templates, each rendered in a process that is killed when it takes too long.

A template is a program. Threads cannot be stopped, so one that loops would keep a core for ever; a process can.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path
from subprocess import DEVNULL, PIPE
from types import TracebackType

import anyio
import msgspec
from anyio.abc import Process
from anyio.streams.buffered import BufferedByteReceiveStream

from service import template_process
from service.settings import bare_environment
from service.templates import MAX_RENDERED, TemplateCall, TemplateError

NUM_WORKERS = 2
START_SECONDS = 60.0
"""Importing takes a second; where everything is busy, several."""

MAX_CALLS = 100
"""Calls after which a process is replaced: it keeps what it compiled."""

MAX_REPLY_BYTES = 12 * MAX_RENDERED
"""JSON in ASCII writes a character in twelve bytes at most."""

KILL_SECONDS = 5.0

_GONE = (anyio.EndOfStream, anyio.IncompleteRead, anyio.BrokenResourceError, anyio.ClosedResourceError)


class _Reply(msgspec.Struct):
    text: str | None = None
    error: str | None = None


class _Worker:
    """One process and its two pipes; a line is a message."""

    def __init__(self, process: Process) -> None:
        assert process.stdin is not None and process.stdout is not None
        self.process = process
        self.num_calls = 0
        self._requests = process.stdin
        self._replies = BufferedByteReceiveStream(process.stdout)

    @property
    def lives(self) -> bool:
        return self.process.returncode is None

    async def ask(self, call: bytes) -> _Reply:
        self.num_calls += 1
        await self._requests.send(call + b"\n")
        return await self.reply()

    async def reply(self) -> _Reply:
        return msgspec.json.decode(await self._replies.receive_until(b"\n", MAX_REPLY_BYTES), type=_Reply)

    async def end(self) -> None:
        with suppress(ProcessLookupError):
            self.process.kill()
        with anyio.move_on_after(KILL_SECONDS, shield=True):
            await self.process.aclose()


class TemplateWorkers:
    """At most NUM_WORKERS processes, started when they are needed and kept for the next call.

    A context manager: leaving it ends them.
    """

    def __init__(self, timeout: float = 2.0) -> None:
        """timeout: seconds for one rendering."""
        self._timeout = timeout
        self._limiter = anyio.Semaphore(NUM_WORKERS)
        self._idle: list[_Worker] = []

    async def __aenter__(self) -> TemplateWorkers:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        while self._idle:
            await self._idle.pop().end()

    async def render(self, call: TemplateCall) -> str:
        """Raises TemplateError. Cancelling it ends the process."""
        async with self._limiter:
            worker = await self._take()
            keep = False
            try:
                with anyio.fail_after(self._timeout):
                    reply = await worker.ask(self._encode(call))
                keep = worker.num_calls < MAX_CALLS
            except TimeoutError:
                raise TemplateError(f"The chat template took more than {self._timeout:g} s.") from None
            except _GONE:
                raise TemplateError("The chat template took more memory or time than it may.") from None
            finally:
                if keep:
                    self._idle.append(worker)
                else:
                    await worker.end()
        if reply.text is None:
            raise TemplateError(f"The chat template cannot be rendered: {reply.error}")
        return reply.text

    async def _take(self) -> _Worker:
        while self._idle:
            worker = self._idle.pop()
            if worker.lives:
                return worker
            await worker.end()
        return await _start()

    def _encode(self, call: TemplateCall) -> bytes:
        arguments = {
            **call.variables,
            # as transformers does: to a template what is null is not there
            "conversations": [
                [{name: value for name, value in message.items() if value is not None} for message in call.messages]
            ],
            "tools": call.tools or None,
            "chat_template": call.template,
            "add_generation_prompt": call.generation_prompt,
            "continue_final_message": call.continues_last,
            "seconds": self._timeout,
            "max_length": MAX_RENDERED,
        }
        return msgspec.json.encode(arguments)


async def _start() -> _Worker:
    """Raises RuntimeError: a process that does not come up is no client's fault."""
    process = await anyio.open_process(
        # by its path, with none of our folders on the module path: there are files in them named as modules elsewhere
        [sys.executable, "-P", str(Path(template_process.__file__))],
        stdin=PIPE,
        stdout=PIPE,
        stderr=DEVNULL,  # it could quote prompts
        env=bare_environment(),
        start_new_session=True,  # a terminal's Ctrl-C is for the server, which ends it in its own time
    )
    worker = _Worker(process)
    is_up = False
    try:
        with anyio.fail_after(START_SECONDS):
            await worker.reply()
        is_up = True
    except (TimeoutError, *_GONE) as error:
        raise RuntimeError("the process that renders chat templates does not start") from error
    finally:
        if not is_up:
            await worker.end()
    return worker
