"""The output of a response while it is made: items that are begun, grow and are done, one after the other."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar, TypedDict

from service.parsers import ContentDelta, Piece, ReasoningDelta, ToolCallArguments, ToolCallStart
from service.schemas import response_events as events
from service.schemas.logprobs import TokenLogprob
from service.schemas.response_events import ResponseEvent
from service.schemas.response_items import (
    ItemStatus,
    OutputCall,
    OutputItem,
    OutputMessage,
    OutputReasoning,
    OutputText,
    ReasoningText,
)

Number = Callable[[], int]
"""The next event's sequence number."""


class _Place(TypedDict):
    sequence_number: int
    item_id: str
    output_index: int


class _Growing(ABC):
    """An item from its first piece on."""

    prefix: ClassVar[str]

    def __init__(self, index: int, response_id: str, number: Number) -> None:
        self._index = index
        self._id = f"{self.prefix}_{response_id.partition('_')[2]}{index:04x}"
        self._number = number
        self._pieces: list[str] = []

    @property
    def _text(self) -> str:
        return "".join(self._pieces)

    def _place(self) -> _Place:
        """Of one event, which takes a number with it."""
        return {"sequence_number": self._number(), "item_id": self._id, "output_index": self._index}

    def _added(self, item: OutputItem) -> ResponseEvent:
        return events.ItemAdded(sequence_number=self._number(), output_index=self._index, item=item)

    def _done(self, status: ItemStatus) -> ResponseEvent:
        return events.ItemDone(sequence_number=self._number(), output_index=self._index, item=self.item(status))

    @abstractmethod
    def item(self, status: ItemStatus) -> OutputItem: ...

    @abstractmethod
    def begin(self) -> list[ResponseEvent]: ...

    @abstractmethod
    def add(self, text: str, logprobs: Sequence[TokenLogprob]) -> ResponseEvent: ...

    @abstractmethod
    def end(self, status: ItemStatus, logprobs: Sequence[TokenLogprob]) -> list[ResponseEvent]:
        """logprobs: those that have come since the last piece."""


class _Message(_Growing):
    prefix = "msg"

    def __init__(self, index: int, response_id: str, number: Number) -> None:
        super().__init__(index, response_id, number)
        self._logprobs: list[TokenLogprob] = []

    def item(self, status: ItemStatus) -> OutputMessage:
        return OutputMessage(id=self._id, status=status, content=[self._part()])

    def _part(self) -> OutputText:
        return OutputText(text=self._text, logprobs=list(self._logprobs))

    def begin(self) -> list[ResponseEvent]:
        added = self._added(OutputMessage(id=self._id, status="in_progress", content=[]))
        return [added, events.PartAdded(**self._place(), part=self._part())]

    def add(self, text: str, logprobs: Sequence[TokenLogprob]) -> ResponseEvent:
        self._pieces.append(text)
        self._logprobs += logprobs
        return events.TextDelta(**self._place(), delta=text, logprobs=list(logprobs))

    def end(self, status: ItemStatus, logprobs: Sequence[TokenLogprob]) -> list[ResponseEvent]:
        self._logprobs += logprobs
        return [
            events.TextDone(**self._place(), text=self._text, logprobs=list(self._logprobs)),
            events.PartDone(**self._place(), part=self._part()),
            self._done(status),
        ]


class _Reasoning(_Growing):
    prefix = "rs"

    def item(self, status: ItemStatus) -> OutputReasoning:
        return OutputReasoning(id=self._id, content=[self._part()], status=status)

    def _part(self) -> ReasoningText:
        return ReasoningText(text=self._text)

    def begin(self) -> list[ResponseEvent]:
        added = self._added(OutputReasoning(id=self._id, content=[], status="in_progress"))
        return [added, events.PartAdded(**self._place(), part=self._part())]

    def add(self, text: str, logprobs: Sequence[TokenLogprob]) -> ResponseEvent:
        self._pieces.append(text)
        return events.ReasoningDelta(**self._place(), delta=text)

    def end(self, status: ItemStatus, logprobs: Sequence[TokenLogprob]) -> list[ResponseEvent]:
        return [
            events.ReasoningDone(**self._place(), text=self._text),
            events.PartDone(**self._place(), part=self._part()),
            self._done(status),
        ]


class _Call(_Growing):
    prefix = "fc"

    def __init__(self, index: int, response_id: str, number: Number, start: ToolCallStart) -> None:
        super().__init__(index, response_id, number)
        self._start = start

    def item(self, status: ItemStatus) -> OutputCall:
        start = self._start
        return OutputCall(id=self._id, call_id=start.id, name=start.name, arguments=self._text, status=status)

    def begin(self) -> list[ResponseEvent]:
        return [self._added(self.item("in_progress"))]

    def add(self, text: str, logprobs: Sequence[TokenLogprob]) -> ResponseEvent:
        self._pieces.append(text)
        return events.ArgumentsDelta(**self._place(), delta=text)

    def end(self, status: ItemStatus, logprobs: Sequence[TokenLogprob]) -> list[ResponseEvent]:
        done = events.ArgumentsDone(**self._place(), name=self._start.name, arguments=self._text)
        return [done, self._done(status)]


class ResponseOutput:
    """All items of one response. Log probabilities go with the text that comes next, or ends."""

    def __init__(self, response_id: str, number: Number) -> None:
        self._response_id = response_id
        self._number = number
        self._items: list[OutputItem] = []
        self._open: _Growing | None = None
        self._logprobs: list[TokenLogprob] = []

    def items(self) -> list[OutputItem]:
        """As they are now; one that is not done is incomplete."""
        return self._items if self._open is None else [*self._items, self._open.item("incomplete")]

    def add(self, pieces: Sequence[Piece], logprobs: Sequence[TokenLogprob]) -> list[ResponseEvent]:
        self._logprobs += logprobs
        return [event for piece in pieces for event in self._add(piece)]

    def _add(self, piece: Piece) -> list[ResponseEvent]:
        match piece:
            case ContentDelta(text=text):
                return self._grow(_Message, text)
            case ReasoningDelta(text=text):
                return self._grow(_Reasoning, text)
            case ToolCallStart():
                return self._begin(_Call(len(self.items()), self._response_id, self._number, piece))
            case ToolCallArguments(json_fragment=fragment):
                assert self._open is not None
                return [self._open.add(fragment, ())]

    def _grow(self, kind: type[_Message] | type[_Reasoning], text: str) -> list[ResponseEvent]:
        begun = []
        if not isinstance(self._open, kind):
            if isinstance(self._open, _Call):
                text = text.lstrip()  # what parted it from the call
            begun = self._begin(kind(len(self.items()), self._response_id, self._number))
        assert self._open is not None
        return [*begun, self._open.add(text, self._taken() if kind is _Message else ())]

    def _begin(self, item: _Growing) -> list[ResponseEvent]:
        ended = self._end("completed")
        self._open = item
        return [*ended, *item.begin()]

    def _end(self, status: ItemStatus) -> list[ResponseEvent]:
        ended, self._open = self._open, None
        if ended is None:
            return []
        events = ended.end(status, self._taken() if isinstance(ended, _Message) else ())
        self._items.append(ended.item(status))
        return events

    def _taken(self) -> list[TokenLogprob]:
        taken, self._logprobs = self._logprobs, []
        return taken

    def finish(self, status: ItemStatus) -> list[ResponseEvent]:
        """status: of the item that is not done. A complete answer without a word has an empty message."""
        begun = []
        if status == "completed" and all(isinstance(item, OutputReasoning) for item in self.items()):
            begun = self._begin(_Message(len(self.items()), self._response_id, self._number))
        return [*begun, *self._end(status)]
