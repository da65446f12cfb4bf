"""What the tool-call parsers share: attempts at a call, content around calls, calls and their ids.

Text that begins like a call is held until its name is that of a given tool and its arguments have begun. Then the call
is sent and cannot be taken back: should its arguments break off, they stay incomplete, and the text goes on as content
from the character at fault. Text that fails before that is content, to the letter.

Whitespace around calls, the same for every family: a run before a call is dropped; a run after a call is kept only as
the separator of content before from content after it. Elsewhere it is content like any other text.
"""

from __future__ import annotations

import secrets
import string
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import ClassVar

from service.parsers.base import WHITESPACE, Malformed, Steps, StreamParser
from service.parsers.json_text import JsonScanner
from service.parsers.pieces import ContentDelta, ToolCallArguments, ToolCallStart

_ALPHANUMERIC = string.ascii_letters + string.digits


@dataclass(frozen=True, slots=True)
class Tool:
    """parameters: the JSON schema of the arguments."""

    name: str
    parameters: Mapping[str, object] = field(default_factory=dict)


def random_name(length: int) -> str:
    return "".join(secrets.choice(_ALPHANUMERIC) for _ in range(length))


class _Attempt(Enum):
    """What becomes of consumed text: it may be a call's, is a call's, or turned out not to be one."""

    HELD = auto()
    CALL = auto()
    REJECTED = auto()


class ToolParser(StreamParser):
    """openers: where a call may begin."""

    openers: ClassVar[tuple[str, ...]]

    def __init__(self, tools: Sequence[Tool], new_id: Callable[[], str] | None = None) -> None:
        super().__init__()
        self._tools = {tool.name: tool for tool in tools}
        self._new_id = new_id or self.random_id
        self._num_calls = 0
        self._attempt = _Attempt.HELD
        self._held: list[str] = []
        self._pending: list[str] = []  # whitespace that a call may follow
        self._has_content = False
        self._after_call = False  # nothing but whitespace since

    @staticmethod
    def random_id() -> str:
        return "call_" + random_name(24)

    @abstractmethod
    def _call(self, opener: str) -> Steps[None]:
        """What follows an opener, which has been consumed: a call, or several that belong together."""

    def _may_begin(self, opener: str) -> bool:
        return True

    def _run(self) -> Steps[None]:
        while opener := (yield from self._upto(self.openers, self._content)):
            if not self._may_begin(opener):
                self._content(opener)
                continue
            self._hold()
            self._consumed(opener)
            with suppress(Malformed):  # reading goes on at the character at fault
                yield from self._call(opener)
            self._release()
        if not self._after_call and self._pending:
            self._out.append(ContentDelta("".join(self._pending)))

    def _num_consumed_held(self) -> int:
        return sum(map(len, (*self._held, *self._pending)))

    # content

    @property
    def _at_line_start(self) -> bool:
        """Families without a marker begin their calls only at the start of the text or a line, or after a call."""
        return self._after_call or not self._has_content or any("\n" in space for space in self._pending)

    def _content(self, text: str) -> None:
        body = text.rstrip(WHITESPACE)
        if body:
            before = "".join(self._pending)
            self._pending.clear()
            drops_space = self._after_call and not self._has_content
            self._out.append(ContentDelta(body.lstrip(WHITESPACE) if drops_space else before + body))
            self._has_content, self._after_call = True, False
        if len(body) < len(text):
            self._pending.append(text[len(body) :])

    # attempts

    def _consumed(self, text: str) -> None:
        if self._attempt is _Attempt.HELD:
            self._held.append(text)
        elif self._attempt is _Attempt.REJECTED:
            self._content(text)

    @property
    def _rejected(self) -> bool:
        return self._attempt is _Attempt.REJECTED

    def _hold(self) -> None:
        self._attempt = _Attempt.HELD

    def _release(self) -> None:
        held = "".join(self._held)
        self._held.clear()
        self._content(held)

    def _reject(self) -> None:
        """It is no call. It may be read on as one all the same, so that nothing inside it is taken for one either."""
        if self._attempt is _Attempt.HELD:
            self._attempt = _Attempt.REJECTED
            self._release()

    def _start(self, name: str) -> None:
        """What is held belongs to the call, and what comes does, until `_hold`."""
        self._belongs()
        self._pending.clear()
        self._after_call = True
        self._out.append(ToolCallStart(self._num_calls, self._new_id(), name))
        self._num_calls += 1

    def _belongs(self) -> None:
        self._attempt = _Attempt.CALL
        self._held.clear()

    def _arguments(self, fragment: str) -> None:
        if fragment:
            self._out.append(ToolCallArguments(self._num_calls - 1, fragment))

    # what calls are made of

    def _name(self, stops: str) -> Steps[str]:
        """A name, up to one of `stops` or whitespace. Rejects as soon as it cannot become that of a given tool."""
        name = ""
        while (character := (yield from self._peek())) and character not in stops + WHITESPACE:
            name += character
            self._take(1)
            if not self._rejected and not any(tool.startswith(name) for tool in self._tools):
                self._reject()
        if not character:
            raise Malformed
        if name not in self._tools:
            self._reject()
        return name

    def _json_value(self, sink: Callable[[str], None] | None = None) -> Steps[str]:
        """One JSON value, as it comes to `sink`, and in the end as a whole."""
        scanner = JsonScanner()
        whole: list[str] = []
        while True:
            end, text = scanner.read(self._text, self._at)
            self._take(end - self._at)
            whole.append(text)
            if sink:
                sink(text)
            if scanner.complete:
                return "".join(whole)
            if scanner.broken or self._ended:
                raise Malformed
            yield

    def _json_arguments(self, name: str) -> Steps[None]:
        """A JSON object, sent as it comes, of a call that has not been rejected until here."""
        if (yield from self._peek()) != "{":
            raise Malformed
        if self._rejected:
            yield from self._json_value()
        else:
            self._start(name)
            yield from self._json_value(self._arguments)

    def _closing(self, tag: str) -> Steps[None]:
        """What ends a complete call, where the model writes it."""
        if self._rejected:
            return
        self._hold()
        yield from self._space()
        if (yield from self._match(tag)):
            self._held.clear()
