"""The vLLM engine over an LLMEngine that needs no vllm, so that the adapter is tested wherever the tests run.

What it may be relied on for is what tests/contract/test_vllm.py and `.ci/vllm` see of the real one: the same suite.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from engine.api import Capability, EngineInfo
from engine.config import EngineConfig, VllmOptions
from engine.core import StepCore
from engine.sequence import Update
from engine.vllm import VllmEngine
from engine.vllm_core import VllmCore

VOCAB_SIZE = 320
EOS = 2
STEP_SECONDS = 0.001


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules with the few names that the adapter uses, unless there is the real package."""
    if find_spec("vllm") is not None:
        return
    names: dict[str, dict[str, object]] = {
        "vllm": {},
        "vllm.exceptions": {"VLLMClientError": type("VLLMClientError", (Exception,), {})},
        "vllm.inputs": {},
        "vllm.inputs.engine": {"tokens_input": lambda ids, cache_salt=None: {"prompt_token_ids": ids}},
        "vllm.sampling_params": {
            "RequestOutputKind": SimpleNamespace(DELTA=1),
            "SamplingParams": SimpleNamespace,
            "StructuredOutputsParams": SimpleNamespace,
        },
    }
    for name, members in names.items():
        module = ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)


@dataclass(eq=False)
class _Request:
    name: str
    prompt: list[int]
    params: Any
    order: tuple[int, int]
    made: list[int] = field(default_factory=list)


class StubLLM:
    """Each step draws a token for each of the first max_num_seqs requests, by priority and arrival."""

    logger_manager: Any = None

    def __init__(self, max_num_seqs: int) -> None:
        self._max_num_seqs = max_num_seqs
        self._requests: dict[str, _Request] = {}
        self._num_added = 0
        self.vllm_config = SimpleNamespace(cache_config=SimpleNamespace(num_gpu_blocks=101))
        core = SimpleNamespace(scheduler=SimpleNamespace(kv_cache_manager=self))
        self.engine_core = SimpleNamespace(engine_core=core, shutdown=self._requests.clear)

    @property
    def usage(self) -> float:
        return min(1.0, len(self._requests) / 100)

    def add_request(self, name: str, inputs: Any, params: Any, priority: int = 0) -> str:
        self._num_added += 1
        order = (priority, self._num_added)
        self._requests[name] = _Request(name, inputs["prompt_token_ids"], params, order)
        return f"{name}-{self._num_added:08x}"

    def abort_request(self, names: list[str]) -> None:
        for name in names:
            self._requests.pop(name, None)

    def step(self) -> list[Any]:
        time.sleep(STEP_SECONDS)
        running = sorted(self._requests.values(), key=lambda request: (not request.made, request.order))
        running = running[: self._max_num_seqs]
        begun = [len(request.prompt) for request in running if not request.made]
        outputs = [self._output(request) for request in running]
        cache = SimpleNamespace(queries=sum(begun), hits=0)
        self.logger_manager.record(
            SimpleNamespace(num_running_reqs=len(running), kv_cache_usage=self.usage, prefix_cache_stats=cache),
            SimpleNamespace(num_preempted_reqs=0, prompt_token_stats=SimpleNamespace(computed=sum(begun))),
        )
        return outputs

    def _output(self, request: _Request) -> Any:
        params, is_first = request.params, not request.made
        token = self._draw(request)
        request.made.append(token)
        is_stop = token in params.stop_token_ids and len(request.made) > params.min_tokens
        finish = "stop" if is_stop else "length" if len(request.made) == params.max_tokens else None
        if finish is not None:
            del self._requests[request.name]
        completion = SimpleNamespace(
            token_ids=[token],
            logprobs=[_entry(token, params.logprobs)] if params.logprobs is not None else None,
            finish_reason=finish,
            stop_reason=token if is_stop else None,
        )
        scored = is_first and params.prompt_logprobs is not None
        return SimpleNamespace(
            request_id=request.name,
            outputs=[completion],
            metrics=SimpleNamespace(scheduled_ts=time.monotonic()),
            num_cached_tokens=0,
            prompt_logprobs=[_entry(each, params.prompt_logprobs) for each in request.prompt] if scored else None,
            kv_transfer_params=(params.extra_args or {}).get("kv_transfer_params") if finish else None,
        )

    def _draw(self, request: _Request) -> int:
        params = request.params
        value = params.seed if params.temperature > 0 else 0
        for token in (*request.prompt, *request.made):
            value = (value * 31 + token + 1) % 1_000_003
        token = next((each for each, bias in (params.logit_bias or {}).items() if bias >= 100), 3 + value % 300)
        while len(request.made) < params.min_tokens and token in params.stop_token_ids:
            token = 3 + (token + 1) % 300
        return int(token)


def _entry(token: int, num_best: int) -> dict[int, Any]:
    """The token, and the best, of which it is the second."""
    others = range(1, num_best - 1)
    best = {(token + k) % VOCAB_SIZE: SimpleNamespace(logprob=-1.0 - k, rank=k + 2) for k in others}
    first = {(token + 200) % VOCAB_SIZE: SimpleNamespace(logprob=-0.5, rank=1)} if num_best else {}
    return {token: SimpleNamespace(logprob=-1.0, rank=2)} | first | best


class BreakableCore(VllmCore):
    """is_broken: its next step raises."""

    is_broken = False

    def step(self) -> list[Update] | None:
        if self.is_broken:
            raise RuntimeError("killed by a test")
        return super().step()


class StubVllmEngine(VllmEngine):
    """A VllmEngine that a test can break."""

    core: BreakableCore

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config, VllmOptions())

    def _start(self) -> tuple[StepCore, EngineInfo]:
        self.core = BreakableCore(
            StubLLM(self._config.max_num_seqs),
            eos_token_ids=frozenset({EOS}),
            special_token=lambda _: None,
            stream_credit=self._config.stream_credit,
        )
        more = {Capability.RELEASE_CONFIRMED, Capability.KV_TRANSFER}
        info = replace(
            self._info,
            backend="vllm stub",
            capabilities=self._info.capabilities | more,
            max_model_len=self._config.max_model_len or 4096,
            vocab_size=VOCAB_SIZE,
            eos_token_ids=frozenset({EOS}),
        )
        return self.core, info
