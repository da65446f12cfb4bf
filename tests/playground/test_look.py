"""How the page behaves for eyes, fingers and screen readers."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from tests.e2e.server import Server

from .conftest import NARROW, WIDE, Open
from .page import ask, expect, voice, wait_ended, wait_ready, wait_tokens
from .scripts import AGREE_SEED

OVERFLOW = "() => document.scrollingElement.scrollWidth - innerWidth"


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [NARROW, WIDE, (800, 600)], ids=["narrow", "wide", "middle"])
def test_nothing_is_cut_off_at_the_side(
    server: Server, open_page: Open, picture: Callable[[Any, str], None], size: tuple[int, int], scheme: str
) -> None:
    page = open_page(f"{server.url}/", size=size, color_scheme=scheme)
    name = f"{size[0]}-{scheme}"
    wait_ready(page)
    picture(page, f"empty-{name}")
    assert page.evaluate(OVERFLOW) <= 0
    ask(page, prompt="x" * 500, n=3, max_tokens="")
    wait_tokens(voice(page, 3), 3)
    picture(page, f"running-{name}")
    assert page.evaluate(OVERFLOW) <= 0
    page.keyboard.press("Escape")
    wait_ended(page)
    ask(page, n=4, seed=AGREE_SEED, agree="text", agree_count=2)
    wait_ended(page)
    picture(page, f"done-{name}")
    ask(page, agree="regex", agree_value="(")
    expect(page.locator("#agree-value")).to_have_attribute("aria-invalid", "true")
    picture(page, f"error-{name}")
    assert page.evaluate(OVERFLOW) <= 0


def test_colours_follow_the_system(server: Server, open_page: Open) -> None:
    grounds = []
    for scheme in ("light", "dark"):
        page = open_page(f"{server.url}/", color_scheme=scheme)
        grounds.append(page.locator("body").evaluate("body => getComputedStyle(body).backgroundColor"))
    light, dark = ([int(part) for part in re.findall(r"\d+", ground)] for ground in grounds)
    assert min(light) > 200 and max(dark) < 60


CONTRAST = """() => {
  const canvas = new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });
  const rgb = (color) => {
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = color;
    canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data];
  };
  const light = ([r, g, b]) => [r, g, b].map((v) => v / 255)
    .map((v) => (v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4))
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const ground = (element) => {
    for (let at = element; at; at = at.parentElement) {
      const color = rgb(getComputedStyle(at).backgroundColor);
      if (color[3] === 255) return color;
    }
    return [255, 255, 255, 255];
  };
  const poor = [];
  for (const element of document.querySelectorAll("body *:not(svg *, option)")) {
    const own = [...element.childNodes].some((node) => node.nodeType === 3 && node.data.trim());
    if (!own || !element.checkVisibility() || element.closest("[aria-disabled=true], .skips, .hidden")) continue;
    const [a, b] = [light(rgb(getComputedStyle(element).color)), light(ground(element))];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < 4.5) poor.push(`${element.textContent.trim().slice(0, 30)} ${ratio.toFixed(2)}`);
  }
  return poor;
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_text_can_be_read_against_its_ground(server: Server, open_page: Open, scheme: str) -> None:
    """4.5 to 1, as WCAG's level AA asks."""
    page = open_page(f"{server.url}/", color_scheme=scheme)
    wait_ready(page)
    assert page.evaluate(CONTRAST) == []
    ask(page, n=4, seed=AGREE_SEED, max_tokens=30, agree="text", agree_count=2)
    wait_ended(page)
    assert page.evaluate(CONTRAST) == []
    ask(page, temperature=9)
    assert page.evaluate(CONTRAST) == []


FOCUSED = "() => document.activeElement.id || document.activeElement.textContent"


def test_all_of_it_by_keyboard_alone(server: Server, open_page: Open) -> None:
    page = open_page(f"{server.url}/")
    wait_ready(page)
    order = []
    while not order or order[-1] != "code-button":
        page.keyboard.press("Tab")
        order.append(page.evaluate(FOCUSED))
        outline = page.locator(":focus-visible")
        assert outline.evaluate("element => getComputedStyle(element).outlineStyle") != "none", order[-1]
        if order[-1] == "prompt":
            page.keyboard.type("Tell me.")
        if order[-1] in ("n", "max_tokens"):
            page.keyboard.press("Delete")  # a field that was tabbed into is selected
            page.keyboard.type("2" if order[-1] == "n" else "900000")
    skips = [text for text in order if text.startswith("Skip to")]
    assert len(skips) == 3 and order[:3] == skips
    named = [name for name in order[3:] if name != "System prompt"]
    fields = ["prompt", "n", "temperature", "max_tokens", "seed", "model", "stop_after", "agree"]
    assert named == [*fields, "send", "stop-all", "code-button"]
    page.keyboard.press("Control+Enter")
    wait_tokens(voice(page, 2))
    while not page.evaluate(FOCUSED).startswith("Stop") or page.evaluate(FOCUSED) == "stop-all":
        page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    expect(voice(page, 1).locator(".state")).to_have_text("cancelled stopped by you")
    expect(page.locator(":focus")).to_have_text("Copy")  # the focus is not lost with what it was on
    page.keyboard.press("Escape")
    wait_ended(page)


def test_a_reader_is_told_politely_and_every_control_has_a_name(server: Server, open_page: Open) -> None:
    page = open_page(f"{server.url}/")
    wait_ready(page)
    for control in page.locator("main :is(button, input, select, textarea)").all():
        if control.is_visible():
            name = control.evaluate("e => e.labels?.[0]?.innerText || e.getAttribute('aria-label') || e.innerText")
            assert name.strip(), control
    ask(page, n=3, max_tokens="")
    status = page.get_by_role("status")
    expect(status).to_have_text("3 voices asked.")
    wait_tokens(voice(page, 1))
    page.get_by_role("button", name="Stop voice 1", exact=True).click()
    expect(status).to_have_text("1 of 3 voices have ended.")
    page.keyboard.press("Escape")
    expect(status).to_contain_text("All ended: 3 voices")


def test_the_charts_show_the_engine(server: Server, open_page: Open) -> None:
    page = open_page(f"{server.url}/")
    ask(page, n=5, max_tokens="")
    for title, figures in {
        "Choices": [r"^5$", r"^0$"],
        "KV pages": [r"^[1-9]", r"^0$", r"^[\d,]+$"],
        "Step time": [r"^[\d.,]+ ms$"],
        "Tokens": [r"^[1-9]"],
    }.items():
        chart = page.locator("figure", has=page.get_by_text(title, exact=True))
        for value, figure in zip(chart.locator("dd").all(), figures, strict=True):
            expect(value).to_have_text(re.compile(figure))
        expect(chart.get_by_role("img")).to_have_attribute(
            "aria-label", re.compile(rf"^{title} in the last minute, now")
        )
        expect(chart.locator("path.line").first).to_have_attribute("d", re.compile(r"^M.*L"))
    page.keyboard.press("Escape")
    wait_ended(page)


def test_nothing_moves_for_those_who_want_nothing_to_move(server: Server, open_page: Open) -> None:
    for motion, moves in (("no-preference", True), ("reduce", False)):
        page = open_page(f"{server.url}/", reduced_motion=motion)
        ask(page, n=2, max_tokens="")
        wait_tokens(voice(page, 2))
        assert (page.evaluate("() => document.getAnimations().length") > 0) is moves
        page.keyboard.press("Escape")
        wait_ended(page)
