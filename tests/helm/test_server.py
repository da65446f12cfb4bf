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

import pytest

from tests.helm.chart import CHART, ROOT, environment, only, rendered, server

VALUES = ('engine.type="fake"', 'server.host="127.0.0.1"')


def status(url: str) -> int:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code
    except urllib.error.URLError:
        return 0


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server as the pod's, on a free port and with its writable places elsewhere; ended as Kubernetes does."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    scratch = tmp_path_factory.mktemp("scratch")
    variables = environment(rendered("default", *VALUES, f"server.port={port}"))
    places = {name: value.replace("/var/cache/chorus", str(scratch)) for name, value in variables.items()}
    command = [sys.executable, "-m", "service", *server(rendered("default")).get("args", [])]
    log = scratch / "log"
    with log.open("w") as stderr:
        process = subprocess.Popen(command, cwd=ROOT, env={"PATH": os.environ["PATH"]} | places, stderr=stderr)
    address = f"http://127.0.0.1:{port}"
    deadline = time.monotonic() + 60
    try:
        while status(f"{address}/health/ready") != 200:
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
        yield address
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0, log.read_text()
    finally:
        process.kill()
        process.wait()


def test_probes_are_answered(url: str) -> None:
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        path = server(rendered())[probe]["httpGet"]["path"]
        assert status(url + path) == 200, path


def test_monitors_find_the_metrics_that_are_scaled_by(url: str) -> None:
    path = only(rendered("cpu"), "ServiceMonitor")["spec"]["endpoints"][0]["path"]
    with urllib.request.urlopen(url + path) as answer:
        names = set(re.findall(r"^(chorus_\w+)", answer.read().decode(), re.MULTILINE))
    assert {"chorus_sequences_running", "chorus_sequences_waiting"} <= names


def test_helm_test_asks_for_two_choices(url: str) -> None:
    (container,) = only(rendered(), "Pod")["spec"]["containers"]
    _, *command, target = container["command"]
    assert target == "http://chorus:80"
    assert command[-1].strip() == (CHART / "files/n2.py").read_text().strip()
    done = subprocess.run([sys.executable, *command, url], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "two choices" in done.stdout


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
