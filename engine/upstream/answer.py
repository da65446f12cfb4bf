"""An answer's events to updates: one choice's chunks, in the shapes in which servers write them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import msgspec
from msgspec import Struct

from engine.api import CallDelta, ChoiceUpdate, EndReason, TextDelta, TextLogprobs
from engine.upstream.refusals import Refusal, refusal_in_stream

_ENDS = {"stop": EndReason.STOP, "tool_calls": EndReason.STOP, "function_call": EndReason.STOP}
"""All others say that something is missing: `length`, `content_filter`, `abort`."""


class _Function(Struct):
    name: str | None = None
    arguments: str | None = None


class _Call(Struct):
    index: int | None = None
    id: str | None = None
    function: _Function | None = None


class _Delta(Struct):
    content: str | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[_Call] | None = None


class _Top(Struct):
    token: str
    logprob: float
    bytes: list[int] | None = None


class _Token(_Top):
    top_logprobs: list[_Top] | None = None


class _Logprobs(Struct):
    """A chat's (content) or a completion's (the rest)."""

    content: list[_Token] | None = None
    tokens: list[str] | None = None
    token_logprobs: list[float | None] | None = None
    top_logprobs: list[dict[str, float] | None] | None = None


class _Choice(Struct):
    delta: _Delta | None = None
    text: str | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    end_reason: str | None = None
    logprobs: _Logprobs | None = None
    error: msgspec.Raw = msgspec.Raw()


class _PromptDetails(Struct):
    cached_tokens: int | None = None


class _CompletionDetails(Struct):
    reasoning_tokens: int | None = None


class Usage(Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _PromptDetails | None = None
    completion_tokens_details: _CompletionDetails | None = None

    @property
    def cached_tokens(self) -> int:
        details = self.prompt_tokens_details
        return 0 if details is None else details.cached_tokens or 0

    @property
    def reasoning_tokens(self) -> int:
        details = self.completion_tokens_details
        return 0 if details is None else details.reasoning_tokens or 0


class _Chunk(Struct):
    choices: list[_Choice] | None = None
    usage: Usage | None = None
    error: msgspec.Raw = msgspec.Raw()


_decoder = msgspec.json.Decoder(_Chunk)


class Answer:
    """One choice's chunks, in order. usage: once the server has told. has_begun: it has made something. finished: it
    has said how the choice ended.
    """

    def __init__(self) -> None:
        self.usage: Usage | None = None
        self.has_begun = False
        self.num_tokens = 0
        self._end: ChoiceUpdate | None = None
        self._calls: dict[int, int] = {}

    @property
    def finished(self) -> bool:
        return self._end is not None

    def read(self, data: str) -> ChoiceUpdate | None:
        """What a chunk adds; None where that is nothing yet. Raises Refusal, where the server reports an error."""
        try:
            chunk = _decoder.decode(data)
        except (msgspec.DecodeError, UnicodeEncodeError) as error:
            raise Refusal.broken(f"it has sent what is no chunk of an answer: {error}") from None
        if _is_said(chunk.error):
            raise refusal_in_stream(bytes(chunk.error))
        self.usage = chunk.usage or self.usage
        return self._read(chunk.choices[0]) if chunk.choices else None

    def last_update(self) -> ChoiceUpdate:
        """The last update, where the server has said how the choice ended or that it did."""
        end = self._end or ChoiceUpdate(end_reason=EndReason.STOP)
        if self.usage is None:
            return end
        correction, self.num_tokens = self.usage.completion_tokens - self.num_tokens, self.usage.completion_tokens
        return replace(end, delta=TextDelta(correction, num_reasoning_tokens=self.usage.reasoning_tokens))

    def _read(self, choice: _Choice) -> ChoiceUpdate | None:
        delta = choice.delta or _Delta()
        text = (choice.text or "") + (delta.content or "") + (delta.refusal or "")
        reasoning = delta.reasoning_content or delta.reasoning or ""
        calls = tuple(map(self._call, delta.tool_calls or ()))
        logprobs = _logprobs(choice.logprobs)
        if choice.finish_reason is not None:
            self._finish(choice)
        if not (text or reasoning or calls or logprobs):
            return None
        self.has_begun = True
        num_tokens = max(1, len(logprobs))
        self.num_tokens += num_tokens
        return ChoiceUpdate(text=text, delta=TextDelta(num_tokens, reasoning, calls, logprobs))

    def _finish(self, choice: _Choice) -> None:
        self.has_begun = True
        if _is_said(choice.error):
            raise refusal_in_stream(bytes(choice.error))
        told = choice.end_reason if choice.end_reason in set(EndReason) else None
        reason = EndReason(told) if told else _ENDS.get(choice.finish_reason or "", EndReason.LENGTH)
        if reason is EndReason.ERROR:
            raise Refusal.failed("the choice could not go on")
        self._end = ChoiceUpdate(end_reason=reason, stop_reason=choice.stop_reason)

    def _call(self, call: _Call) -> CallDelta:
        """Servers number calls from where they like; some do not number them at all."""
        theirs = call.index if call.index is not None else len(self._calls) - (not call.id)
        is_new = theirs not in self._calls
        index = self._calls.setdefault(theirs, len(self._calls))
        function = call.function or _Function()
        arguments = function.arguments or ""
        if not is_new:
            return CallDelta(index, arguments)
        return CallDelta(index, arguments, call.id or f"call_{index}", function.name or "")


def _is_said(error: msgspec.Raw) -> bool:
    return bytes(error) not in (b"", b"null", b"{}", b'""', b"false")


def _logprobs(told: _Logprobs | None) -> tuple[TextLogprobs, ...]:
    if told is None:
        return ()
    if told.content is not None:
        return tuple(
            TextLogprobs(
                _bytes(token), token.logprob, tuple((_bytes(top), top.logprob) for top in token.top_logprobs or ())
            )
            for token in told.content
        )
    tokens, logprobs = told.tokens or (), told.token_logprobs or ()
    tops: Sequence[dict[str, float] | None] = told.top_logprobs or [None] * len(tokens)
    return tuple(
        TextLogprobs(_unspelled(token), logprob or 0.0, tuple((_unspelled(name), each) for name, each in _best(top)))
        for token, logprob, top in zip(tokens, logprobs, tops, strict=False)
    )


def _best(top: dict[str, float] | None) -> list[tuple[str, float]]:
    return sorted((top or {}).items(), key=lambda item: -item[1])


def _bytes(token: _Top) -> bytes:
    try:
        return token.token.encode() if token.bytes is None else bytes(token.bytes)
    except ValueError:
        return token.token.encode()


def _unspelled(token: str) -> bytes:
    r"""Parts of characters are written as `bytes:\xe2\x82`."""
    spelled = token.removeprefix("bytes:").replace("\\x", "")
    try:
        return bytes.fromhex(spelled) if token.startswith("bytes:\\x") else token.encode()
    except ValueError:
        return token.encode()
