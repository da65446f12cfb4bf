"""Chorus' inference engines behind one contract (`engine.api`). Knows tokens, never HTTP."""
