"""Renders the chart, and finds its way in what comes out."""

from __future__ import annotations

import functools
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
CHART = ROOT / "helm/chorus"
VALUE_SETS = {path.name.removesuffix("-values.yaml"): path for path in sorted((CHART / "ci").glob("*-values.yaml"))}

Object = dict[str, Any]


class RenderError(Exception):
    """helm refused; `str()` is what it wrote."""


def helm(*arguments: str) -> str:
    """Raises RenderError."""
    program = Path(os.environ["HELM_TOOLS"]) / "bin/helm"
    done = subprocess.run([program, *arguments], capture_output=True, text=True)
    if done.returncode != 0:
        raise RenderError(done.stderr)
    return done.stdout


def rendered_text(value_set: str = "default", *overrides: str, release: str = "chorus") -> str:
    """What helm makes of a file in helm/chorus/ci, with `--set-json` overrides."""
    options = [option for override in overrides for option in ("--set-json", override)]
    return helm("template", release, str(CHART), "-n", "llm", "-f", str(VALUE_SETS[value_set]), *options)


@functools.cache
def rendered(value_set: str = "default", *overrides: str, release: str = "chorus") -> tuple[Object, ...]:
    """Its objects. Treat them as constants."""
    text = rendered_text(value_set, *overrides, release=release)
    return tuple(document for document in yaml.safe_load_all(text) if document)


def only(objects: tuple[Object, ...], kind: str, name: str | None = None) -> Object:
    (found,) = (item for item in objects if item["kind"] == kind and name in (None, item["metadata"]["name"]))
    return found


def kinds(objects: tuple[Object, ...]) -> list[str]:
    return sorted(item["kind"] for item in objects)


def pod_specs(objects: tuple[Object, ...]) -> Iterator[tuple[str, Object]]:
    """(kind, spec) of every pod that the objects lead to."""
    for item in objects:
        if item["kind"] == "Pod":
            yield "Pod", item["spec"]
        elif item["kind"] == "Deployment":
            yield "Deployment", item["spec"]["template"]["spec"]


def own_containers(spec: Object) -> list[Object]:
    """The chart's own, init containers first; those of extraInitContainers are the user's business."""
    return [c for c in spec.get("initContainers", []) if c["name"] == "download"] + spec["containers"]


def server(objects: tuple[Object, ...]) -> Object:
    """The server's container."""
    return only(objects, "Deployment")["spec"]["template"]["spec"]["containers"][0]


def environment(objects: tuple[Object, ...]) -> dict[str, str]:
    """The server's variables that have a plain value: the ConfigMap's, then the container's own."""
    (source,) = server(objects)["envFrom"]
    settings = only(objects, "ConfigMap", source["configMapRef"]["name"])["data"]
    return settings | {item["name"]: item["value"] for item in server(objects)["env"] if "value" in item}


def default_values() -> Object:
    return yaml.safe_load((CHART / "values.yaml").read_text())


def schema() -> Object:
    return json.loads((CHART / "values.schema.json").read_text())
