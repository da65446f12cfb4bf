"""The forms in which texts come: one or several, as text or as token ids."""

from __future__ import annotations

from collections.abc import Sequence

from service.errors import invalid


def forms(given: str | Sequence[str | int | list[int]], field: str) -> list[str | list[int]]:
    """The list that any of the four forms stands for. Raises ApiError (400) naming the field."""
    if isinstance(given, str):
        return [given]
    if not given:
        raise invalid(f"`{field}` is an empty array.", field, "empty_array")
    token_ids = [item for item in given if isinstance(item, int)]
    if len(token_ids) == len(given):
        return [token_ids]
    several = [item for item in given if not isinstance(item, int)]
    if len(several) < len(given) or len({type(item) for item in several}) > 1:
        raise invalid(f"`{field}` mixes texts, token ids and lists; give one kind.", field)
    return several
