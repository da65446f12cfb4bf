"""A server that is started with what the chart renders: its probes, the helm test's own script, and its end."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.helm.chart import CHART, ROOT, environment, only, rendered, server
from tests.helm.test_monitoring import QUERIES, SELECTOR

VALUES = ('engine.type="fake"', 'server.host="127.0.0.1"', 'apiKeys.existingSecret="keys"')
KEY = "a-key-of-the-test"


def status(url: str) -> int:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code
    except urllib.error.URLError:
        return 0


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


class Address(NamedTuple):
    main: str
    metrics: str


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Address]:
    """A server as the pod's, on a free port and with its writable places elsewhere; ended as Kubernetes does."""
    port, metrics_port = free_port(), free_port()
    scratch = tmp_path_factory.mktemp("scratch")
    variables = environment(rendered("default", *VALUES, f"server.port={port}", f"monitoring.port={metrics_port}"))
    mounts = {"/var/cache/chorus": "cache", "/etc/chorus/api-keys": "api-keys"}
    for mount, folder in mounts.items():
        (scratch / folder).mkdir()
        variables = {name: value.replace(mount, str(scratch / folder)) for name, value in variables.items()}
    (scratch / "api-keys/keys").write_text(f"{KEY} test\n")
    command = [sys.executable, "-m", "service", *server(rendered("default")).get("args", [])]
    log = scratch / "log"
    with log.open("w") as stderr:
        process = subprocess.Popen(command, cwd=ROOT, env={"PATH": os.environ["PATH"]} | variables, stderr=stderr)
    address = Address(f"http://127.0.0.1:{port}", f"http://127.0.0.1:{metrics_port}")
    deadline = time.monotonic() + 60
    try:
        while status(address.main + "/health/ready") != 200:
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
        yield address
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0, log.read_text()
    finally:
        process.kill()
        process.wait()


def test_probes_are_answered_without_a_key(address: Address) -> None:
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        path = server(rendered())[probe]["httpGet"]["path"]
        assert status(address.main + path) == 200, path


def test_monitors_find_the_metrics_that_are_scaled_by(address: Address) -> None:
    (endpoint,) = only(rendered("everything"), "ServiceMonitor")["spec"]["endpoints"]
    assert endpoint["port"] == "metrics" and "authorization" not in endpoint
    with urllib.request.urlopen(address.metrics + endpoint["path"]) as answer:
        names = set(re.findall(r"^(chorus_\w+)", answer.read().decode(), re.MULTILINE))
    assert {"chorus_sequences_running", "chorus_sequences_waiting"} <= names
    assert status(address.main + endpoint["path"]) in (401, 404)


def test_the_running_server_has_every_metric_that_is_asked_for(address: Address) -> None:
    with urllib.request.urlopen(address.metrics + "/metrics") as answer:
        there = set(re.findall(r"^(\w+)", answer.read().decode(), re.MULTILINE))
    asked = {name for _, query in QUERIES for name, _ in SELECTOR.findall(query)}
    assert len(asked) > 20 and asked <= there, sorted(asked - there)


def test_helm_test_asks_for_two_choices(address: Address) -> None:
    (container,) = only(rendered(), "Pod")["spec"]["containers"]
    _, *command, target = container["command"]
    assert target == "http://chorus:80"
    assert command[-1].strip() == (CHART / "files/n2.py").read_text().strip()
    for key, expected in ((KEY, 0), ("another", 1)):
        run = [sys.executable, *command, address.main]
        done = subprocess.run(run, env=os.environ | {"API_KEY": key}, capture_output=True, text=True)
        assert done.returncode == expected, done.stderr
        assert ("two choices" in done.stdout) == (expected == 0)


def test_helm_test_fails_where_there_is_no_server() -> None:
    script = (CHART / "files/n2.py").read_text()
    done = subprocess.run([sys.executable, "-c", script, "http://127.0.0.1:1"], capture_output=True)
    assert done.returncode != 0


def test_model_of_the_default_values_is_the_images_own() -> None:
    """CHORUS_MODEL is left to the image, whose default model lies where no volume hides it."""
    dockerfile = (ROOT / "deploy/Dockerfile.cpu").read_text()
    model = re.search(r"CHORUS_MODEL=(\S+)", dockerfile)
    assert model is not None and "CHORUS_MODEL" not in environment(rendered())
    mounts = [mount["mountPath"] for mount in server(rendered())["volumeMounts"]]
    assert not [mount for mount in mounts if model[1].startswith(mount + "/")]


def test_filled_volume_serves_without_the_hub(tmp_path: Path) -> None:
    """The init container's own command finds what an earlier one left, and so would the server, which asks alike."""
    (download,) = only(rendered("download"), "Deployment")["spec"]["template"]["spec"]["initContainers"]
    _, *command = download["command"]
    model = tmp_path / f"models--{command[-2].replace('/', '--')}"
    snapshot = model / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (model / "refs").mkdir()
    (model / "refs/main").write_text(snapshot.name)
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (snapshot / name).write_text("{}")
    variables = {"PATH": os.environ["PATH"], "HF_HUB_CACHE": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    run = subprocess.run([sys.executable, *command], cwd=ROOT, env=variables, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == str(snapshot)
