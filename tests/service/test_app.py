"""The app around the generation endpoints: health, models, metrics, docs, and its life."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Literal

import anyio
import httpx
import pytest
from litestar.routes import HTTPRoute

import service
from engine.api import EngineOverloaded
from engine.fake import FakeEngine
from service.app import create_app
from service.openapi import OPERATIONS, openapi_document
from service.playground import FILES

from .apps import SETTINGS, check_error, serving

CHAT = "/v1/chat/completions"
BODY = {"model": "org/m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, "seed": 1}

Backend = Literal["asyncio", "trio"]
both_backends = pytest.mark.parametrize("backend", ["asyncio", "trio"])


def test_importing_the_app_imports_no_torch() -> None:
    """A server that cannot even say 503 while torch is imported fails its first probes."""
    code = "import sys, service.app; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env={}, timeout=60).returncode == 0


def test_the_version_is_the_packages() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert service.__version__ == project["version"]
    with serving() as client:
        assert client.get("/version").json() == {"version": project["version"], "model": "org/m", "backend": "fake"}


@both_backends
def test_before_the_model_is_loaded_requests_and_readiness_are_503_with_a_reason(backend: Backend) -> None:
    async def never() -> None:
        await anyio.sleep_forever()

    engine = FakeEngine(SETTINGS.engine_config(), load=never)
    with serving(engine=engine, backend=backend, wait=False) as client:
        assert client.get("/health/live").status_code == 200
        assert client.get("/v1/models").status_code == 200
        for response in (client.get("/health"), client.get("/health/ready"), client.post(CHAT, json=BODY)):
            error = check_error(response, 503)
            assert "loading" in error["message"]
            assert int(response.headers["retry-after"]) >= 1
        check_error(client.post(CHAT, json=BODY | {"n": 0}), 400, "n")  # what is wrong for good is said at once


@both_backends
def test_a_draining_engine_is_live_but_not_ready(backend: Backend) -> None:
    engine = FakeEngine(SETTINGS.engine_config())
    with serving(engine=engine, backend=backend) as client:
        assert client.get("/health/ready").json() == {"status": "ready"}
        engine.drain()
        assert client.get("/health/live").status_code == 200
        check_error(client.get("/health/ready"), 503)
        check_error(client.post(CHAT, json=BODY), 503)


@both_backends
def test_a_dead_engine_turns_liveness_to_503_and_tells_its_host_once(
    backend: Backend, caplog: pytest.LogCaptureFixture
) -> None:
    engine = FakeEngine(SETTINGS.engine_config())
    deaths = []
    with serving(engine=engine, backend=backend) as client:

        async def on_death() -> None:
            deaths.append("died")

        client.app.state.services.on_death = on_death
        client.blocking_portal.call(engine.fail, "the step raised")
        for path in ("/health/live", "/health/ready", "/health"):
            assert "the step raised" in check_error(client.get(path), 503)["message"]
        check_error(client.post(CHAT, json=BODY), 503)
        client.blocking_portal.call(anyio.lowlevel.checkpoint)
    assert deaths == ["died"]
    assert [record.getMessage() for record in caplog.records if record.levelno == logging.CRITICAL] == [
        "chorus cannot serve: the step raised"
    ]


@both_backends
def test_a_tokenizer_that_cannot_be_loaded_is_fatal(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(path: str | None) -> None:
        raise OSError("no tokenizer.json")

    monkeypatch.setattr("service.lifespan.load_tokenizer", broken)
    with serving(backend=backend, wait=False) as client:

        async def until_dead() -> None:
            while client.app.state.services.failure is None:
                await anyio.lowlevel.checkpoint()

        client.blocking_portal.call(until_dead)
        assert "no tokenizer.json" in check_error(client.get("/health/live"), 503)["message"]


def test_models_with_and_without_slashes() -> None:
    with serving() as client:
        (card,) = client.get("/v1/models").json()["data"]
        assert card["id"] == "org/m" and card["object"] == "model" and isinstance(card["created"], int)
        assert client.get("/v1/models/org/m").json() == card
        assert client.get("/v1/models/org%2Fm").json() == card
        for wrong in ("org", "m", "org/m/x", "other"):
            check_error(client.get(f"/v1/models/{wrong}"), 404, "model", "model_not_found")


def test_errors_of_the_framework_have_the_envelope() -> None:
    with serving() as client:
        check_error(client.get("/nope"), 404)
        check_error(client.get("/v1"), 404)
        check_error(client.post("/v1/chat/completions/x"), 404)
        for method, path, allowed in (
            ("GET", CHAT, "POST"),
            ("DELETE", "/v1/models", "GET"),
            ("PUT", "/health", "GET"),
        ):
            response = client.request(method, path)
            check_error(response, 405)
            assert allowed in response.headers["allow"]


def test_an_unexpected_error_is_logged_and_says_nothing(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving() as client:
        services = client.app.state.services
        monkeypatch.setattr(services.tokenizer, "render_chat", lambda messages, options: 1 / 0)
        response = client.post(CHAT, json=BODY)
        error = check_error(response, 500)
        assert error["type"] == "server_error" and "division" not in error["message"]
        assert response.headers["x-request-id"] in error["message"]
        (line,) = [record.__dict__["fields"] for record in caplog.records if record.name == "chorus.errors"]
        assert line["request_id"] == response.headers["x-request-id"]
        assert line["errors"][0]["type"] == "ZeroDivisionError" and "test_app.py" in line["errors"][0]["frames"][-1]
        monkeypatch.undo()
        assert client.post(CHAT, json=BODY).status_code == 200


def test_the_request_id_is_echoed_on_answers_and_errors() -> None:
    with serving() as client:
        headers = {"x-request-id": "abc-1"}
        for response in (
            client.post(CHAT, json=BODY, headers=headers),
            client.post(CHAT, json=BODY | {"n": 0}, headers=headers),
            client.get("/nope", headers=headers),
            client.get("/health", headers=headers),
        ):
            assert response.headers.get_list("x-request-id") == ["abc-1"]
        own = client.post(CHAT, json=BODY | {"request_id": "mine"}, headers=headers)
        assert own.headers.get_list("x-request-id") == ["mine"]
        fresh = {client.post(CHAT, json=BODY).headers["x-request-id"] for _ in range(2)}
        assert len(fresh) == 2
        check_error(client.post(CHAT, json=BODY, headers={"x-request-id": "x" * 257}), 400, "X-Request-Id")
        check_error(client.post(CHAT, json=BODY | {"request_id": "a\nb"}), 400, "request_id")


def metrics(client: httpx.Client) -> dict[str, float]:
    lines = client.get("/metrics").text.splitlines()
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))}


def test_a_request_counts_once_whatever_n_is() -> None:
    with serving() as client:
        before = metrics(client)
        assert client.post(CHAT, json=BODY | {"n": 5}).status_code == 200
        after = metrics(client)
        assert after['chorus_requests_total{outcome="ok"}'] - before['chorus_requests_total{outcome="ok"}'] == 1
        assert after["chorus_choices_total"] - before["chorus_choices_total"] == 5
        assert after["chorus_generation_tokens_total"] - before["chorus_generation_tokens_total"] == 15


def test_refused_requests_are_counted_and_add_no_series() -> None:
    engine = FakeEngine(SETTINGS.engine_config())
    with serving(engine=engine) as client:
        before = metrics(client)
        client.post(CHAT, json=BODY | {"n": 0, "user": "u1"})
        client.post(CHAT, json=BODY | {"model": "m2"})
        client.post(CHAT, content="{")
        engine.refuse_next(EngineOverloaded("full", 3))
        response = client.post(CHAT, json=BODY)
        check_error(response, 429, code="rate_limit_exceeded")
        assert response.headers["retry-after"] == "3"
        after = metrics(client)
        assert set(after) == set(before)
        assert after['chorus_requests_total{outcome="refused"}'] == 4
        assert after["chorus_choices_total"] == 0


def test_metrics_have_the_promised_names() -> None:
    with serving() as client:
        response = client.get("/metrics")
        assert response.headers["content-type"].count("charset") == 1
        names = {line.split("{")[0].split(" ")[0] for line in response.text.splitlines() if not line.startswith("#")}
    promised = {
        "chorus_requests_total",
        "chorus_choices_total",
        "chorus_sequences_running",
        "chorus_sequences_waiting",
        "chorus_kv_pages",
        "chorus_step_seconds_count",
        "chorus_step_seconds_sum",
        "chorus_prompt_tokens_total",
        "chorus_generation_tokens_total",
        "chorus_engine_heartbeat_age_seconds",
    }
    assert promised <= names


def test_the_description_has_every_route_and_no_other() -> None:
    routes = {
        (re.sub(r":\w+}", "}", route.path_format), method.lower())
        for route in create_app(SETTINGS).routes
        if isinstance(route, HTTPRoute)
        for method in route.methods - {"OPTIONS"}
    }
    pages = {(path, method) for path in FILES for method in ("get", "head")}
    assert {(operation.path, operation.method) for operation in OPERATIONS} | pages == routes


def references(node: object) -> set[str]:
    if isinstance(node, dict):
        own = {node["$ref"]} if isinstance(node.get("$ref"), str) else set()
        return own.union(*(references(value) for value in node.values()))
    return set().union(*(references(item) for item in node)) if isinstance(node, list) else set()


def test_the_description_declares_requests_and_our_own_errors() -> None:
    with serving() as client:
        document = client.get("/openapi.json").json()
        page = client.get("/docs")
    assert document == openapi_document() and document["openapi"].startswith("3.1")
    for path, schema in ((CHAT, "ChatCompletionRequest"), ("/v1/completions", "CompletionRequest")):
        operation = document["paths"][path]["post"]
        content = operation["requestBody"]["content"]["application/json"]
        assert content["schema"] == {"$ref": f"#/components/schemas/{schema}"}
        for status in ("400", "404", "413", "415", "429", "500", "503"):
            assert operation["responses"][status] == {"$ref": f"#/components/responses/{status}"}
    for reference in references(document):
        node = document
        for step in reference.removeprefix("#/").split("/"):
            node = node[step]
    identifiers = [operation["operationId"] for path in document["paths"].values() for operation in path.values()]
    assert len(set(identifiers)) == len(identifiers)
    assert page.headers["content-type"].startswith("text/html")
    assert "src=" not in page.text and "http" not in page.text  # no outside assets
