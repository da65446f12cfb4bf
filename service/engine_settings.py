"""Which settings mean something to which engine: one that does nothing would be believed to work."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields

from engine.config import EngineConfig, UpstreamConfig, VllmOptions

_VLLM_ONLY = tuple(option.name for option in fields(VllmOptions))
_NOT_VLLM = ("runner", "num_speculative_tokens", "num_threads")
_NOT_UPSTREAM = ("embedding_model", "served_embedding_model_name")
_UPSTREAM_ONLY = tuple(f"upstream_{option.name}" for option in fields(UpstreamConfig))


def refusal(given: Mapping[str, object], prefix: str) -> str | None:
    """Why these do not go together, if they do not. given: the settings whose variables are set, by their names."""
    engine = given.get("engine", "torch")
    if engine == "upstream" and "upstream_urls" not in given:
        return f"{prefix}ENGINE=upstream needs {prefix}UPSTREAM_URLS"
    for name in _NOT_UPSTREAM if engine == "upstream" else _UPSTREAM_ONLY:
        if name in given:
            variable, needed = f"{prefix}{name.upper()}", f"{prefix}ENGINE=upstream"
            return f"{variable} means nothing to upstreams" if engine == "upstream" else f"{variable} needs {needed}"
    for name in _NOT_VLLM if engine == "vllm" else _VLLM_ONLY:
        if name in given:
            variable = f"{prefix}{name.upper()}"
            return f"{variable} means nothing to vLLM" if engine == "vllm" else f"{variable} needs {prefix}ENGINE=vllm"
    embedding = given.get("served_embedding_model_name")
    if embedding is not None and embedding == given.get("served_model_name", EngineConfig().served_model_name):
        return f"{prefix}SERVED_EMBEDDING_MODEL_NAME={embedding}: the other model has this name"
    return None
