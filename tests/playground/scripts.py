"""What the fake engine of stage.py says, by seed. Apart from it: importing that one replaces the service's engine."""

from __future__ import annotations

MARKUP = '<script>window.pwned = 1</script><img src="x" onerror="window.pwned = 2"><b>bold</b> &amp; </div>'
MIXED = "שלום עולם, this is Chorus.\nمرحبا بالعالم\n日本語も 🧪👩‍🚀 fine.\ne\u0301tude"
PROSE = (
    "The lamp had burned for ninety years before anyone thought to ask what it was waiting for. "
    "On the last night of the season the keeper climbed the stair, counted the steps out of habit, "
    "and found one more than there had ever been.\n\n"
)

SCRIPT_SEED = 700_000
SCRIPTS = (MARKUP, MIXED, "short and done")
"""Seed SCRIPT_SEED + i says SCRIPTS[i] and ends."""

AGREE_SEED = 700_100
AGREEING = ("Paris", "Lyon, I believe", "paris ")
"""Likewise; the seeds behind them go on for ever."""

FAIL_SEED = 700_200
"""This choice fails at its fourth token."""
