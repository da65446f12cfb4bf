"""One prompt, n columns: what they say, how they end, and what ends them."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.e2e.server import Server, Servers, spec

from .conftest import MODEL, WIDE, Open, stage
from .page import ask, expect, fill, states, texts, tokens, voice, wait_ended, wait_ready, wait_sent, wait_tokens
from .scripts import AGREE_SEED, FAIL_SEED, MARKUP, MIXED, PROSE, SCRIPT_SEED


def api_text(server: Server, seed: int, max_tokens: int, temperature: float = 0.8) -> str:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Tell me."}], "seed": seed}
    answer = server.post("/v1/chat/completions", body | {"max_tokens": max_tokens, "temperature": temperature})
    return str(answer.json()["choices"][0]["message"]["content"])


def test_each_voice_is_the_answer_of_its_seed_with_its_count_rate_and_end(server: Server, open_page: Open) -> None:
    page = open_page(f"{server.url}/")
    ask(page, n=3, seed=7, max_tokens=120)
    wait_ended(page)
    assert texts(page) == [api_text(server, seed, 120) for seed in (7, 8, 9)]
    assert tokens(page) == [120] * 3
    for number in (1, 2, 3):
        expect(voice(page, number).locator(".seed")).to_have_text(f"seed {6 + number}")
        expect(voice(page, number).locator(".state")).to_have_text("length token limit")
        expect(voice(page, number).locator(".rate")).to_have_text(re.compile(r"^[\d,.]+ tok/s$"))
    expect(page.locator("#summary")).to_contain_text("3 voices · 360 tokens · ")
    expect(page.locator("#status")).to_contain_text("All ended")


def test_without_a_seed_one_is_drawn_and_shown(server: Server, open_page: Open) -> None:
    page = open_page(f"{server.url}/")
    ask(page, n=2, max_tokens=20)
    wait_ended(page)
    first, second = (int(text.split()[1]) for text in page.locator(".seed").all_text_contents())
    assert second == first + 1
    assert texts(page) == [api_text(server, seed, 20) for seed in (first, second)]


def test_one_voice_is_stopped_and_the_others_go_on(server: Server, open_page: Open) -> None:
    page = open_page(f"{server.url}/")
    ask(page, n=3, max_tokens="")
    wait_tokens(voice(page, 2))
    page.get_by_role("button", name="Stop voice 2", exact=True).click()
    expect(voice(page, 2).locator(".state")).to_have_text("cancelled stopped by you")
    seen = tokens(page)
    wait_tokens(voice(page, 1), len(str(seen[0])) + 1)
    assert states(page) == ["running", "cancelled", "running"]
    assert tokens(page)[1] == seen[1]
    page.get_by_role("button", name="Stop all").first.click()
    wait_ended(page)
    assert states(page) == ["cancelled"] * 3
    assert all(PROSE[:20] in text * 2 or len(text) > 20 for text in texts(page))


def test_escape_stops_all_and_the_engine_is_free_again(server: Server, open_page: Open) -> None:
    page = open_page(f"{server.url}/")
    ask(page, n=5, max_tokens="")
    wait_tokens(voice(page, 5))
    page.keyboard.press("Escape")
    wait_ended(page)
    assert states(page) == ["cancelled"] * 5
    assert all(texts(page)), "what there was is kept"
    assert page.locator("#notice").is_hidden(), "a stop is no error"


def test_a_closed_page_leaves_nothing_running(server: Server, open_page: Open) -> None:
    page = open_page(f"{server.url}/")
    ask(page, n=4, max_tokens="")
    wait_tokens(voice(page, 4))
    page.close()
    server.wait_idle()


def test_stop_after_ends_the_others(server: Server, open_page: Open) -> None:
    page = open_page(f"{server.url}/")
    ask(page, n=3, seed=SCRIPT_SEED + 2, max_tokens="", stop_after=1)
    wait_ended(page)
    assert states(page) == ["stop", "cancelled", "cancelled"]
    expect(voice(page, 1).locator(".state")).to_have_text("stop ended by itself")
    expect(voice(page, 3).locator(".state")).to_have_text("cancelled not needed")


@pytest.mark.parametrize(
    ("fields", "told", "agreeing"),
    [
        ({"agree": "text", "agree_count": 2}, "2 voices agree: Paris", [1, 3]),
        ({"agree": "regex", "agree_value": "^(.)", "agree_count": 2}, "2 voices agree: ", None),
        ({"agree": "text", "agree_count": 3, "max_tokens": 40}, "No 3 agree. Most often, 2 times: Paris", [1, 3]),
    ],
    ids=["text", "regex", "not reached"],
)
def test_agreement_is_told_and_shown(
    server: Server, open_page: Open, fields: dict[str, Any], told: str, agreeing: list[int] | None
) -> None:
    page = open_page(f"{server.url}/")
    ask(page, **{"n": 4, "seed": AGREE_SEED, "max_tokens": "", **fields})
    wait_ended(page)
    expect(page.locator("#agreement")).to_contain_text(told)
    if agreeing is not None:
        found = page.locator("#voices > li[data-agrees] h3").all_text_contents()
        assert found == [f"Voice {number}" for number in agreeing]


def test_a_failing_voice_fails_alone(server: Server, open_page: Open) -> None:
    page = open_page(f"{server.url}/")
    ask(page, n=2, seed=FAIL_SEED, max_tokens=30)
    wait_ended(page)
    assert states(page) == ["error", "length"]
    expect(voice(page, 1).locator(".state")).to_contain_text("not finite")


def test_markup_is_text_and_nothing_of_it_runs(server: Server, open_page: Open) -> None:
    """A model says what it was told to say: with markup in its answers a page would run what strangers wrote."""
    page = open_page(f"{server.url}/")
    ask(page, prompt=MARKUP, system=MARKUP, n=2, seed=SCRIPT_SEED, agree="text", agree_count=1, max_tokens="")
    wait_ended(page)
    assert texts(page)[0] == MARKUP
    expect(page.locator("#agreement q")).to_have_text(MARKUP)
    page.click("#code-button")
    expect(page.locator("#code")).to_contain_text("<script>")
    assert page.locator("main img, main script, main b:text-is('bold'), dialog img, dialog script").count() == 0
    assert page.evaluate("() => window.pwned") is None


def test_every_script_and_direction_comes_through_whole(server: Server, open_page: Open) -> None:
    page = open_page(f"{server.url}/")
    ask(page, prompt="مرحبا", n=2, seed=SCRIPT_SEED + 1, max_tokens="", stop_after=2)
    wait_ended(page)
    assert texts(page)[0] == MIXED
    direction = "element => getComputedStyle(element).direction"
    assert voice(page, 1).locator(".text").evaluate(direction) == "rtl"
    assert voice(page, 2).locator(".text").evaluate(direction) == "ltr"
    assert page.locator("#prompt").evaluate(direction) == "rtl"


def test_sixty_four_voices_do_not_hold_the_stream_up(server: Server, open_page: Open) -> None:
    """A page that painted each token would read slower than the engine writes, which then waits for it."""
    page = open_page(f"{server.url}/", size=WIDE)
    ask(page, n=64, seed=1, max_tokens=150)
    wait_sent(page)
    wait_ended(page)
    assert states(page) == ["length"] * 64
    assert tokens(page) == [150] * 64
    assert texts(page)[::21] == [api_text(server, seed, 150) for seed in (1, 22, 43, 64)]


def test_where_there_are_no_token_ids_the_pieces_are_counted(servers: Servers, server: Server, open_page: Open) -> None:
    """A server that passes requests on refuses what the page would count by."""
    settings = {"CHORUS_ENGINE": "upstream", "CHORUS_UPSTREAM_URLS": f"{server.url}/v1"}
    with Server.start(
        spec("service", "asyncio", {**settings, "CHORUS_SERVED_MODEL_NAME": MODEL})
    ).wait_ready() as front:
        page = open_page(f"{front.url}/")
        ask(page, n=2, seed=7, max_tokens=30)
        wait_ended(page)
        assert texts(page) == [api_text(server, seed, 30) for seed in (7, 8)]
        assert tokens(page) == [30, 30]


@pytest.mark.parametrize("worker", ["asyncio", "trio"])
def test_all_works_under_a_path_of_its_own(servers: Servers, open_page: Open, worker: str) -> None:
    server = servers.get(stage(worker, root_path="/some/where"))
    page = open_page(f"{server.url}/some/where")
    wait_ready(page)
    assert page.url == f"{server.url}/some/where/"
    ask(page, n=2, max_tokens="")
    wait_tokens(voice(page, 2))
    page.get_by_role("button", name="Stop voice 1", exact=True).click()
    expect(voice(page, 1).locator(".state")).to_have_text("cancelled stopped by you")
    page.keyboard.press("Escape")
    wait_ended(page)
    expect(page.locator("#charts figure").first.locator("dd").first).to_have_text(re.compile(r"\d"))


def test_the_code_makes_the_very_request(server: Server, open_page: Open, capsys: pytest.CaptureFixture[str]) -> None:
    page = open_page(f"{server.url}/")
    wait_ready(page)
    fill(
        page, prompt='It\'s "quoted" \\ \n £ 🧪 $HOME `x`', system="Be brief.", n=2, seed=5, max_tokens=30, stop_after=1
    )
    page.click("#code-button")
    expect(page.locator("#code")).to_contain_text("curl -N")
    page.get_by_label("Python").check()
    expect(page.locator("#code")).to_contain_text("import OpenAI")
    exec(page.locator("#code").text_content(), {})  # as its reader would run it
    said = capsys.readouterr().out.strip()
    page.click("#code-close")
    page.click("#send")
    wait_ended(page)
    assert said.startswith("[") and texts(page)[0] in said
