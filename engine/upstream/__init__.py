"""Any OpenAI-compatible server, or several of them, as the engine."""
