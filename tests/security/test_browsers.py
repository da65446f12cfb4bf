"""Pages of other origins: shut out unless the operator names them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from service.settings import Settings, SettingsError, read_settings
from tests.service.apps import SETTINGS
from tests.service.inloop import app_and_client, key

PAGE = "https://app.example"
PREFLIGHT = {"Origin": PAGE, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}


@pytest.fixture
def with_keys(tmp_path: Path) -> Settings:
    path = tmp_path / "keys"
    path.write_text("sk-a\n")
    return replace(SETTINGS, api_keys_file=path)


@pytest.mark.anyio
async def test_by_default_no_page_may_read_anything(with_keys: Settings) -> None:
    async with app_and_client(with_keys) as (_, client):
        for headers in ({"Origin": PAGE}, {"Origin": PAGE} | key("sk-a")):
            response = await client.get("/v1/models", headers=headers)
            assert not any(name.startswith("access-control") for name in response.headers)
        assert (await client.options("/v1/models", headers=PREFLIGHT)).status_code == 401


@pytest.mark.anyio
async def test_an_origin_that_is_named_may_and_others_may_not(with_keys: Settings) -> None:
    async with app_and_client(replace(with_keys, cors_origins=(PAGE,))) as (_, client):
        preflight = await client.options("/v1/chat/completions", headers=PREFLIGHT)
        assert preflight.status_code == 204 and preflight.headers["access-control-allow-origin"] == PAGE
        refused = await client.get("/v1/models", headers={"Origin": PAGE})
        assert refused.status_code == 401 and refused.headers["access-control-allow-origin"] == PAGE
        answer = await client.get("/v1/models", headers={"Origin": PAGE} | key("sk-a"))
        assert answer.status_code == 200 and answer.headers["access-control-allow-origin"] == PAGE
        assert "access-control-allow-credentials" not in answer.headers
        other = await client.get("/v1/models", headers={"Origin": "https://evil.example"} | key("sk-a"))
        assert "access-control-allow-origin" not in other.headers
        preflight = await client.options("/v1/models", headers=PREFLIGHT | {"Origin": "https://evil.example"})
        assert "access-control-allow-origin" not in preflight.headers


@pytest.mark.parametrize(
    "raw", ["example.com", "https://a.example/", "https://*.example", "https://a.example,", "null"]
)
def test_an_origin_that_no_browser_sends_is_refused_at_the_start(raw: str) -> None:
    with pytest.raises(SettingsError, match="CHORUS_CORS_ORIGINS"):
        read_settings({"CHORUS_CORS_ORIGINS": raw})


def test_origins_are_read() -> None:
    assert read_settings({"CHORUS_CORS_ORIGINS": "https://a.example, http://localhost:3000"}).cors_origins == (
        "https://a.example",
        "http://localhost:3000",
    )
    assert read_settings({"CHORUS_CORS_ORIGINS": "*"}).cors_origins == ("*",)
