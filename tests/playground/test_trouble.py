"""Keys, refusals and lost connections: the page says what is wrong and what can be done."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import httpx
import pytest

from tests.e2e.server import Server, Servers

from .conftest import MODEL, Open, stage
from .page import ask, expect, fill, states, texts, voice, wait_ended, wait_ready, wait_tokens


@pytest.fixture
def with_keys(servers: Servers, tmp_path_factory: pytest.TempPathFactory) -> Server:
    keys = Path(__file__).parent / "keys.txt"
    return servers.get(stage(CHORUS_API_KEYS_FILE=keys))


def test_a_key_is_asked_for_kept_in_the_tab_only_and_forgotten(with_keys: Server, open_page: Open) -> None:
    page = open_page(f"{with_keys.url}/")
    dialog = page.get_by_role("dialog", name="API key")
    expect(dialog).to_be_visible()
    page.get_by_label("Key", exact=True).fill("wrong")
    page.keyboard.press("Enter")
    expect(dialog.get_by_role("alert")).to_have_text("This key is not known here.")
    page.get_by_label("Key", exact=True).fill("sk-playground")
    page.keyboard.press("Enter")
    wait_ready(page)
    ask(page, n=2, max_tokens=20)
    wait_ended(page)
    assert states(page) == ["length"] * 2
    expect(page.locator("#charts dd").first).to_have_text(re.compile(r"\d"))
    kept = page.evaluate("() => [Object.values(sessionStorage), Object.values(localStorage), document.cookie]")
    assert kept == [["sk-playground"], [], ""]
    assert "sk-playground" not in page.content() and "sk-" not in page.url
    page.click("#code-button")
    expect(page.locator("#code")).to_contain_text('-H "Authorization: Bearer $CHORUS_API_KEY"')
    page.keyboard.press("Escape")
    page.reload()
    wait_ready(page)
    page.get_by_role("button", name="API key").click()
    page.get_by_role("button", name="Forget it").click()
    expect(page.locator("#server")).to_contain_text("An API key is needed")
    assert page.evaluate("() => Object.values(sessionStorage)") == []


def test_what_was_asked_without_a_key_is_sent_once_there_is_one(with_keys: Server, open_page: Open) -> None:
    page = open_page(f"{with_keys.url}/")
    expect(page.get_by_role("dialog", name="API key")).to_be_visible()
    page.keyboard.press("Escape")
    ask(page, n=2, max_tokens=20)
    page.get_by_label("Key", exact=True).fill("sk-playground")
    page.get_by_role("button", name="Use this key").click()
    expect(voice(page, 2)).to_have_attribute("data-state", "length")


def test_a_busy_server_says_when_to_come_again_and_earlier_answers_stay(servers: Servers, open_page: Open) -> None:
    server = servers.get(stage(CHORUS_MAX_NUM_SEQS=2, CHORUS_MAX_QUEUED_SEQS=1))
    page = open_page(f"{server.url}/")
    ask(page, n=1, seed=3, max_tokens=10)
    wait_ended(page)
    before = texts(page)
    body = {"model": MODEL, "prompt": "x", "n": 3, "max_tokens": 10**6, "stream": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as busy:
        pieces = busy.iter_raw()  # the connection is closed with it
        next(pieces)
        page.click("#send")
        expect(page.get_by_role("alert")).to_contain_text("The server is busy")
        again = page.get_by_role("button", name=re.compile("Send again"))
        expect(again).to_have_text(re.compile(r"Send again in \d+ s"))
        assert texts(page) == before
    server.wait_idle()
    expect(again).to_have_text("Send again")
    again.click()
    expect(page.locator("#notice")).to_be_hidden()
    wait_ended(page)


def test_while_the_model_loads_the_page_says_so_and_then_is_ready(open_page: Open, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    with Server.start(stage(STAGE_LOAD_GATE=gate)).wait_listening() as server:
        page = open_page(f"{server.url}/")
        expect(page.locator("#server")).to_have_attribute("data-state", "waiting")
        expect(page.locator("#server")).to_contain_text("loading")
        ask(page, n=2, max_tokens=10)
        wait_ended(page)
        expect(page.get_by_role("alert")).to_contain_text("The server is not ready")
        gate.touch()
        wait_ready(page)


def test_a_connection_lost_in_the_middle_keeps_what_there_is(open_page: Open) -> None:
    with Server.start(stage()).wait_ready() as server:
        page = open_page(f"{server.url}/")
        ask(page, n=3, max_tokens="")
        wait_tokens(voice(page, 3))
        server.signal(signal.SIGKILL)
        wait_ended(page)
        assert states(page) == ["lost"] * 3 and all(texts(page))
        expect(page.get_by_role("alert")).to_contain_text("Connection lost")
        expect(page.locator("#server")).to_have_attribute("data-state", "gone")


def test_an_engine_that_dies_is_told_by_its_reason(open_page: Open, tmp_path: Path) -> None:
    kill = tmp_path / "kill"
    with Server.start(stage(STAGE_KILL=kill)).wait_ready() as server:
        page = open_page(f"{server.url}/")
        ask(page, n=2, max_tokens="")
        wait_tokens(voice(page, 2))
        kill.touch()
        wait_ended(page)
        assert states(page) == ["error"] * 2
        expect(page.get_by_role("alert")).to_contain_text("The answer broke off")
        expect(page.get_by_role("alert")).to_contain_text("killed by a test")


@pytest.mark.parametrize(
    ("fields", "field", "told"),
    [
        ({"prompt": " "}, "prompt", "A prompt is needed."),
        ({"n": ""}, "n", None),
        ({"n": 129}, "n", None),
        ({"temperature": 3}, "temperature", None),
        ({"n": 2, "stop_after": 3}, "stop_after", "At most 2"),
        ({"agree": "regex", "agree_value": "("}, "agree-value", "missing"),
        ({"max_tokens": 2**21}, "max_tokens", "2097152"),
    ],
)
def test_what_is_wrong_is_said_where_it_is(
    server: Server, open_page: Open, fields: dict[str, object], field: str, told: str | None
) -> None:
    """By the page itself, or by the server, whose errors name the field."""
    page = open_page(f"{server.url}/")
    ask(page, **fields)
    invalid = page.locator(f"#{field}")
    expect(invalid).to_have_attribute("aria-invalid", "true")
    expect(invalid).to_be_focused()
    problem = page.locator(f"#{invalid.get_attribute('aria-describedby')}")
    expect(problem).to_contain_text(told or re.compile("."))
    fill(page, n=2)
    invalid.press_sequentially("1")
    expect(invalid).not_to_have_attribute("aria-invalid", "true")


def test_numbers_that_are_at_another_address_are_not_missed(open_page: Open) -> None:
    with Server.start(stage(CHORUS_METRICS_BIND="127.0.0.1:0")).wait_ready() as server:
        page = open_page(f"{server.url}/")
        expect(page.locator("#engine-note")).to_have_text("This server tells its numbers at another address.")
        ask(page, n=2, max_tokens=10)
        wait_ended(page)
        assert states(page) == ["length"] * 2
