"""The images and compose.yaml keep what the chart and the server rely on."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from service.settings import read_settings, unknown_variables
from tests.helm.chart import ROOT, yaml

DEPLOY = ROOT / "deploy"
DOCKERFILES = [DEPLOY / "Dockerfile.cpu", DEPLOY / "Dockerfile.cuda"]


def compose() -> dict[str, Any]:
    return yaml.safe_load((DEPLOY / "compose.yaml").read_text())


def ours() -> list[dict[str, Any]]:
    return [service for name, service in compose()["services"].items() if name.startswith("chorus")]


def image_variables(path: Path) -> dict[str, str]:
    return dict(re.findall(r"(?:ENV | {4})(\w+)=(\S+)", path.read_text()))


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_image(path: Any) -> None:
    text = path.read_text()
    stages = re.findall(r"^FROM (\S+)(?: AS (\w+))?$", text, re.MULTILINE)
    assert stages == [("${BASE}", "wheels"), ("${BASE}", "build"), ("${BASE}", "")], "its base is the builder's choice"
    assert "g++" not in text.split("AS build")[1], "what is shipped was never beside a compiler"
    assert re.search(r"^ARG BASE=\S+:(?!latest)\S+$", text, re.MULTILINE)
    assert re.search(r"^USER 10001$", text, re.MULTILINE)
    assert 'ENTRYPOINT ["python", "-P", "-m", "service"]' in text
    assert "HEALTHCHECK" in text and "/health/ready" in text
    variables = image_variables(path)
    assert variables["CHORUS_HOST"] == "0.0.0.0" and variables["CHORUS_CACHE_DIR"] == "/var/cache/chorus"
    read_settings(variables)
    assert unknown_variables(variables) == []


def test_images_differ_in_torch_alone() -> None:
    ignores = {path.with_name(path.name + ".dockerignore").read_text() for path in DOCKERFILES}
    assert len(ignores) == 1
    for start in ("FROM ${BASE} AS wheels", "COPY --from=wheels", "FROM ${BASE}\n"):
        cpu, cuda = (path.read_text().split(start)[1].split("FROM ")[0].splitlines() for path in DOCKERFILES)
        assert set(cpu) - set(cuda) == set()


@pytest.mark.parametrize("service", ours(), ids=lambda service: service["image"])
def test_compose_runs_the_server_as_the_chart_does(service: dict[str, Any]) -> None:
    assert service["read_only"] is True and service["user"] == "10001:10001" and service["cap_drop"] == ["ALL"]
    variables = {name: value for name, value in service["environment"].items() if value is not None}
    settings = read_settings(variables)
    assert unknown_variables(variables) == []
    assert int(service["stop_grace_period"].removesuffix("s")) >= settings.drain_seconds + 10 + 15
    assert [port for port in service["ports"] if not port.startswith("127.0.0.1:")] == [], "it has no keys"
    assert service["build"]["dockerfile"] in {f"deploy/{path.name}" for path in DOCKERFILES}


@pytest.mark.parametrize("service", ours(), ids=lambda service: service["image"])
def test_compose_without_variables_outside_keeps_the_images_model(service: dict[str, Any]) -> None:
    """A variable without a value is taken out of the container, where the package with the default model is not."""
    path = ROOT / service["build"]["dockerfile"]
    given, own = service["environment"], image_variables(path)
    assert [name for name in own if name in given and given[name] is None] == []
    assert given["CHORUS_MODEL"] == f"${{CHORUS_MODEL:-{own['CHORUS_MODEL']}}}"


def test_compose_mounts_files_that_are_there() -> None:
    for service in compose()["services"].values():
        for mount in service.get("volumes", []):
            source = mount.split(":")[0]
            assert source in compose()["volumes"] or ((DEPLOY / source).is_file() and mount.endswith(":ro")), mount


def test_no_image_is_latest() -> None:
    for service in compose()["services"].values():
        assert re.fullmatch(r"[\w./-]+:(?!latest)[\w.-]+", service["image"])


def test_optional_parts_are_behind_profiles() -> None:
    profiles = {name: service.get("profiles", []) for name, service in compose()["services"].items()}
    assert profiles == {"chorus": [], "chorus-cuda": ["gpu"], "prometheus": ["monitoring"], "grafana": ["monitoring"]}
    devices = compose()["services"]["chorus-cuda"]["deploy"]["resources"]["reservations"]["devices"]
    assert devices[0]["capabilities"] == ["gpu"]
