"""Which engine serves. The only room, with tokenizer.py, that knows more of `engine` than its contract."""

from __future__ import annotations

from engine.api import Engine
from engine.config import EngineConfig
from engine.embedding import Embedder
from engine.plan import ModelRunner
from service.settings import Settings, SettingsError


def build_engine(settings: Settings) -> Engine:
    """Imports no torch and loads nothing: that is done by the engine's own thread. Raises SettingsError."""
    config = settings.engine_config()
    match settings.engine:
        case "torch":
            from engine.thread import EngineThread

            return EngineThread(config, _load_runner, _load_embedder)
        case "fake":
            from engine.fake import FakeEngine

            return FakeEngine(config)
        case "vllm":
            from engine.vllm import VllmEngine

            return VllmEngine(config, settings.vllm_options(), _load_embedder)
        case "upstream":
            from engine.upstream.engine import UpstreamEngine

            return UpstreamEngine(config, settings.upstream_config())
        case _:
            raise SettingsError(f"CHORUS_ENGINE={settings.engine} is not supported by this version")


def _load_runner(config: EngineConfig) -> ModelRunner:
    from engine.runner import load_runner

    return load_runner(config)


def _load_embedder(config: EngineConfig) -> Embedder | None:
    from engine.embedder import load_embedder

    return load_embedder(config)
