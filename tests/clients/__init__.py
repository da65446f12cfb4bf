"""See conftest.py."""

DEFAULT = "SmolLM2-135M-Instruct"
QUESTION = "What is the capital of France?"
PARIS = "The capital of France is Paris."
