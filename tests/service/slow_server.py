"""The launcher over a fake engine that a test can slow down or kill: python -m tests.service.slow_server STEP_SECONDS.

SIGUSR1 kills the engine.
"""

from __future__ import annotations

import signal
import sys

from engine.fake import FakeEngine
from service import __main__ as launching
from service.app import create_app
from service.settings import read_settings


def main() -> int:
    settings = read_settings()
    engine = FakeEngine(settings.engine_config(), step_seconds=float(sys.argv[1]))
    launching.GRACE_SECONDS = 0.5
    launcher = launching.Launcher(create_app(settings, engine=engine))
    signal.signal(signal.SIGUSR1, lambda *_: engine.fail("killed by the test"))
    return launching.run(launcher)


if __name__ == "__main__":
    sys.exit(main())
