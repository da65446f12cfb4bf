"""The real default model, converted once for all tests (and for ./deploy/serve, which uses the same cache folder)."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def model_cache_dir() -> Path:
    """For servers and engines that tests start on the default model, so that none converts it again."""
    return Path(os.environ.get("CHORUS_CACHE_DIR", "~/.cache/chorus")).expanduser()


@pytest.fixture(scope="session")
def default_model_dir(model_cache_dir: Path) -> Path:
    """SmolLM2-135M-Instruct as safetensors with its tokenizer."""
    from engine.config import EngineConfig
    from engine.model import resolve_model

    return resolve_model(EngineConfig(cache_dir=model_cache_dir))
