"""Prompts, answers, keys: in no log line, no label, no error message."""

from __future__ import annotations

import json
import logging
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine.config import EngineConfig
from engine.fake import FakeEngine
from service.logs import formatter
from service.settings import Settings
from tests.service.apps import SETTINGS, check_error
from tests.service.inloop import app_and_client, key

CHAT = "/v1/chat/completions"
SECRET = "xyzzy-secret-plugh"
KEY = "sk-" + SECRET


@pytest.fixture
def with_keys(tmp_path: Path) -> Settings:
    path = tmp_path / "keys"
    path.write_text(f"{KEY} team-a\n")
    return replace(SETTINGS, api_keys_file=path)


def chat(**more: Any) -> dict[str, Any]:
    return {"model": "org/m", "messages": [{"role": "user", "content": SECRET}], "max_tokens": 3, "user": SECRET} | more


def lines_of(caplog: pytest.LogCaptureFixture) -> str:
    """As they are written, for machines and for people."""
    ours = [record for record in caplog.records if record.name.startswith("chorus")]
    return "\n".join(form.format(record) for form in (formatter("json"), formatter("console")) for record in ours)


REQUESTS: list[dict[str, Any]] = [
    chat(),
    chat(stream=True),
    chat(stop=[SECRET], metadata={"a": SECRET}),
    chat(n=0),
    chat(mood=SECRET),
    chat(**{SECRET: 1}),
    chat(model=SECRET),
    chat(messages=[{"role": SECRET, "content": "hi"}]),
    chat(max_tokens=10**6),
    chat(fan_out={"agree": {"on": "regex", "value": f"({SECRET}", "count": 1}}),
    chat(logit_bias={SECRET: 1}),
]


@pytest.mark.anyio
async def test_no_log_line_and_no_label_has_a_word_of_prompt_answer_or_key(
    with_keys: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    async with app_and_client(with_keys) as (_, client):
        for body in REQUESTS:
            await client.post(CHAT, json=body, headers=key(KEY))
            await client.post(CHAT, json=body, headers=key(KEY + "x"))
        await client.post(CHAT, content=b'{"a": "' + SECRET.encode(), headers=key(KEY))
        metrics = (await client.get("/metrics", headers=key(KEY))).text
    written = lines_of(caplog)
    assert '"event":"request"' in written and '"key":"team-a"' in written
    assert SECRET not in written and SECRET not in metrics
    without_ids = re.sub(r"[0-9a-f]{32}", "", written)  # in one of which "def" may stand by chance
    for answer in ("def", "xyzzy", "plugh"):
        assert answer not in without_ids


@pytest.mark.anyio
@pytest.mark.parametrize("place", ["template", "detokenizer"])
@pytest.mark.parametrize("stream", [True, False])
async def test_an_unexpected_error_quotes_nothing_and_can_be_found_by_its_id(
    with_keys: Settings, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, place: str, stream: bool
) -> None:
    def broken(*_: Any) -> None:
        try:
            raise KeyError(SECRET)
        except KeyError as error:
            raise ValueError(f"cannot do {SECRET}") from error

    async with app_and_client(with_keys) as (app, client):
        method = {"template": "render_chat", "detokenizer": "token_bytes"}[place]
        monkeypatch.setattr(type(app.state.services.tokenizer), method, broken)
        headers = key(KEY) | {"X-Request-Id": "find-me"}
        response = await client.post(CHAT, json=chat(stream=stream), headers=headers)
        assert response.headers["x-request-id"] == "find-me"
        if stream and place == "detokenizer":
            error = json.loads(response.text.split("data: ")[-1])["error"]
        else:
            error = check_error(response, 500)
        assert SECRET not in response.text and "cannot do" not in response.text
        assert "find-me" in error["message"] and error["type"] == "server_error"
        monkeypatch.undo()
        assert (await client.post(CHAT, json=chat(), headers=key(KEY))).status_code == 200
    written = lines_of(caplog)
    assert SECRET not in written
    assert "find-me" in written and "ValueError" in written and "KeyError" in written


@pytest.mark.anyio
async def test_the_number_of_series_does_not_depend_on_what_clients_send(with_keys: Settings) -> None:
    """C36: a label from a client's words is a leak and a way to fill the memory of whoever scrapes it."""
    async with app_and_client(with_keys) as (_, client):

        async def series() -> set[str]:
            text = (await client.get("/metrics", headers=key(KEY))).text
            return {line.rsplit(" ", 1)[0] for line in text.splitlines() if not line.startswith("#")}

        before = await series()
        for number in range(300):
            body = chat(user=f"user-{number}", model="org/m" if number % 2 else f"model-{number}", max_tokens=1)
            await client.post(CHAT, json=body, headers=key(KEY) | {"X-Request-Id": f"id-{number}"})
            await client.get(f"/v1/models/{number}", headers=key(f"sk-{number}"))
        assert await series() == before


@pytest.mark.anyio
async def test_the_lines_at_the_start_have_no_secret(with_keys: Settings) -> None:
    assert KEY not in json.dumps(with_keys.public())


@pytest.mark.anyio
async def test_a_failing_engine_tells_the_client_nothing_of_itself() -> None:
    def rule(seed: int, position: int, num_prompt_tokens: int) -> int:
        raise ZeroDivisionError(SECRET)

    async with app_and_client(SETTINGS, FakeEngine(EngineConfig(served_model_name="org/m"), rule=rule)) as (_, client):
        response = await client.post(CHAT, json=chat())
        assert response.status_code == 503
