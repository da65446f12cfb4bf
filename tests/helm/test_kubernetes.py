"""Each set of values renders to objects that the API servers of all supported versions would take."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import kubernetes_validate
import pytest

from tests.helm.chart import CHART, VALUE_SETS, Object, helm, rendered

VERSIONS = ("1.30", "1.32", "1.34", "1.37")
OLDEST_WITH_IMAGE_VOLUMES = "1.31"
CRDS = {
    "HTTPRoute": "gateway-api/gateway.networking.k8s.io/v1",
    "PodMonitor": "prometheus-operator/monitoring.coreos.com/v1",
    "PrometheusRule": "prometheus-operator/monitoring.coreos.com/v1",
    "ScaledObject": "keda/keda.sh/v1alpha1",
    "ServiceMonitor": "prometheus-operator/monitoring.coreos.com/v1",
}
"""kind -> the folder of its published schema and types, in the npm scope @kubernetes-models."""

NODE = Path(os.environ["HELM_TOOLS"]) / "node"


@pytest.mark.parametrize("value_set", VALUE_SETS)
def test_chart_lints(value_set: str) -> None:
    helm("lint", "--strict", "--quiet", str(CHART), "-f", str(VALUE_SETS[value_set]))


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("value_set", VALUE_SETS)
def test_objects_are_valid_and_have_no_unknown_key(value_set: str, version: str) -> None:
    if value_set == "image-volume" and version < OLDEST_WITH_IMAGE_VOLUMES:
        pytest.skip("has no image volumes")
    for item in rendered(value_set):
        if item["kind"] not in CRDS:
            kubernetes_validate.validate(item, version, strict=True)


def test_validator_finds_unknown_keys() -> None:
    service = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "a"}, "spec": {"prots": []}}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(service, VERSIONS[-1], strict=True)


@pytest.mark.parametrize("value_set", VALUE_SETS)
def test_no_object_is_rendered_twice(value_set: str) -> None:
    names = [(item["kind"], item["metadata"]["name"]) for item in rendered(value_set)]
    assert len(names) == len(set(names))


def custom_objects() -> list[Object]:
    found = [item for value_set in VALUE_SETS for item in rendered(value_set) if item["kind"] in CRDS]
    assert {item["kind"] for item in found} == set(CRDS), "no value set has this kind"
    return found


def test_custom_objects_satisfy_their_published_schemas(tmp_path: Path) -> None:
    lines = ["const failures = [];"]
    for kind, folder in CRDS.items():
        lines.append(f"import {{ {kind} }} from 'file://{NODE}/node_modules/@kubernetes-models/{folder}/index.js';")
    for item in custom_objects():
        name = f"{item['kind']} {item['metadata']['name']}"
        lines.append(f"try {{ new {item['kind']}({json.dumps(item)}).validate(); }}")
        lines.append(f"catch (error) {{ failures.push({json.dumps(name)} + ': ' + error.message); }}")
    lines.append("if (failures.length) { console.error(failures.join('\\n')); process.exit(1); }")
    script = tmp_path / "validate.mjs"
    script.write_text("\n".join(lines))
    done = subprocess.run(["node", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def compile_typed(objects: list[Object], folder: Path) -> str:
    """What the TypeScript compiler says of the objects as literals of their types: unknown keys are errors."""
    (folder / "node_modules").symlink_to(NODE / "node_modules")
    lines = []
    for kind, package in CRDS.items():
        lines.append(f'import type {{ I{kind} }} from "@kubernetes-models/{package}";')
    for index, item in enumerate(objects):
        lines.append(f"export const object{index}: I{item['kind']} = {json.dumps(item)};")
    (folder / "objects.ts").write_text("\n".join(lines))
    options = ["--noEmit", "--strict", "--skipLibCheck", "--moduleResolution", "bundler"]
    options += ["--module", "esnext", "--target", "es2022"]
    compiler = NODE / "node_modules/typescript/bin/tsc"
    done = subprocess.run(["node", compiler, *options, "objects.ts"], cwd=folder, capture_output=True, text=True)
    return done.stdout + done.stderr


def test_custom_objects_have_no_unknown_key(tmp_path: Path) -> None:
    misspelt = json.loads(json.dumps(next(item for item in custom_objects() if item["kind"] == "ScaledObject")))
    misspelt["spec"]["scaleTargetRef"]["nmae"] = "chorus"
    complaints = compile_typed([*custom_objects(), misspelt], tmp_path).strip().splitlines()
    assert len(complaints) == 1 and "nmae" in complaints[0], complaints


def test_rendering_does_not_depend_on_what_the_cluster_offers() -> None:
    for path in (CHART / "templates").rglob("*"):
        assert not path.is_file() or not re.search(r"\.Capabilities|\blookup\b", path.read_text()), path
