"""Compares OpenAI-compatible servers on fan-out: `python -m tests.bench --help`."""
