"""The engines that keep the contract; each test of this folder runs on all of them, on both event loops."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest

from engine.api import Engine
from engine.config import EngineConfig
from engine.fake import FakeEngine
from tests.contract.faults import failing_rule
from tests.contract.harness import EngineCase
from tests.contract.runners import SeededEngine
from tests.contract.stub_vllm import StubVllmEngine, install
from tests.contract.torch_engine import TinyTorchEngine
from tests.contract.upstream_engine import UpstreamOverChorus


def break_runner(engine: SeededEngine | TinyTorchEngine) -> None:
    engine.runner.is_broken = True
    if engine.embedder is not None:
        engine.embedder.is_broken = True


def make_vllm(config: EngineConfig) -> Engine:
    from tests.contract.vllm_engine import TinyVllmEngine

    return TinyVllmEngine(config)


def break_core(engine: Any) -> None:
    engine.core.is_broken = True


CASES = [
    EngineCase(
        "fake",
        lambda config: FakeEngine(config, rule=failing_rule),
        lambda engine: engine.fail("killed by a test"),
        has_failing_seed=True,
    ),
    EngineCase("thread", SeededEngine, break_runner, has_failing_seed=True),
    EngineCase("torch", TinyTorchEngine, break_runner),
    EngineCase("vllm-stub", StubVllmEngine, break_core, num_spare=1),
    EngineCase("vllm", make_vllm, break_core, needs="vllm", num_spare=1, start_seconds=90.0),
    EngineCase("upstream", UpstreamOverChorus, None, has_failing_seed=True, has_steps=False),
]


@pytest.fixture(params=CASES, ids=lambda case: case.name)
def case(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> EngineCase:
    engine_case = request.param
    assert isinstance(engine_case, EngineCase)
    if engine_case.needs is not None and find_spec(engine_case.needs) is None:
        pytest.skip(f"{engine_case.needs} is not installed here: see .ci/{engine_case.needs}")
    if engine_case.name == "vllm-stub":
        install(monkeypatch)
    return engine_case
