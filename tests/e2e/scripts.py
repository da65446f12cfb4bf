"""The seeds that faulty_app knows. Apart from it: importing that one replaces the service's engine in this process."""

from __future__ import annotations

FAIL_SEED = 900_200
"""This choice alone fails at its fourth token."""

HANG_SEED = 900_300
"""The torch engine's step never returns then."""

SCRIPT_SEED = 800_000
SCRIPTS: tuple[bytes, ...] = (
    "a\U0001f9ea界".encode(),
    "é\U0001f9ea界 done".encode(),
    b"\xf0\x9f\xa7ok\xff\xfe!",
    b"alpha beta gamma " * 8,
    "界x世界x".encode() * 4,
    b"short",
    b"",
)
"""What the fake engine writes for seed SCRIPT_SEED + i, then it ends; bytes, a token each."""

FAULT_POSITION = 3
