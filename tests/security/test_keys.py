"""API keys: what the file may hold, who gets in, and that nobody gets further than their own things."""

from __future__ import annotations

import hmac
import json
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import anyio
import httpx
import pytest
from litestar import Litestar
from litestar.routes import HTTPRoute

from engine.config import EngineConfig
from engine.fake import FakeEngine
from service.app import create_app
from service.auth import KeyFile, Limits
from service.gate import OPEN_PATHS
from service.settings import Settings, SettingsError
from tests.service.apps import SETTINGS, check_error
from tests.service.asgi import until
from tests.service.inloop import app_and_client, key

BODY: dict[str, Any] = {"model": "org/m", "prompt": "hi", "max_tokens": 2}


def written(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


@pytest.fixture
def with_keys(tmp_path: Path) -> Settings:
    return replace(SETTINGS, api_keys_file=written(tmp_path / "keys", "sk-one one\nsk-two two\n"), debug=True)


def routes() -> list[tuple[str, str]]:
    """Every method and URL that the app knows, from its own table: a route that comes tomorrow is in it."""
    values = {"model_id": "org/m", "response_id": "chatcmpl-1", "index": "0"}
    found = []
    for route in create_app(replace(SETTINGS, debug=True)).routes:
        assert isinstance(route, HTTPRoute), "the gate knows nothing of routes other than HTTP's"
        path = re.sub(r"{(\w+)(:\w+)?}", lambda match: values[match[1]], route.path_format)
        found += [(method, path) for method in sorted(route.methods)]
    return found


WRONG: list[tuple[str, list[tuple[str, str]]]] = [
    ("no key", []),
    ("wrong key", [("Authorization", "Bearer sk-three")]),
    ("half a key", [("Authorization", "Bearer sk-on")]),
    ("key and more", [("Authorization", "Bearer sk-one1")]),
    ("two keys", [("Authorization", "Bearer sk-one sk-two")]),
    ("no scheme", [("Authorization", "sk-one")]),
    ("wrong scheme", [("Authorization", "Basic sk-one")]),
    ("empty", [("Authorization", "Bearer ")]),
    ("two headers", [("Authorization", "Bearer sk-one"), ("Authorization", "Bearer sk-one")]),
    ("another header", [("X-Api-Key", "sk-one"), ("Cookie", "key=sk-one")]),
    ("not ASCII", [("Authorization", "Bearer sk-\u00f6ne")]),
]


@pytest.mark.anyio
async def test_every_route_but_the_open_ones_is_denied_without_a_known_key(with_keys: Settings) -> None:
    async with app_and_client(with_keys) as (_, client):
        for method, path in routes():
            for name, headers in WRONG:
                raw = [(name.encode(), value.encode("latin-1")) for name, value in headers]
                response = await client.request(method, path, headers=raw)  # type: ignore[arg-type]
                if path in OPEN_PATHS:
                    assert response.status_code != 401, (method, path)
                    continue
                assert response.status_code == 401, (method, path, name)
                assert response.headers["www-authenticate"] == 'Bearer realm="chorus"'
                assert response.headers["x-request-id"]
                check_error(response, 401, code="invalid_api_key")
        assert {path for _, path in routes()} >= OPEN_PATHS


STRANGE = [
    "/v1/models/",
    "//v1/models",
    "/v1//models",
    "/%2e/v1/models",
    "/health/../v1/models",
    "/health/%2e%2e/v1/models",
    "/health/live/",
    "/health/live/../../metrics",
    "/health%2Flive/../../metrics",
    "/health;/v1/models",
    "/V1/models",
    "/nope",
    "/v1/models?api_key=sk-one",
    "/v1/models?key=sk-one",
    "/metrics#/health",
    "/HEALTH",
]


@pytest.mark.anyio
@pytest.mark.parametrize("method", ["GET", "HEAD", "POST", "OPTIONS", "DELETE", "PUT", "TRACE"])
async def test_no_other_spelling_of_a_url_gets_past(with_keys: Settings, method: str) -> None:
    async with app_and_client(with_keys) as (app, _):
        for target in STRANGE:
            assert await raw_status(app, method, target) == 401, target


async def raw_status(app: Litestar, method: str, target: str) -> int:
    """As hypercorn hands a request line on, whatever is in it: HTTP clients tidy URLs up."""
    path, _, query = target.partition("?")
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": unquote(path),
        "raw_path": path.encode(),
        "query_string": query.encode(),
        "root_path": "",
        "headers": [(b"host", b"/health")],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 8000),
        "state": {},
        "extensions": {},
    }
    messages: list[Any] = []

    async def receive() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        messages.append(message)

    await app(scope, receive, send)  # type: ignore[arg-type]
    return int(messages[0]["status"])


@pytest.mark.anyio
@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER"])
async def test_a_known_key_gets_in_whatever_the_case_of_its_scheme(with_keys: Settings, scheme: str) -> None:
    async with app_and_client(with_keys) as (_, client):
        for path in ("/v1/models", "/metrics", "/docs", "/openapi.json", "/version", "/v1/requests", "/debug/steps"):
            assert (await client.get(path, headers={"Authorization": f"{scheme} sk-two"})).status_code == 200, path
        assert (await client.post("/v1/completions", json=BODY, headers=key("sk-two"))).status_code == 200
        assert (await client.get("/nope", headers=key("sk-two"))).status_code == 404


@pytest.mark.anyio
async def test_health_is_open(with_keys: Settings) -> None:
    async with app_and_client(with_keys) as (_, client):
        for path in ("/health", "/health/live", "/health/ready"):
            assert (await client.get(path)).status_code == 200
        assert (await client.get("/")).status_code == 200  # the playground's shell


@pytest.mark.anyio
async def test_keys_are_read_again_when_the_file_changes(with_keys: Settings) -> None:
    path = with_keys.api_keys_file
    assert path is not None

    async def status(value: str) -> int:
        return (await client.get("/v1/models", headers=key(value))).status_code

    async with app_and_client(with_keys) as (_, client):
        assert (await status("sk-one"), await status("sk-new")) == (200, 401)
        replacement = written(path.parent / "next", "sk-new\n")
        replacement.replace(path)
        assert (await status("sk-one"), await status("sk-new")) == (401, 200)
        written(path, "sk-new\nsk-new\n")  # no good: nothing changes
        assert (await status("sk-one"), await status("sk-new")) == (401, 200)
        path.unlink()
        assert (await status("sk-one"), await status("sk-new")) == (401, 200)
        written(path, "# all revoked\n")
        assert (await status("sk-one"), await status("sk-new")) == (401, 401)


def test_a_secret_that_is_replaced_through_a_link_is_read_again(tmp_path: Path) -> None:
    """As Kubernetes does it: the file is a link to a folder that is swapped as a whole."""
    for name, value in (("a", "sk-a"), ("b", "sk-b")):
        (tmp_path / name).mkdir()
        written(tmp_path / name / "keys", value)
    (tmp_path / "data").symlink_to("a")
    keys = KeyFile(tmp_path / "data" / "keys")
    bearer = [(b"authorization", b"Bearer sk-b")]
    assert keys.caller(bearer) is None
    (tmp_path / "next").symlink_to("b")
    os.replace(tmp_path / "next", tmp_path / "data")
    assert keys.caller(bearer) is not None


BAD_FILES = [
    ("", "no keys"),
    ("# none\n\n", "no keys"),
    ("sk-a\nsk-a\n", "line 2"),
    ("sk-a name two\n", "line 1"),
    ("sk-a name mood=1\n", "line 1"),
    ("sk-a name max_n=many\n", "line 1"),
    ("sk-a name max_n=1 max_n=2\n", "line 1"),
    ("sk-a max_n=-1\n", "line 1"),
    ("sk-\u00f6\n", "ASCII"),
    ("sk-a na'me\n", "line 1"),
    ("k" * 513, "line 1"),
]


@pytest.mark.parametrize(("text", "told"), BAD_FILES)
def test_a_bad_file_of_keys_ends_the_start_in_one_line_without_a_key_in_it(
    tmp_path: Path, text: str, told: str
) -> None:
    path = written(tmp_path / "keys", text)
    with pytest.raises(SettingsError, match=told) as caught:
        create_app(replace(SETTINGS, api_keys_file=path))
    assert str(caught.value).startswith("CHORUS_API_KEYS_FILE: ") and "\n" not in str(caught.value)
    assert "sk-" not in str(caught.value) and "kkk" not in str(caught.value)


def test_a_missing_file_of_keys_ends_the_start(tmp_path: Path) -> None:
    for path in (tmp_path / "none", tmp_path):
        with pytest.raises(SettingsError, match="CHORUS_API_KEYS_FILE"):
            create_app(replace(SETTINGS, api_keys_file=path))


def test_lines_have_names_and_limits(tmp_path: Path) -> None:
    text = (
        "# keys\nsk-a\n\n  sk-b team/b@x  \nsk-c c max_n=4 requests_per_minute=60 priority=5\nsk-d max_concurrent=2\n"
    )
    keys = KeyFile(written(tmp_path / "keys", text))
    callers = {name: keys.caller([(b"authorization", f"Bearer sk-{name}".encode())]) for name in "abcd"}
    assert all(callers.values())
    found = {name: (caller.name, caller.limits) for name, caller in callers.items() if caller is not None}
    assert found == {
        "a": (None, Limits()),
        "b": ("team/b@x", Limits()),
        "c": ("c", Limits(max_n=4, requests_per_minute=60, priority=5)),
        "d": (None, Limits(max_concurrent=2)),
    }
    assert len({caller.owner for caller in callers.values() if caller is not None}) == 4


def test_memory_holds_hashes_and_every_comparison_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = KeyFile(written(tmp_path / "keys", "sk-secret-1 a\nsk-secret-2 b\nsk-secret-3 c\n"))
    assert b"sk-secret" not in repr(vars(keys)).encode()
    compared = []
    real = hmac.compare_digest
    monkeypatch.setattr(hmac, "compare_digest", lambda a, b: compared.append((a, b)) or real(a, b))
    for value in (b"sk-secret-1", b"sk-secret-3", b"nothing"):
        compared.clear()
        keys.caller([(b"authorization", b"Bearer " + value)])
        assert len(compared) == 3  # the first one found does not end it
        assert all(isinstance(side, bytes) and len(side) == 32 for pair in compared for side in pair)


@pytest.mark.anyio
async def test_a_keys_requests_are_its_own(with_keys: Settings) -> None:
    """List and cancel: nobody learns of another key's requests, or ends one."""
    async with app_and_client(with_keys) as (app, client):
        answers: list[httpx.Response] = []
        body = BODY | {"max_tokens": 200, "n": 2, "request_id": "my own"}

        async def ask() -> None:
            answers.append(await client.post("/v1/completions", json=body, headers=key("sk-one")))

        engine = app.state.services.engine
        async with anyio.create_task_group() as group:
            group.start_soon(ask)
            await until(lambda: engine.health().generation_tokens > 4)
            (card,) = (await client.get("/v1/requests", headers=key("sk-one"))).json()["data"]
            assert card["request_id"] == "my own" and card["object"] == "request" and card["kind"] == "completion"
            assert [choice["index"] for choice in card["choices"]] == [0, 1]
            listed = (await client.get("/v1/requests", headers=key("sk-two"))).json()
            assert listed == {"object": "list", "data": []}
            url = f"/v1/requests/{card['id']}"
            for target in (url, f"{url}/choices/0"):
                check_error(await client.delete(target, headers=key("sk-two")), 404, code="not_found")
            done = await client.delete(f"{url}/choices/1", headers=key("sk-one"))
            assert (done.status_code, done.json()) == (200, {"id": card["id"], "cancelled": True})
            done = await client.delete(url, headers=key("sk-one"))
            assert (done.status_code, done.json()) == (200, {"id": card["id"], "cancelled": True})
        assert answers[0].headers["x-chorus-response-id"] == card["id"] == answers[0].json()["id"]
        assert answers[0].headers["x-request-id"] == "my own"
        assert [choice["end_reason"] for choice in answers[0].json()["choices"]] == ["cancelled"] * 2
        for target in (url, f"{url}/choices/0", "/v1/requests/my%20own", "/v1/requests/x/choices/y"):
            assert (await client.delete(target, headers=key("sk-one"))).status_code == 404, target


@pytest.mark.anyio
async def test_owner_and_cache_of_a_request_come_from_its_key(with_keys: Settings) -> None:
    seen = []

    class Watched(FakeEngine):
        def submit(self, batch: Any) -> Any:
            seen.append(batch[0])
            return super().submit(batch)

    engine = Watched(EngineConfig(served_model_name="org/m"))
    async with app_and_client(with_keys, engine) as (_, client):
        for value in ("sk-one", "sk-two", "sk-one"):
            await client.post("/v1/completions", json=BODY, headers=key(value))
    owners = [request.owner for request in seen]
    assert owners[0] == owners[2] != owners[1] and all(owners)
    assert [request.cache_namespace for request in seen] == owners
    assert "sk-" not in json.dumps(owners)


@pytest.mark.anyio
async def test_a_websocket_is_closed_whatever_it_brings(with_keys: Settings) -> None:
    messages: list[Any] = []

    async def send(message: Any) -> None:
        messages.append(message)

    async with app_and_client(with_keys) as (app, _):
        headers = [(b"authorization", b"Bearer sk-one")]
        scope = {"type": "websocket", "path": "/v1/chat/completions", "headers": headers, "query_string": b""}
        await app(scope, anyio.sleep_forever, send)  # type: ignore[arg-type]
    assert [message["type"] for message in messages] == ["websocket.close"]
