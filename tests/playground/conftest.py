"""The playground in headless Chromium, against real servers whose engine is a fake.

Without Chromium or playwright the tests are a skip with its reason; CHORUS_TEST_PLAYGROUND=required, as .ci/playground
sets it, makes that a failure. CHORUS_TEST_SCREENSHOTS names a folder for pictures, for people to look at.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.fixtures import servers
from tests.e2e.server import Server, Servers, Spec

__all__ = ["servers"]

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
SETTLE_MS = 30_000
WIDE, NARROW = (1600, 1000), (360, 780)
MODEL = "org/model"

Open = Callable[..., Any]


@dataclass(frozen=True)
class Stage(Spec):
    """stage.py in place of the service; root_path: behind it, under plain hypercorn."""

    root_path: str = ""

    def command(self, port: int) -> list[str]:
        if not self.root_path:
            return [sys.executable, "-m", "tests.playground.stage"]
        where = ["-k", self.worker, "-b", f"127.0.0.1:{port}", "--root-path", self.root_path]
        return [sys.executable, "-m", "hypercorn", *where, "tests.playground.stage:app"]


def stage(worker: str = "asyncio", root_path: str = "", **more: object) -> Stage:
    settings = {
        "CHORUS_ENGINE": "fake",
        "CHORUS_SERVED_MODEL_NAME": MODEL,
        "CHORUS_MAX_MODEL_LEN": 2**20,
        "CHORUS_KV_CACHE_BYTES": 2**26,
        **more,
    }
    pairs = tuple(sorted((name, str(value)) for name, value in settings.items()))
    return Stage("service", worker, pairs, root_path)


@pytest.fixture
def server(servers: Servers) -> Iterator[Server]:
    """Whatever the page did, nothing may run afterwards."""
    server = servers.get(stage())
    yield server
    server.wait_idle()


@pytest.fixture(scope="package")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture
def open_page(browser: Any) -> Iterator[Open]:
    """A new page, alone in its context. At the end none may have failed, broken its policy, or asked anybody else."""
    contexts: list[Any] = []
    complaints: list[str] = []

    def open_(url: str, *, size: tuple[int, int] = WIDE, **options: Any) -> Any:
        viewport = {"width": size[0], "height": size[1]}
        context = browser.new_context(viewport=viewport, **options)
        context.set_default_timeout(SETTLE_MS)
        contexts.append(context)
        page = context.new_page()
        page.on("pageerror", lambda error: complaints.append(f"uncaught: {error}"))
        page.on("console", lambda message: _note(complaints, message))
        page.on("request", lambda request: request.url.startswith(url) or complaints.append(f"asked {request.url}"))
        page.goto(url)
        return page

    yield open_
    for context in contexts:
        context.close()
    assert complaints == []


def _note(complaints: list[str], message: Any) -> None:
    """Chromium itself notes every answer that is an error; those are the tests' to expect."""
    if message.type in ("error", "warning") and "Failed to load resource" not in message.text:
        complaints.append(f"{message.type}: {message.text}")


@pytest.fixture
def picture() -> Callable[[Any, str], None]:
    """Keep what a page looks like, where somebody asked for it."""
    folder = os.environ.get("CHORUS_TEST_SCREENSHOTS")

    def take(page: Any, name: str) -> None:
        if folder is not None:
            page.screenshot(path=Path(folder) / f"{name}.png")

    return take


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing = "playwright" if find_spec("playwright") is None else "" if CHROMIUM else "chromium"
    if not missing:
        return
    if os.environ.get("CHORUS_TEST_PLAYGROUND") == "required":
        raise pytest.UsageError(f"the playground's tests need {missing}, which is not installed")
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.skip(f"{missing} is not installed: see .ci/playground"))
