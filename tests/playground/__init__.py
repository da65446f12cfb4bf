"""See conftest.py."""
