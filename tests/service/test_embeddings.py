"""POST /v1/embeddings over the fake engine, whose vectors count the inputs' token ids modulo 8."""

from __future__ import annotations

import base64
import json
import logging
import math
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import openai
import pytest
from anyio.lowlevel import checkpoint

from engine.api import EmbeddingFailed, EngineDead, EngineOverloaded
from engine.config import EngineConfig
from engine.fake import DIMENSIONS, MAX_INPUT_TOKENS, FakeEngine
from service.app import create_app
from service.schemas.embeddings import MAX_INPUTS
from service.settings import SettingsError, read_settings
from tests.service.apps import EMBEDDING, MAX_MODEL_LEN, SETTINGS, Client, check_error, serving
from tests.service.asgi import Client as AsgiClient

PATH = "/v1/embeddings"


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    with serving(replace(EMBEDDING, max_body_bytes=2**20, max_queued_tokens=10_000)) as client:
        yield client


def vector(token_ids: Sequence[int], dimensions: int = DIMENSIONS) -> list[float]:
    counts = [sum(token_id % DIMENSIONS == place for token_id in token_ids) for place in range(dimensions)]
    return [count / (math.hypot(*counts) or 1) for count in counts]


def ask(client: Client, given: Any, **more: Any) -> dict[str, Any]:
    response = client.post(PATH, json={"model": "org/e", "input": given, **more})
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    assert (answer["object"], answer["model"]) == ("list", "org/e")
    assert [item["index"] for item in answer["data"]] == list(range(len(answer["data"])))
    assert all(item["object"] == "embedding" for item in answer["data"])
    return answer


@pytest.mark.parametrize(
    ("given", "inputs"),
    [
        ("hé", [list("hé".encode())]),
        (["b", "ab", "🧪"], [[98], [97, 98], list("🧪".encode())]),
        ([5, 13, 2], [[5, 13, 2]]),
        ([[300], [1, 2, 3], [9]], [[300], [1, 2, 3], [9]]),
    ],
    ids=["text", "texts", "token ids", "lists of token ids"],
)
def test_each_form_of_input_gives_its_vectors_in_order(client: Client, given: Any, inputs: list[list[int]]) -> None:
    answer = ask(client, given)
    assert [item["embedding"] for item in answer["data"]] == [pytest.approx(vector(one)) for one in inputs]
    num_tokens = sum(map(len, inputs))
    assert answer["usage"] == {"prompt_tokens": num_tokens, "total_tokens": num_tokens}


def test_base64_is_the_same_numbers(client: Client) -> None:
    (plain,) = ask(client, "some text", encoding_format="float")["data"]
    (packed,) = ask(client, "some text", encoding_format="base64")["data"]
    raw = base64.b64decode(packed["embedding"], validate=True)
    assert list(struct.unpack(f"<{DIMENSIONS}f", raw)) == plain["embedding"]


def test_openai_python_decodes_what_it_asks_for() -> None:
    """It asks for base64 unless told otherwise."""
    with serving(EMBEDDING) as client:
        sdk = openai.OpenAI(base_url="http://testserver.local/v1", api_key="x", http_client=client, max_retries=0)
        by_default = sdk.embeddings.create(model="org/e", input=["a", "bc"])
        as_floats = sdk.embeddings.create(model="org/e", input=["a", "bc"], encoding_format="float", dimensions=8)
        with pytest.raises(openai.BadRequestError) as caught:
            sdk.embeddings.create(model="org/e", input="x" * (MAX_INPUT_TOKENS + 1))
    assert [item.embedding for item in by_default.data] == [item.embedding for item in as_floats.data]
    assert by_default.data[1].embedding == pytest.approx(vector(b"bc"))
    assert by_default.usage.total_tokens == 3
    assert (caught.value.param, caught.value.code) == ("input", "context_length_exceeded")


def test_fewer_dimensions_are_the_first_ones_at_length_1(client: Client) -> None:
    for dimensions in (1, 3, DIMENSIONS):
        (item,) = ask(client, [1, 2, 2, 7], dimensions=dimensions)["data"]
        assert item["embedding"] == pytest.approx(vector([1, 2, 2, 7], dimensions))


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": ["a", ""]}, "input"),
        ({"input": [[1], []]}, "input"),
        ({"input": ["a", 1]}, "input"),
        ({"input": ["a", [1]]}, "input"),
        ({"input": [320]}, "input"),
        ({"input": [[1], [-1]]}, "input"),
        ({"input": ["a", "x" * (MAX_INPUT_TOKENS + 1)]}, "input"),
        ({"input": ["x"] * (MAX_INPUTS + 1)}, "input"),
        ({"input": ["x" * 100] * 101}, "input"),
        ({"input": None}, "input"),
        ({"input": {"text": "a"}}, "input"),
        ({"input": [1.5]}, "input[0]"),
        ({"dimensions": 0}, "dimensions"),
        ({"dimensions": DIMENSIONS + 1}, "dimensions"),
        ({"dimensions": "8"}, "dimensions"),
        ({"encoding_format": "int8"}, "encoding_format"),
        ({"truncate_prompt_tokens": 3}, "truncate_prompt_tokens"),
        ({"model": "org/m"}, "model"),
    ],
)
def test_what_cannot_be_embedded_is_refused_by_name(client: Client, more: dict[str, Any], param: str) -> None:
    check_error(client.post(PATH, json={"model": "org/e", "input": "a", **more}), 400, param)


def test_the_largest_input_and_the_most_of_them_are_taken(client: Client) -> None:
    ask(client, "x" * MAX_INPUT_TOKENS)
    assert len(ask(client, ["x"] * MAX_INPUTS)["data"]) == MAX_INPUTS


def test_ids_of_another_tokenizer_are_told_apart_where_they_can_be(client: Client) -> None:
    error = check_error(client.post(PATH, json={"model": "org/e", "input": [[1], [15339, 1917]]}), 400, "input")
    assert "check_embedding_ctx_length=False" in error["message"]


def test_the_body_is_held_to_what_every_body_is(client: Client) -> None:
    check_error(client.post(PATH, content=b'{"model": "org/e", "input": "\\ud800"}'), 400)
    check_error(client.post(PATH, content=b"{"), 400)
    check_error(client.post(PATH, json={"input": "x"}), 400, "model")
    check_error(client.post(PATH, json={"model": "org/e"}), 400, "input")
    check_error(client.post(PATH, json={"model": "org/e", "input": "x" * 2**20}), 413)
    check_error(client.post(PATH, content=b"x", headers={"content-type": "text/plain"}), 415)
    check_error(client.get(PATH), 405)


def test_both_models_are_listed_and_each_does_its_own_work(client: Client) -> None:
    cards = client.get("/v1/models").json()["data"]
    assert [(card["id"], card["max_model_len"]) for card in cards] == [
        ("org/m", MAX_MODEL_LEN),
        ("org/e", MAX_INPUT_TOKENS),
    ]
    assert client.get("/v1/models/org/e").json() == cards[1]
    check_error(client.post(PATH, json={"model": "other", "input": "a"}), 404, "model", "model_not_found")
    body = {"model": "org/e", "messages": [{"role": "user", "content": "x"}]}
    check_error(client.post("/v1/chat/completions", json=body), 404, "model", "model_not_found")
    answer = client.post("/tokenize", json={"model": "org/e", "prompt": "ab"}).json()
    assert (answer["tokens"], answer["max_model_len"]) == ([97, 98], MAX_INPUT_TOKENS)
    assert client.post("/detokenize", json={"model": "org/e", "tokens": [97]}).json() == {"prompt": "a"}
    check_error(client.post("/tokenize", json=body), 400, "messages")


def test_without_an_embedding_model_the_setting_is_named() -> None:
    with serving() as client:
        for model in ("org/m", "org/e"):
            error = check_error(client.post(PATH, json={"model": model, "input": "a"}), 404, "model", "model_not_found")
            assert "CHORUS_EMBEDDING_MODEL" in error["message"]
        assert len(client.get("/v1/models").json()["data"]) == 1
        assert "embedding" not in client.get("/metrics").text


def test_a_server_that_passes_on_names_no_setting_that_it_would_refuse() -> None:
    with serving(replace(SETTINGS, engine="upstream")) as client:
        error = check_error(client.post(PATH, json={"model": "org/m", "input": "a"}), 404, "model", "model_not_found")
    assert error["message"] == "This server makes no embeddings: it passes chats and completions on."


def test_the_name_is_the_models_and_not_the_other_models() -> None:
    assert read_settings({"CHORUS_EMBEDDING_MODEL": "org/e"}).served_embedding_model_name == "org/e"
    assert read_settings({}).embedding_model is None
    with pytest.raises(SettingsError, match="CHORUS_SERVED_EMBEDDING_MODEL_NAME=x"):
        read_settings(
            {
                "CHORUS_EMBEDDING_MODEL": "org/e",
                "CHORUS_SERVED_EMBEDDING_MODEL_NAME": "x",
                "CHORUS_SERVED_MODEL_NAME": "x",
            }
        )


def metrics(client: Client) -> dict[str, float]:
    lines = client.get("/metrics").text.splitlines()
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))}


def test_requests_are_counted_and_logged_without_text(caplog: pytest.LogCaptureFixture) -> None:
    engine = FakeEngine(EMBEDDING.engine_config())
    with serving(EMBEDDING, engine=engine) as client, caplog.at_level(logging.INFO, "chorus.request"):
        before = metrics(client)
        client.post(PATH, json={"model": "org/e", "input": ["secret", "x"]}, headers={"X-Request-Id": "r1"})
        client.post(PATH, json={"model": "org/e", "input": ""})
        engine.refuse_next(EngineOverloaded("full", 3))
        full = client.post(PATH, json={"model": "org/e", "input": "x"})
        engine.refuse_next(EmbeddingFailed("non-finite"))
        failed = client.post(PATH, json={"model": "org/e", "input": "x"})
        after = metrics(client)
    check_error(full, 429, code="rate_limit_exceeded")
    assert full.headers["retry-after"] == "3"
    check_error(failed, 500)
    assert set(after) == set(before)
    counted = {outcome: after[f'chorus_embedding_requests_total{{outcome="{outcome}"}}'] for outcome in ("ok", "error")}
    assert counted == {"ok": 1, "error": 1}
    assert after['chorus_embedding_refusals_total{reason="queue_full"}'] == 1
    assert after['chorus_embedding_refusals_total{reason="invalid"}'] == 1
    assert (after["chorus_embedding_inputs_total"], after["chorus_embedding_tokens_total"]) == (2, 7)
    duration = "gen_ai_server_request_duration_seconds_count"
    labels = 'gen_ai_operation_name="embeddings",gen_ai_provider_name="chorus",gen_ai_request_model="org/e"'
    assert after[f'{duration}{{error_type="",{labels}}}'] == 1
    assert after['chorus_requests_total{outcome="ok"}'] == 0, "these are of generation"
    lines = [record.__dict__["fields"] for record in caplog.records if record.name == "chorus.request"]
    assert "secret" not in str(lines)
    lines = [line for line in lines if "kind" in line]  # the others were turned away before there was a job
    assert [(line["kind"], line["outcome"], line["status"]) for line in lines] == [
        ("embedding", "ok", 200),
        ("embedding", "refused", 429),
        ("embedding", "error", 500),
    ]
    assert (lines[0]["inputs"], lines[0]["prompt_tokens"], lines[0]["request_id"]) == (2, 7, "r1")


def test_keys_and_their_limits_hold(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("k1 one tokens_per_minute=10\nk2 two max_concurrent=0\nk3 three requests_per_minute=1\n")
    with serving(replace(EMBEDDING, api_keys_file=keys)) as client:
        body = {"model": "org/e", "input": "x" * 10}
        check_error(client.post(PATH, json=body), 401)

        def status(key: str) -> int:
            return client.post(PATH, json=body, headers={"Authorization": f"Bearer {key}"}).status_code

        assert [status("k1"), status("k1")] == [200, 429]
        assert status("k2") == 429
        assert [status("k3"), status("k3")] == [200, 429]


class SlowEngine(FakeEngine):
    """Embeds nothing until it is told to."""

    def __init__(self, config: EngineConfig) -> None:
        self.gate = anyio.Event()
        super().__init__(config, pause=self._paused)

    async def _paused(self) -> None:
        await self.gate.wait()


@pytest.mark.anyio
@pytest.mark.parametrize("end", ["disconnect", "deadline", "hang", "death", "stop"])
async def test_whoever_cannot_be_served_any_more_is_told_and_leaves_nothing_behind(end: str) -> None:
    """More inputs than one batch takes, so that the engine stands with the rest of them."""
    settings = replace(EMBEDDING, max_num_batched_tokens=4)
    engine = SlowEngine(settings.engine_config())
    app = create_app(settings, engine=engine)
    services = app.state.services
    client = AsgiClient()
    timeout = "0.05" if end == "deadline" else "60"
    async with anyio.create_task_group() as group:
        with anyio.fail_after(20):
            group.start_soon(_host, app)
            await _until(lambda: services.tokenizer is not None)
            async with anyio.create_task_group() as request:
                request.start_soon(_post, app, {"model": "org/e", "input": ["abcd"] * 9}, client, timeout)
                await _until(lambda: engine.health().embedding_tokens > 0)
                if end == "disconnect":
                    client.gone.set()
                elif end == "hang":
                    (running,) = services.running_embeddings
                    running.fail(EngineDead("no progress"))
                elif end == "death":
                    engine.fail("killed by a test")
                elif end == "stop":
                    engine.stop()
            assert engine.health().num_embedding_inputs == 0
            assert not services.running_embeddings
            engine.gate.set()
            group.cancel_scope.cancel()
    if end == "disconnect":
        assert client.messages == []
    else:
        assert client.messages[0]["status"] == 503
    outcome = "cancelled" if end == "disconnect" else "error"
    assert services.metrics.embeddings.requests[outcome] == 1


async def _host(app: Any) -> None:
    async with app.lifespan():
        await anyio.sleep_forever()


async def _until(condition: Callable[[], bool]) -> None:
    while not condition():
        await checkpoint()


async def _post(app: Any, body: dict[str, Any], client: AsgiClient, timeout: str) -> None:
    raw = json.dumps(body).encode()
    sent = False

    async def receive() -> Any:
        nonlocal sent
        if sent:
            return await client.receive()
        sent = True
        return {"type": "http.request", "body": raw, "more_body": False}

    headers = [(b"content-type", b"application/json"), (b"x-request-timeout", timeout.encode())]
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": PATH,
        "raw_path": PATH.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": headers,
        "client": None,
        "server": ("127.0.0.1", 80),
        "extensions": {},
        "state": {},
    }
    await app(scope, receive, client.send)


def test_before_the_models_are_loaded_there_is_nothing_to_embed_with() -> None:
    engine = FakeEngine(EMBEDDING.engine_config(), load=anyio.sleep_forever)
    with serving(EMBEDDING, engine=engine, wait=False) as client:
        response = client.post(PATH, json={"model": "org/e", "input": "x"})
        check_error(response, 503)
        assert int(response.headers["retry-after"]) >= 1
        check_error(client.post(PATH, json={"model": "org/e", "input": ""}), 400, "input")


def test_settings_without_one_leave_the_engine_without() -> None:
    assert SETTINGS.engine_config().embedding_model is None
    assert EMBEDDING.engine_config().served_embedding_model_name == "org/e"
