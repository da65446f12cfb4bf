"""The exact bytes that a tokenizer's pieces stand for, in the two families that causal models use."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import TYPE_CHECKING

from engine.config import ModelLoadError

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend


def _byte_table() -> dict[str, int]:
    """GPT-2's printable character for each byte, inverted."""
    kept = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = [byte for byte in range(256) if byte not in set(kept)]
    return {chr(byte): byte for byte in kept} | {chr(256 + k): byte for k, byte in enumerate(moved)}


_BYTE_OF = _byte_table()
_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def byte_level_bytes(piece: str) -> bytes:
    if all(character in _BYTE_OF for character in piece):
        return bytes(_BYTE_OF[character] for character in piece)
    return piece.encode()


def _sentencepiece_bytes(piece: str) -> bytes:
    if match := _BYTE_PIECE.fullmatch(piece):
        return bytes([int(match.group(1), 16)])
    return piece.replace("▁", " ").encode()


def decoder_rules(backend: Backend) -> tuple[Callable[[str], bytes], bool]:
    """How this tokenizer's pieces become bytes, and whether a space at the very start goes."""
    decoder = json.loads(backend.to_str())["decoder"] or {"type": "none"}
    steps = {step["type"]: step for step in decoder.get("decoders", [decoder])}
    if "ByteLevel" in steps:
        return byte_level_bytes, False
    if "Metaspace" in steps:
        return _sentencepiece_bytes, steps["Metaspace"].get("prepend_scheme") != "never"
    if "Replace" in steps and steps["Replace"].get("content") == " ":
        return _sentencepiece_bytes, steps.get("Strip", {}).get("start", 0) > 0
    raise ModelLoadError(f"the tokenizer's decoder ({', '.join(steps)}) is not supported")
