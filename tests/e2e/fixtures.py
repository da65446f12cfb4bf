"""Servers that tests share, for conftests to import. Each is started once in a session, when it is first used."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.models import PAGE_BYTES, save_tiny_model
from tests.e2e.server import Launcher, Server, Servers, Spec, spec
from tests.minilm import minilm_folder

MODEL = "org/model"
ENDLESS = 1_000_000
"""Tokens that the fake engine does not make within a test; tiny models end at TINY_ENDLESS."""

TINY_ENDLESS = 30_000
SLOTS = 4
PLACES = 68

SMALL_STEPS = {
    "CHORUS_MAX_NUM_SEQS": SLOTS,
    "CHORUS_MAX_QUEUED_SEQS": PLACES - SLOTS,
    "CHORUS_MAX_NUM_BATCHED_TOKENS": 16,
}
FAKE = {
    "CHORUS_ENGINE": "fake",
    "CHORUS_SERVED_MODEL_NAME": MODEL,
    "CHORUS_MAX_MODEL_LEN": 2**20,
    "CHORUS_PING_SECONDS": "0.2",
    **SMALL_STEPS,
}
EMBEDDER = "all-MiniLM-L6-v2"
TINY = {"CHORUS_SERVED_MODEL_NAME": MODEL, "CHORUS_DTYPE": "float32", "CHORUS_NUM_THREADS": 1}

WAYS: list[tuple[Launcher, str]] = [
    ("service", "asyncio"),
    ("service", "trio"),
    ("hypercorn", "asyncio"),
    ("hypercorn", "trio"),
]
WORKERS = ["asyncio", "trio"]


def fake_spec(launcher: Launcher = "service", worker: str = "asyncio", **more: object) -> Spec:
    return spec(launcher, worker, {**FAKE, **more})


@pytest.fixture(scope="session")
def servers(request: pytest.FixtureRequest) -> Servers:
    """One set for all test folders, whichever conftest this was imported into."""
    stash = request.config.stash
    if _SERVERS not in stash:
        stash[_SERVERS] = Servers()
        request.config.add_cleanup(stash[_SERVERS].close)
    return stash[_SERVERS]


@pytest.fixture(scope="session")
def tiny_folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    stash = request.config.stash
    if _FOLDER not in stash:
        stash[_FOLDER] = tmp_path_factory.mktemp("tiny")
        save_tiny_model(stash[_FOLDER])
    return stash[_FOLDER]


_SERVERS = pytest.StashKey[Servers]()
_FOLDER = pytest.StashKey[Path]()


@pytest.fixture(params=WAYS, ids="-".join)
def fake(request: pytest.FixtureRequest, servers: Servers) -> Server:
    """The fake engine behind every launcher and worker: SLOTS run, PLACES are admitted, 16 tokens a step."""
    return servers.get(fake_spec(*request.param))


@pytest.fixture
def one_fake(servers: Servers) -> Server:
    """For what no launcher or worker has a part in."""
    return servers.get(fake_spec())


@pytest.fixture(params=WORKERS)
def scripted(request: pytest.FixtureRequest, servers: Servers) -> Server:
    """The fake engine that writes scripts: see faulty_app."""
    return servers.get(fake_spec("faulty-service", request.param))


@pytest.fixture(params=WORKERS)
def tiny(request: pytest.FixtureRequest, servers: Servers, tiny_folder: Path) -> Server:
    """A random model in float32: what is computed must be equal, token for token."""
    return servers.get(_tiny_spec(request.param, tiny_folder))


@pytest.fixture
def one_tiny(servers: Servers, tiny_folder: Path) -> Server:
    """For what is the engine's part alone."""
    return servers.get(_tiny_spec("asyncio", tiny_folder))


def _tiny_spec(worker: str, folder: Path) -> Spec:
    """With an embedding model beside it."""
    models = {"CHORUS_MODEL": folder, "CHORUS_EMBEDDING_MODEL": minilm_folder()}
    names = {"CHORUS_SERVED_EMBEDDING_MODEL_NAME": EMBEDDER}
    return spec("service", worker, {**TINY, **SMALL_STEPS, **models, **names, "CHORUS_MAX_NUM_BATCHED_TOKENS": 64})


@pytest.fixture(
    params=[("fake", *way) for way in WAYS] + [("tiny", "service", worker) for worker in WORKERS], ids="-".join
)
def either(request: pytest.FixtureRequest, servers: Servers, tiny_folder: Path) -> Iterator[Server]:
    """`fake` and `tiny`; a test must leave it idle."""
    engine, launcher, worker = request.param
    wanted = fake_spec(launcher, worker) if engine == "fake" else _tiny_spec(worker, tiny_folder)
    server = servers.get(wanted)
    yield server
    server.wait_idle()


@pytest.fixture
def cramped(servers: Servers, tiny_folder: Path) -> Server:
    """The same model in little memory: 16 tokens a step, SLOTS at once, and pages for 256 tokens."""
    cramped_settings = {**TINY, **SMALL_STEPS, "CHORUS_MODEL": tiny_folder, "CHORUS_KV_CACHE_BYTES": 8 * PAGE_BYTES}
    return servers.get(spec("service", "asyncio", cramped_settings))


@pytest.fixture(params=[("service", "asyncio"), ("hypercorn", "trio")], ids="-".join)
def default_model(request: pytest.FixtureRequest, servers: Servers) -> Server:
    """SmolLM2-135M-Instruct as everybody gets it."""
    return servers.get(spec(*request.param, {}))
