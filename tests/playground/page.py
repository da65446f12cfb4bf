"""What tests do with a page, and wait for."""

from __future__ import annotations

import re
from typing import Any

import pytest

expect = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: see .ci/playground").expect

VOICE = "#voices > li"


def ask(page: Any, **fields: object) -> None:
    """Fill the form in, by its fields' ids, and send it."""
    fill(page, **fields)
    page.click("#send")


def fill(page: Any, **fields: object) -> None:
    if "system" in fields and not page.locator("#system").is_visible():
        page.get_by_text("System prompt").click()
    for name, value in {"prompt": "Tell me.", **fields}.items():
        field = page.locator(f"#{name.replace('agree_', 'agree-')}")
        if name in ("agree", "model"):
            field.select_option(str(value))
        else:
            field.fill(str(value))


def wait_sent(page: Any) -> None:
    page.locator("#stop-all[aria-disabled=false]").wait_for()


def wait_ended(page: Any) -> None:
    page.locator("#send[aria-disabled=false]").wait_for()


def wait_ready(page: Any) -> None:
    page.locator("#server[data-state=ready]").wait_for()


def voice(page: Any, number: int) -> Any:
    """1 is the first."""
    return page.locator(f"{VOICE}:nth-child({number})")


def wait_tokens(voice_: Any, count: int = 2) -> None:
    """Until it has a good many, so that they can be counted by their figure's width: no test depends on how many."""
    voice_.locator(".count", has_text=re.compile(rf"^[\d,]{{{count},}} tokens")).wait_for()


def states(page: Any) -> list[str]:
    return [item.get_attribute("data-state") for item in page.locator(VOICE).all()]


def texts(page: Any) -> list[str]:
    return page.locator(f"{VOICE} .text").all_text_contents()


def tokens(page: Any) -> list[int]:
    shown = page.locator(f"{VOICE} .count").all_text_contents()
    return [int(text.split()[0].replace(",", "")) for text in shown]
