"""Chorus: the HTTP side."""

__version__ = "0.1.0"
