"""Any body whatever: an answer or a 4xx with the envelope that names a field, and a server that serves on.

FUZZ_EXAMPLES in the environment asks for a longer run than CI's.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from service.schemas.fields import CHAT_FIELDS, COMPLETION_FIELDS
from service.schemas.response_fields import RESPONSE_FIELDS
from service.schemas.response_items import INPUT_ITEMS
from service.settings import Settings
from tests.service.apps import Client, check_error, serving

EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "100"))
PATHS = {
    "/v1/chat/completions": CHAT_FIELDS,
    "/v1/completions": COMPLETION_FIELDS,
    "/v1/responses": RESPONSE_FIELDS,
}
SMALL = Settings(engine="fake", served_model_name="m", max_model_len=96, max_num_seqs=8, max_n=8, request_timeout=20)

fuzz = settings(
    max_examples=EXAMPLES,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large],
)

numbers = st.one_of(
    st.integers(-3, 10),
    st.sampled_from([2**31, 2**63 - 1, 2**63, 2**64, -(2**63), 10**30, 1e308, -0.0, 0.5, 1.0001, 1e-9]),
    st.floats(allow_nan=False, allow_infinity=False),
)
words = st.one_of(
    st.sampled_from(["m", "", "user", "assistant", "system", "text", "logprob", "isolate", "regex", "json_pointer"]),
    st.sampled_from(["(", "(a*)*b", "\\1", "/a/~2", "\0", "\ud7ff", "<|end|>", "\U0001f9ea", "a" * 5000]),
    st.text(max_size=12),
)
scalars = st.one_of(st.none(), st.booleans(), numbers, words)
NAMES = sorted({name.split("[")[0] for fields in PATHS.values() for path in fields for name in path.split(".") if name})
keys = st.one_of(st.sampled_from(NAMES), st.sampled_from(["role", "type", "text", "content"]), st.text(max_size=8))
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(keys, inner, max_size=4), max_leaves=12
)


def plausible(path: str) -> st.SearchStrategy[dict[str, Any]]:
    """A request that would do, but for some fields that are anything."""
    messages = [{"role": "user", "content": "hi"}]
    needed: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": {"max_tokens": 2, "messages": messages},
        "/v1/completions": {"max_tokens": 2, "prompt": "hi"},
        "/v1/responses": {"max_output_tokens": 2, "input": messages},
    }
    base: dict[str, Any] = {"model": "m", **needed[path]}
    fields = sorted({name.split(".")[0].split("[")[0] for name in PATHS[path]})
    changes = st.dictionaries(st.one_of(st.sampled_from(fields), keys), values, min_size=1, max_size=3)
    return changes.map(lambda changed: base | changed)


parts = st.fixed_dictionaries(
    {"type": st.sampled_from(["input_text", "output_text", "refusal", "summary_text", "reasoning_text", "x"])},
    optional={"text": words, "refusal": words, "annotations": values},
)
items = st.fixed_dictionaries(
    {},
    optional={
        "type": st.sampled_from([*INPUT_ITEMS, "web_search_call", "x", None, 1]),
        "role": st.sampled_from(["user", "assistant", "system", "developer", "x"]),
        "content": st.one_of(words, st.lists(parts, max_size=3)),
        "summary": st.lists(parts, max_size=2),
        "output": st.one_of(words, st.lists(parts, max_size=2)),
        "id": words,
        "call_id": words,
        "name": words,
        "arguments": st.one_of(st.sampled_from(["{}", '{"x": 1}', "[", ""]), words),
    },
)
fan_outs = st.fixed_dictionaries(
    {},
    optional={
        "on_error": st.sampled_from(["fail", "isolate", None, "x"]),
        "stop_after": numbers,
        "keep_unfinished": st.sampled_from([True, False, None, 1]),
        "rank_by": st.sampled_from(["logprob", None, "x"]),
        "keep": numbers,
        "agree": st.one_of(
            st.none(),
            st.fixed_dictionaries(
                {"on": st.sampled_from(["text", "json_pointer", "regex", "x"]), "count": st.integers(0, 4)},
                optional={"value": words},
            ),
        ),
        "details": st.sampled_from([True, False, None, "x"]),
    },
)


@pytest.fixture(scope="module", params=["asyncio", "trio"])
def client(request: pytest.FixtureRequest) -> Iterator[Client]:
    with serving(SMALL, backend=request.param) as made:
        yield made


def check(client: Client, path: str, content: bytes) -> None:
    response = client.post(path, content=content, headers={"content-type": "application/json"})
    if response.status_code != 200:
        assert response.status_code in (400, 404, 413), (response.status_code, response.text)
        check_error(response, response.status_code)
    elif response.headers["content-type"].startswith("text/event-stream"):
        assert response.text.endswith("data: [DONE]\n\n") or path == "/v1/responses", response.text[-300:]
    else:
        answer = json.loads(response.content, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
        if path == "/v1/responses":
            assert answer["status"] in ("completed", "incomplete")
            return
        assert all(choice["finish_reason"] in ("stop", "length", "tool_calls") for choice in answer["choices"])


def check_idle(client: Client) -> None:
    health = client.app.state.services.engine.health()
    assert (health.num_running, health.num_waiting, health.pages_held) == (0, 0, 0)
    assert client.get("/health/live").status_code == 200


@pytest.mark.parametrize("path", PATHS)
@fuzz
@given(data=st.data())
def test_some_fields_are_anything(client: Client, path: str, data: st.DataObject) -> None:
    check(client, path, json.dumps(data.draw(plausible(path))).encode())
    check_idle(client)


@fuzz
@given(items=st.lists(items, max_size=4), stream=st.booleans(), truncation=st.sampled_from(["auto", "disabled"]))
def test_an_input_of_any_items(client: Client, items: list[Any], stream: bool, truncation: str) -> None:
    body = {"model": "m", "input": items, "stream": stream, "max_output_tokens": 2, "truncation": truncation}
    check(client, "/v1/responses", json.dumps(body).encode())
    check_idle(client)


@pytest.mark.parametrize("path", list(PATHS)[:2])
@fuzz
@given(fan_out=fan_outs, n=st.integers(1, 4), stream=st.booleans(), prompts=st.integers(1, 2))
def test_a_fan_out_of_any_shape(
    client: Client, path: str, fan_out: dict[str, Any], n: int, stream: bool, prompts: int
) -> None:
    body: dict[str, Any] = {"model": "m", "n": n, "stream": stream, "max_tokens": 3, "fan_out": fan_out}
    body |= (
        {"prompt": ["hi"] * prompts} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "x"}]}
    )
    check(client, path, json.dumps(body).encode())
    check_idle(client)


@pytest.mark.parametrize("path", PATHS)
@fuzz
@given(content=st.one_of(st.binary(max_size=200), values.map(lambda value: json.dumps(value).encode())))
def test_a_body_of_anything(client: Client, path: str, content: bytes) -> None:
    check(client, path, content)


@fuzz
@given(
    method=st.sampled_from(["GET", "DELETE", "POST", "PUT", "PATCH", "HEAD", "OPTIONS"]),
    path=st.lists(
        st.sampled_from(["v1", "requests", "choices", "models", "0", "-1", "%00", "..", "health"]), max_size=5
    ),
    headers=st.dictionaries(
        st.sampled_from(
            ["X-Request-Id", "X-Request-Timeout", "Authorization", "Content-Length", "Origin", "Content-Type"]
        ),
        st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=20),
        max_size=3,
    ),
)
def test_any_url_with_any_headers(client: Client, method: str, path: list[str], headers: dict[str, str]) -> None:
    response = client.request(method, "/" + "/".join(path), headers=headers)
    assert response.status_code < 500, response.text
    if response.status_code >= 400 and method != "HEAD":
        check_error(response, response.status_code)
