"""A conversation that is too long for the model, without its beginning."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from service.messages import RenderedMessage

Prompt = tuple[list[int], str]


async def shortened_prompt(
    messages: Sequence[RenderedMessage], prompt: Callable[[Sequence[RenderedMessage]], Awaitable[Prompt]], room: int
) -> Prompt:
    """The prompt of as many of the last messages as make at most `room` tokens, or of as few as can be.

    System messages stay, the last message too, and what a call gave goes with the call.
    """
    starts = [number for number, message in enumerate(messages) if message["role"] not in ("system", "tool")] or [0]
    if len(messages) <= room:
        starts[0] = 0
    else:  # each is a token at least
        starts = [start for start in starts if len(messages) - start <= room] or starts[-1:]
    tried = await prompt(_from(messages, starts[0]))
    fitting = tried if len(tried[0]) <= room else None
    low, high = (1, len(starts) - 1) if fitting is None else (1, 0)  # of starts, the first that fits
    while low <= high:
        middle = (low + high) // 2
        tried = await prompt(_from(messages, starts[middle]))
        if len(tried[0]) <= room:
            fitting, high = tried, middle - 1
        else:
            low = middle + 1
    return fitting or tried  # where none fits, that was the shortest


def _from(messages: Sequence[RenderedMessage], start: int) -> list[RenderedMessage]:
    system = [message for message in messages[:start] if message["role"] == "system"]
    return [*system, *messages[start:]]
