"""The playground's files over HTTP: a static shell, open to all, that needs nothing from elsewhere."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
from litestar import Litestar

from service.app import create_app
from service.playground import FILES, FOLDER
from service.settings import read_settings

from .apps import SETTINGS, check_error, serving
from .inloop import app_and_client, key

Backend = Literal["asyncio", "trio"]
both_backends = pytest.mark.parametrize("backend", ["asyncio", "trio"])

TYPES = {"css": "text/css; charset=utf-8", "js": "text/javascript; charset=utf-8", "svg": "image/svg+xml"}


@both_backends
def test_every_file_comes_with_its_type_policy_and_length(backend: Backend) -> None:
    with serving(backend=backend) as client:
        for path, file in FILES.items():
            response = client.get(path)
            assert (response.status_code, response.content) == (200, file.body), path
            assert response.headers["content-type"] == TYPES.get(path.rpartition(".")[2], "text/html; charset=utf-8")
            assert response.headers["content-length"] == str(len(file.body))
            assert response.headers["x-content-type-options"] == "nosniff"
            assert response.headers["referrer-policy"] == "no-referrer"
            policy = dict(part.strip().split(" ", 1) for part in response.headers["content-security-policy"].split(";"))
            assert policy["default-src"] == policy["frame-ancestors"] == policy["base-uri"] == "'none'"
            assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
            assert not any("unsafe" in sources or "*" in sources for sources in policy.values())


@both_backends
def test_head_is_the_same_without_the_body(backend: Backend) -> None:
    with serving(backend=backend) as client:
        for path in FILES:
            whole, head = client.get(path), client.head(path)
            assert (head.status_code, head.content) == (200, b"")
            shared = [{k: v for k, v in one.headers.items() if k != "x-request-id"} for one in (whole, head)]
            assert shared[0] == shared[1]


@both_backends
@pytest.mark.parametrize("spelling", ["{}", "W/{}", '"other", {}', "*"])
def test_what_a_browser_has_already_is_not_sent_again(backend: Backend, spelling: str) -> None:
    with serving(backend=backend) as client:
        response = client.get("/playground/main.js")
        assert response.headers["cache-control"] == "no-cache"  # asked about each time
        etag = response.headers["etag"]
        again = client.get("/playground/main.js", headers={"If-None-Match": spelling.format(etag)})
        assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", etag)
        assert "content-length" not in again.headers and "content-security-policy" in again.headers
        other = client.get("/playground/style.css", headers={"If-None-Match": etag})
        assert other.status_code == 200


def test_only_these_files_are_there() -> None:
    with serving() as client:
        for path in (
            "/playground",
            "/playground/",
            "/playground/index.html",
            "/playground/nope.js",
            "/playground/../app.py",
            "/playground/..%2fapp.py",
            "/playground/%2e%2e/app.py",
            "/index.html",
        ):
            check_error(client.get(path), 404, code="unknown_url")
        check_error(client.post("/"), 405)


@both_backends
def test_it_is_off_where_it_is_switched_off(backend: Backend) -> None:
    assert read_settings({}).playground and not read_settings({"CHORUS_PLAYGROUND": "false"}).playground
    with serving(replace(SETTINGS, playground=False), backend=backend) as client:
        for path in FILES:
            check_error(client.get(path), 404, code="unknown_url")
        assert client.get("/v1/models").status_code == 200


@pytest.mark.anyio
async def test_it_is_open_where_keys_are_set_and_what_it_asks_is_not(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("sk-a\n")
    async with app_and_client(replace(SETTINGS, api_keys_file=path)) as (_, client):
        for url, file in FILES.items():
            response = await client.get(url)
            assert (response.status_code, response.content) == (200, file.body), url
            check_error(await client.get(f"{url}x"), 401)
        for url in ("/metrics", "/v1/models", "/v1/requests", "/playground/", "/playground"):
            check_error(await client.get(url), 401)
            assert (await client.get(url, headers=key("sk-a"))).status_code in (200, 404)


@pytest.mark.anyio
@pytest.mark.parametrize("with_keys", [False, True])
async def test_under_a_root_path_the_page_is_at_its_slash(tmp_path: Path, with_keys: bool) -> None:
    """Its links are relative: at /chorus they would lead beside the app."""
    path = tmp_path / "keys"
    path.write_text("sk-a\n")
    app = create_app(replace(SETTINGS, api_keys_file=path if with_keys else None))
    for target, root_path, wanted in (
        ("/chorus/", "/chorus", 200),
        ("/chorus", "/chorus", 308),
        ("/chorus/playground/main.js", "/chorus", 200),
        ("/", "/chorus", 200),  # behind a proxy that takes the prefix away
        ("/playground/main.js", "/chorus", 200),
        ("/chorus/health/live", "/chorus", 200),
        ("/chorus/v1/models", "/chorus", 401 if with_keys else 200),
        ("/chorus/chorus/", "/chorus", 401 if with_keys else 404),
        ("/other/chorus/", "/chorus", 401 if with_keys else 200),
    ):
        status, headers = await answer(app, target, root_path)
        assert status == wanted, target
        if wanted == 308:
            assert headers[b"location"] == b"/chorus/"


async def answer(app: Litestar, path: str, root_path: str) -> tuple[int, dict[bytes, bytes]]:
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "GET",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": root_path,
        "headers": [(b"host", b"chorus")],
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
    return int(messages[0]["status"]), dict(messages[0]["headers"])


def test_nothing_comes_from_elsewhere_and_nothing_is_inline() -> None:
    """Else it would not work offline, and the policy would have to allow what strangers' texts could use too."""
    page = FILES["/"].body.decode()
    links = re.findall(r'(?:href|src)="([^"#][^"]*)"', page)
    assert links and all(f"/{link}" in FILES for link in links), "relative, so that it works under any path"
    assert not re.search(r"<style|\sstyle=|\son\w+=|javascript:|<script(?![^>]*src=)", page)
    for path, file in FILES.items():
        text = file.body.decode()
        assert not re.search(r"(?:https?:)?//(?!www\.w3\.org/2000/svg)[\w.-]+\.\w", text), path
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", text), (
            path
        )
        for module in re.findall(r'from "([^"]+)"', text):
            assert f"/playground/{module.removeprefix('./')}" in FILES


def test_an_installation_has_the_files(tmp_path: Path) -> None:
    """They are no modules: without a word in pyproject.toml a wheel, and so an image, would be without the page."""
    source = tmp_path / "source"
    shutil.copytree(FOLDER.parent, source / "service", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "LICENSE", "NOTICE", "README.md"):
        shutil.copy(FOLDER.parents[1] / name, source)
    build = [sys.executable, "-c", "import setuptools; setuptools.setup()", "build_py", "--build-lib", "../built"]
    done = subprocess.run(build, cwd=source, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    built = {path.name: path.read_bytes() for path in (tmp_path / "built" / "service" / "web").iterdir()}
    assert built == {path.name: path.read_bytes() for path in FOLDER.iterdir()}


def test_every_module_is_announced_by_the_page() -> None:
    """One round trip, not one for each level of imports."""
    page = FILES["/"].body.decode()
    modules = {path.name for path in FOLDER.glob("*.js")} - {"main.js"}
    assert set(re.findall(r'modulepreload" href="playground/([^"]+)"', page)) == modules
