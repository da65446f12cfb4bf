"""openai-node and the Vercel AI SDK: their tests are in node/, with what they install pinned by its lock file."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.e2e.server import Server

pytestmark = pytest.mark.timeout(400)

SOURCE = Path(__file__).parent / "node"
OLDEST = 20
INSTALL_SECONDS = 180
TEST_SECONDS = 150


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the tests with their packages. Without node or the npm registry a skip."""
    node, npm = shutil.which("node"), shutil.which("npm")
    if node is None or npm is None:
        pytest.skip("node and npm are not installed")
    version = subprocess.run([node, "--version"], capture_output=True, text=True, check=True, timeout=60).stdout.strip()
    if int(version.removeprefix("v").partition(".")[0]) < OLDEST:
        pytest.skip(f"node is {version}; the clients need {OLDEST}")
    folder = tmp_path_factory.mktemp("node")
    shutil.copytree(SOURCE, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("node_modules"))
    installed = subprocess.run(
        [npm, "ci", "--ignore-scripts", "--no-audit", "--no-fund", "--loglevel=error"],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=INSTALL_SECONDS,
    )
    if installed.returncode != 0:
        if "EUSAGE" in installed.stderr or "EINTEGRITY" in installed.stderr:
            raise AssertionError(installed.stderr)
        pytest.skip(f"npm ci cannot install the clients: {installed.stderr.strip()[:300]}")
    return folder


@pytest.mark.parametrize("client", ["openai", "openai-responses", "ai-sdk", "ai-sdk-responses"])
def test_client_of_node(folder: Path, server: Server, client: str) -> None:
    done = subprocess.run(
        ["node", "--test", "--test-reporter=spec", f"{client}.test.js"],
        cwd=folder,
        env={**os.environ, "CHORUS_URL": server.url},
        capture_output=True,
        text=True,
        check=False,
        timeout=TEST_SECONDS,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "ℹ skipped 0" in done.stdout and "ℹ pass 0" not in done.stdout, done.stdout
