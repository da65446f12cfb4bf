"""values.yaml, its schema and the server's settings say the same. Needs no helm, so `./deploy/test` runs it too."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import pytest

from engine.config import VllmOptions
from service import __version__
from service.settings import Settings
from tests.helm.chart import CHART, default_values, schema, yaml


def camel_case(name: str) -> str:
    first, *rest = name.split("_")
    return first + "".join(word.capitalize() for word in rest)


VLLM = {option.name: f"engine.vllm.{camel_case(option.name)}" for option in fields(VllmOptions)}
ELSEWHERE = VLLM | {
    "api_keys_file": "apiKeys.existingSecret",
    "cache_dir": "cache.mountPath",
    "device": "device",
    "engine": "engine.type",
    "metrics_bind": "monitoring.port",
    "metrics_compat": "monitoring.compat",
    "model": "model.source",
    "otlp_endpoint": "monitoring.otlpEndpoint",
    "responses_store": "responses.existingClaim",
    "served_model_name": "model.servedName",
    "trace_content": "monitoring.traceContent",
    "upstream_api_key": "engine.upstream.apiKeySecret.name",
    "upstream_connect_timeout": "engine.upstream.connectTimeout",
    "upstream_idle_timeout": "engine.upstream.idleTimeout",
    "upstream_max_retries": "engine.upstream.maxRetries",
    "upstream_model": "engine.upstream.model",
    "upstream_poll_seconds": "engine.upstream.pollSeconds",
    "upstream_urls": "engine.upstream.urls",
}
"""Settings that are not the value of the same name under engine or server."""


def leaves(values: dict[str, Any], path: str = "") -> Iterator[str]:
    for key, value in values.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, f"{path}{key}.")
        else:
            yield path + key


@pytest.mark.parametrize("setting", [setting.name for setting in fields(Settings)])
def test_each_setting_is_one_value(setting: str) -> None:
    values = default_values()
    if setting in ELSEWHERE:
        assert ELSEWHERE[setting] in set(leaves(values))
        return
    name = camel_case(setting)
    groups = [group for group in ("engine", "server") if name in values[group]]
    assert len(groups) == 1, f"give {setting} a value: add `{name}: null` under server (or engine) in values.yaml"
    properties = schema()["properties"][groups[0]]["properties"]
    assert name in properties, f"add {name} to values.schema.json"


def test_each_engine_and_server_value_is_a_setting() -> None:
    names = {camel_case(setting.name) for setting in fields(Settings)}
    values = default_values()
    found = {f"{group}.{name}" for group in ("engine", "server") for name in values[group]}
    assert {path for path in found if path.split(".")[1] not in names} == {
        "engine.type",
        "engine.upstream",
        "engine.vllm",
    }


def test_app_version_is_the_servers() -> None:
    assert yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"] == __version__


def test_schema_knows_each_value_and_no_other() -> None:
    def known(node: dict[str, Any], path: str = "") -> Iterator[str]:
        node = schema()["$defs"][node["$ref"].rsplit("/", 1)[1]] if "$ref" in node else node
        for name, child in node.get("properties", {}).items():
            yield path + name
            yield from known(child, f"{path}{name}.")

    allowed = set(known(schema()))
    missing = {path for path in leaves(default_values()) if not any(path.startswith(name) for name in allowed)}
    assert not missing
    used = {".".join(path.split(".")[:depth]) for path in leaves(default_values()) for depth in range(1, 9)}
    optional = {
        "global",
        "resources.claims",
        "autoscaling.authenticationRef.name",
        "autoscaling.authenticationRef.kind",
    }
    assert allowed - used <= optional


def test_schema_is_strict_at_every_level() -> None:
    def objects(node: Any, path: str) -> Iterator[tuple[str, dict[str, Any]]]:
        if isinstance(node, dict):
            if "properties" in node and node.get("type") == "object":
                yield path, node
            for key, child in node.items():
                yield from objects(child, f"{path}/{key}")
        elif isinstance(node, list):
            for child in node:
                yield from objects(child, path)

    assert not [path for path, node in objects(schema(), "") if node.get("additionalProperties") is not False]
