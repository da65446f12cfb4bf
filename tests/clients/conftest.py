"""The clients that people have, each against the default model behind a real socket.

A client that is not installed is a skip with its reason; CHORUS_TEST_CLIENTS=required, as .ci/clients sets it, makes
that of a Python client a failure.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from importlib.util import find_spec

import pytest

from tests.e2e.fixtures import one_fake, servers
from tests.e2e.server import Server, Servers, spec
from tests.minilm import minilm_folder

from . import EMBEDDER

__all__ = ["one_fake", "servers"]


@pytest.fixture
def server(servers: Servers) -> Iterator[Server]:
    """SmolLM2-135M-Instruct as everybody gets it, and an embedding model beside it. Whatever a client did, nothing may
    run afterwards.
    """
    embedding = {"CHORUS_EMBEDDING_MODEL": minilm_folder(), "CHORUS_SERVED_EMBEDDING_MODEL_NAME": EMBEDDER}
    server = servers.get(spec("service", "asyncio", embedding))
    yield server
    server.wait_idle()


@pytest.fixture
def event_loop_of_the_thread() -> Iterator[None]:
    """For clients that would make one, and leave it open, to run a coroutine of theirs."""
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    yield
    asyncio.set_event_loop(None)
    loop.close()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """`@pytest.mark.client("module")` names the Python library that a test needs."""
    for item in items:
        for mark in item.iter_markers("client"):
            (library,) = mark.args
            if find_spec(library) is None:
                if os.environ.get("CHORUS_TEST_CLIENTS") == "required":
                    raise pytest.UsageError(f"{item.nodeid} needs {library}, which is not installed")
                item.add_marker(pytest.mark.skip(f"{library} is not installed: see .ci/clients"))


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "client(module): the Python library without which the test is skipped")
    if find_spec("schemathesis") is not None:
        config.addinivalue_line("filterwarnings", "ignore::DeprecationWarning:schemathesis.*")
