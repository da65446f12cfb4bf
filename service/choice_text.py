"""The text of one choice as its updates come in: characters, stop strings, then reasoning and tool calls."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from engine.api import CallDelta, ChoiceFailed, ChoiceUpdate, EndReason, TextDelta
from service.detokenizer import IncrementalDetokenizer, StopMatch, StopMatcher, StopStrings
from service.errors import error_body
from service.logs import log_unexpected
from service.parsers import (
    ContentDelta,
    OutputParser,
    Piece,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallStart,
    merge,
)
from service.schemas.common import ErrorDetail
from service.token_entries import TokenEntries, TokenEntry
from service.tokenizer import Tokenizer

logger = logging.getLogger("chorus.generation")


@dataclass(frozen=True, slots=True)
class TextRules:
    """How tokens become text.

    stop: stop strings. include_stop: what ends a choice is part of its text. show_special: so are special tokens.
    continues: the text goes on from the prompt's. new_parser: one for each choice; without any all is content.
    markers: spellings of special tokens that the parser must see. max_calls: a choice ends where one more would begin.
    """

    stop: tuple[str, ...] = ()
    include_stop: bool = False
    show_special: bool = False
    continues: bool = False
    new_parser: Callable[[], OutputParser] = lambda: OutputParser(None, None)
    markers: frozenset[str] = frozenset()
    max_calls: int | None = None


@dataclass(slots=True)  # one a token, and a frozen one takes six times as long to make
class ChoiceEvent:
    """What one engine update adds to one choice; the last one, and no other, has an end_reason. Nobody changes it.

    index: prompt * n + choice. text: content, may be empty. token_ids: those that count, up to the one that completed a
    stop string. num_tokens: how many (of text, see TextDelta); num_reasoning_tokens: of them.
    stop_reason: the stop string or token id. entries: where log probabilities were asked for, of the tokens whose text
    is out; over all events one for each token that counts. error: what the client is told where the end_reason is
    ERROR. calls: what the parser made of the text that is neither content nor reasoning. ordered: where there are
    calls, all of it in its order. kv_transfer_params: as the engine says it.
    """

    index: int
    text: str
    token_ids: tuple[int, ...] = ()
    num_tokens: int = 0
    end_reason: EndReason | None = None
    stop_reason: int | str | None = None
    entries: tuple[TokenEntry, ...] = ()
    error: ErrorDetail | None = None
    reasoning: str = ""
    calls: tuple[ToolCallStart | ToolCallArguments, ...] = ()
    num_reasoning_tokens: int = 0
    ordered: tuple[Piece, ...] = ()
    kv_transfer_params: dict[str, object] | None = None

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """Reasoning, text and calls as they followed each other."""
        if self.ordered:
            return self.ordered
        reasoning = (ReasoningDelta(self.reasoning),) if self.reasoning else ()
        return (*reasoning, ContentDelta(self.text)) if self.text else reasoning


class ChoiceText:
    """One choice's."""

    def __init__(
        self,
        index: int,
        tokenizer: Tokenizer,
        rules: TextRules,
        stops: StopStrings,
        min_tokens: int,
        request_id: str | None = None,
    ) -> None:
        """stops: those of the rules, as the automaton that all choices share."""
        self._index = index
        self._rules = rules
        self._tokenizer = tokenizer
        self._detokenizer = IncrementalDetokenizer(tokenizer, continues=rules.continues, hides=self._hides)
        self._matcher = StopMatcher(stops)
        self._parser = rules.new_parser()
        self._entries = TokenEntries(tokenizer)
        self._min_tokens = min_tokens
        self._is_plain = self._parser.is_plain and not rules.stop
        self._request_id = request_id
        self._num_tokens = 0
        self._num_made = 0  # characters of the detokenised text
        self._num_passed = 0  # of them past the stop strings

    def _hides(self, token_id: int) -> bool:
        if self._rules.show_special or not self._tokenizer.is_special(token_id):
            return False
        return self._tokenizer.token_bytes(token_id).decode(errors="replace") not in self._rules.markers

    def advance(self, update: ChoiceUpdate, *, isolates: bool = False) -> ChoiceEvent:
        """Raises ChoiceFailed when the engine says so. isolates: whatever goes wrong is the choice's last event."""
        try:
            return self._advance(update)
        except Exception as error:
            if not isolates:
                raise
            return self._failure(error)

    def _advance(self, update: ChoiceUpdate) -> ChoiceEvent:
        if update.end_reason is EndReason.ERROR:
            raise update.cause or ChoiceFailed(update.error or "the choice could not go on")
        if self._is_plain and update.end_reason is None and not update.logprobs and update.delta is None:
            return self._plain_event(update.token_ids)
        said = _Said()
        if update.delta is not None:
            said.stop = self._feed_text(update.text, update.delta, said)
        for position in range(len(update.token_ids)):
            said.stop = self._feed(self._piece(update, position), said)
            said.num_tokens += 1
            if said.stop is not None or said.is_over:
                return self._event(said, update, EndReason.STOP, said.stop)
        if update.end_reason is not None:
            self._pass(self._matcher.flush(), said)
        stopped = said.stop is not None
        return self._event(
            said, update, EndReason.STOP if stopped else update.end_reason, said.stop or update.stop_reason
        )

    def _plain_event(self, token_ids: tuple[int, ...]) -> ChoiceEvent:
        """What the general way comes to, in a third of its time, where no text is held back or means anything."""
        text = "".join(map(self._detokenizer.feed, token_ids))
        self._num_tokens += len(token_ids)
        self._num_made += len(text)
        self._num_passed += len(text)
        return ChoiceEvent(self._index, text, token_ids, len(token_ids))

    def _piece(self, update: ChoiceUpdate, position: int) -> str:
        """The text that one token completes."""
        is_end = update.end_reason is EndReason.STOP and position == len(update.token_ids) - 1
        start = self._num_made
        piece = self._detokenizer.feed(update.token_ids[position])
        if is_end and not self._rules.include_stop:
            piece = ""  # the token that ended it is not text, even where the vocabulary gives it some
        self._num_made += len(piece)
        if position < len(update.logprobs):
            end = self._num_made + self._detokenizer.is_inside_character
            self._entries.add(update.logprobs[position], start, end)
        return piece

    def _feed_text(self, text: str, delta: TextDelta, said: _Said) -> str | None:
        """The stop string that text of the engine's own completes. Its tokens stand one behind the other in it."""
        start = self._num_made
        self._num_made += len(text)
        for entry in delta.logprobs:
            end = min(start + len(entry.token.decode(errors="replace")), self._num_made)
            self._entries.add(entry, start, end)
            start = end
        said.num_tokens += delta.num_tokens
        said.num_reasoning_tokens += delta.num_reasoning_tokens
        if delta.reasoning:
            said.pieces.append(ReasoningDelta(delta.reasoning))
        stop = self._feed(text, said) if text else None
        if stop is None:
            said.pieces += [piece for call in delta.calls for piece in _call_pieces(call)]
        return stop

    def _feed(self, piece: str, said: _Said) -> str | None:
        """The stop string that it completes. They count in what comes after the first min_tokens tokens."""
        self._num_tokens += 1
        was_reasoning = self._parser.is_reasoning
        step = self._matcher.feed(piece) if self._num_tokens > self._min_tokens else piece
        if isinstance(step, StopMatch):
            self._pass(step.text + (step.stop if self._rules.include_stop else ""), said)
        else:
            self._pass(step, said)
        said.num_reasoning_tokens += was_reasoning or self._parser.is_reasoning
        return step.stop if isinstance(step, StopMatch) else None

    def _pass(self, text: str, said: _Said) -> None:
        self._num_passed += len(text)
        self._say(self._parser.feed(text), said)

    def _say(self, pieces: list[Piece], said: _Said) -> None:
        for piece in pieces:
            if isinstance(piece, ToolCallStart) and piece.index == self._rules.max_calls:
                said.is_over = True
            if not said.is_over:
                said.pieces.append(piece)

    def _event(
        self, said: _Said, update: ChoiceUpdate, end_reason: EndReason | None, stop_reason: int | str | None
    ) -> ChoiceEvent:
        has_ended = end_reason is not None
        if has_ended:
            self._say(self._parser.finish(), said)
        pieces = merge(said.pieces)
        calls = tuple(piece for piece in pieces if isinstance(piece, ToolCallStart | ToolCallArguments))
        return ChoiceEvent(
            self._index,
            "".join(piece.text for piece in said.pieces if isinstance(piece, ContentDelta)),
            update.token_ids[: said.num_tokens],
            said.num_tokens,
            end_reason,
            stop_reason,
            self._entries.take_all(self._num_passed) if has_ended else self._entries.take(self._num_out),
            reasoning="".join(piece.text for piece in said.pieces if isinstance(piece, ReasoningDelta)),
            calls=calls,
            num_reasoning_tokens=said.num_reasoning_tokens,
            ordered=tuple(pieces) if calls else (),
            kv_transfer_params=update.kv_transfer_params,
        )

    @property
    def _num_out(self) -> int:
        return self._num_passed - self._parser.num_held

    def _failure(self, error: Exception) -> ChoiceEvent:
        info = error_body(error).identified(self._request_id)
        if info.unexpected:
            log_unexpected(logger, "unexpected error in a choice", error, request_id=self._request_id)
        said = _Said()
        self._pass(self._matcher.flush(), said)
        return replace(self._event(said, ChoiceUpdate(), EndReason.ERROR, None), error=info.detail())


def _call_pieces(call: CallDelta) -> Iterator[ToolCallStart | ToolCallArguments]:
    if call.name is not None:
        yield ToolCallStart(call.index, call.id or "", call.name)
    if call.arguments:
        yield ToolCallArguments(call.index, call.arguments)


@dataclass(slots=True)
class _Said:
    """What one update has come to. stop: the stop string that it completes. is_over: nothing more may be said."""

    pieces: list[Piece] = field(default_factory=list)
    num_tokens: int = 0
    num_reasoning_tokens: int = 0
    stop: str | None = None
    is_over: bool = False
