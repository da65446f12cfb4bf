"""schemathesis reads /openapi.json and asks what it allows, and what it does not: no 5xx, every answer as described."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from service.openapi import OPERATIONS, openapi_document
from tests.e2e.fixtures import MODEL, fake_spec
from tests.e2e.server import Server, Servers

pytestmark = [pytest.mark.client("schemathesis"), pytest.mark.timeout(400)]

EXAMPLES = {"get": 10, "delete": 10, "post": 100}
FEWER = {"/v1/chat/completions/render": 20, "/tokenize": 40, "/detokenize": 20}
"""Of those whose requests are a chat's, or simple."""

MAX_FIELDS = 2
"""Optional ones of a body: nearly every combination of many is refused."""

EMBEDDER = "org/embedder"
BOUNDS = {
    "CHORUS_MAX_MODEL_LEN": 256,
    "CHORUS_MAX_N": 4,
    "CHORUS_EMBEDDING_MODEL": "any",
    "CHORUS_SERVED_EMBEDDING_MODEL_NAME": EMBEDDER,
}

CASES = [(True, one.method, one.path) for one in OPERATIONS] + [
    (False, one.method, one.path) for one in OPERATIONS if one.body or one.parameters
]
"""allowed, method, path: what the document allows; and, of what takes anything, what it does not."""

WITH_BODY = {one.path for one in OPERATIONS if one.body}
"""Of these a share has to be served."""


@pytest.fixture
def bounded(servers: Servers) -> Server:
    """The fake engine, with answers that are short whatever is asked for."""
    return servers.get(fake_spec(**BOUNDS))


@pytest.mark.parametrize(("allowed", "method", "path"), CASES)
def test_every_answer_is_as_described(bounded: Server, allowed: bool, method: str, path: str) -> None:
    import schemathesis
    from schemathesis.checks import not_a_server_error
    from schemathesis.specs.openapi import checks

    operation = schemathesis.openapi.from_url(f"{bounded.url}/openapi.json")[path][method]
    mode = schemathesis.GenerationMode.POSITIVE if allowed else schemathesis.GenerationMode.NEGATIVE
    num_examples = FEWER.get(path, EXAMPLES[method])
    statuses: Counter[int] = Counter()

    @settings(
        max_examples=num_examples,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate, Phase.shrink],
    )
    @given(case=operation.as_strategy(generation_mode=mode), data=st.data())
    def ask(case: Any, data: st.DataObject) -> None:
        if allowed and isinstance(case.body, dict):
            model = EMBEDDER if path == "/v1/embeddings" else MODEL
            case.body = _servable(case.body, data) | {"model": model}
        response = case.call()
        statuses[response.status_code] += 1
        if response.headers["content-type"][0].startswith("text/event-stream"):
            _check_events(path, response.content.decode())
            return
        described = [
            not_a_server_error,
            checks.status_code_conformance,
            checks.content_type_conformance,
            checks.response_headers_conformance,
            checks.response_schema_conformance,
        ]
        case.validate_response(response, checks=described)

    ask()
    assert not allowed or path not in WITH_BODY or statuses[200] >= num_examples // 5, statuses
    bounded.wait_idle()


def _servable(body: dict[str, Any], data: st.DataObject) -> dict[str, Any]:
    """What must be there, and some of the rest."""
    needed = {"input", "messages", "prompt", "tokens"} & set(body)
    rest = sorted(set(body) - needed)
    kept = data.draw(st.sets(st.sampled_from(rest), max_size=MAX_FIELDS)) if rest else set()
    return {name: value for name, value in body.items() if name in needed | kept}


def _check_events(path: str, stream: str) -> None:
    document = openapi_document()
    schema = document["paths"][path]["post"]["responses"]["200"]["content"]["text/event-stream"]["schema"]
    validator = Draft202012Validator({**schema, "components": document["components"]})
    events = [event for event in stream.strip().split("\n\n") if not event.startswith(":")]
    if path != "/v1/responses":
        assert events.pop() == "data: [DONE]"
    for event in events:
        validator.validate(json.loads(event.rpartition("data: ")[2]))
