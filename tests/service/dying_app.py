"""An app for plain hypercorn whose model cannot be loaded."""

from __future__ import annotations

from engine.fake import FakeEngine
from service.app import create_app, end_process
from service.settings import read_settings


async def _fail() -> None:
    raise RuntimeError("no such model")


settings = read_settings()
app = create_app(settings, engine=FakeEngine(settings.engine_config(), load=_fail), on_death=end_process)
