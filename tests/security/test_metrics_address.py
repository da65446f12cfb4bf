"""/metrics on an address of its own, which the operator can keep to the inside."""

from __future__ import annotations

import re

import httpx
import pytest

from service.settings import SettingsError, read_settings
from tests.e2e.fixtures import FAKE
from tests.e2e.server import Server, spec


@pytest.mark.parametrize("worker", ["asyncio", "trio"])
def test_metrics_are_on_their_own_address_and_nothing_else_is(worker: str) -> None:
    settings = {**FAKE, "CHORUS_METRICS_BIND": "127.0.0.1:0"}
    with Server.start(spec("service", worker, settings)).wait_ready() as server:
        match = re.search(r'"metrics","url":"(http://127\.0\.0\.1:\d+)/metrics"', server.output())
        assert match is not None
        with httpx.Client(base_url=match[1]) as inside:
            assert "chorus_sequences_running" in inside.get("/metrics").text
            for path in ("/", "/health", "/v1/models", "/v1/requests", "/metrics/", "/docs"):
                assert inside.get(path).status_code == 404
            assert inside.post("/v1/completions", json={}).status_code == 404
            assert inside.post("/metrics").status_code == 404
        assert server.get("/metrics").status_code == 404
        server.signal()
        assert server.wait() == 0


@pytest.mark.parametrize("raw", ["9090", ":9090", "127.0.0.1", "127.0.0.1:70000", "[::1:9090", "a b:1"])
def test_a_bad_address_is_refused_at_the_start(raw: str) -> None:
    with pytest.raises(SettingsError, match="CHORUS_METRICS_BIND"):
        read_settings({"CHORUS_METRICS_BIND": raw})


def test_addresses_are_read() -> None:
    assert read_settings({"CHORUS_METRICS_BIND": "0.0.0.0:9090"}).metrics_bind == ("0.0.0.0", 9090)
    assert read_settings({"CHORUS_METRICS_BIND": "[::1]:9090"}).metrics_bind == ("::1", 9090)
