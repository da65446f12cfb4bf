"""vLLM behind the engine's contract: its `LLMEngine` in this process, stepped by our own thread.

Tested with vLLM 0.32. It is imported by the engine's thread when it starts, never before. By default the whole engine
is in this process; with VLLM_ENABLE_V1_MULTIPROCESSING=1 its core is in another one, and a watchdog tells when that
one dies. What vLLM cannot do, such as letting one choice wait for its reader, is missing from the capabilities.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import select
import threading
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import anyio

from engine.api import (
    Capability,
    Constraint,
    EngineInfo,
    InvalidConstraint,
    Request,
    RequestTooLarge,
    TokenPrompt,
)
from engine.config import EngineConfig, ModelLoadError, VllmOptions
from engine.core import StepCore
from engine.grammar import load_compiler
from engine.matchers import Matcher
from engine.model_files import find_model
from engine.thread import LoadEmbedder, SteppedEngine
from engine.vllm_core import VllmCore
from engine.vllm_params import check_together, structured_outputs

logger = logging.getLogger("chorus.engine")

_CAPABILITIES = frozenset(
    {
        Capability.TOKENS_IN,
        Capability.TOKENS_OUT,
        Capability.ATOMIC_ADMISSION,
        Capability.PROMPT_LOGPROBS,
    }
)


class VllmEngine(SteppedEngine):
    """options: what only vLLM has. An embedding model is not vLLM's: our own embedder runs it, on the same thread."""

    def __init__(self, config: EngineConfig, options: VllmOptions, load_embedder: LoadEmbedder | None = None) -> None:
        super().__init__(config, _CAPABILITIES, load_embedder)
        self._options = options
        self._llm: Any = None
        self._outputs: queue.Queue[Any] | None = None  # what a step waits for, where vLLM's core is in another process

    # -- on the event loop

    def _tell(self, message: object) -> None:
        super()._tell(message)
        if self._outputs is not None:
            from vllm.v1.engine import EngineCoreOutputs

            self._outputs.put(EngineCoreOutputs())  # of nothing: the step returns, and the message is read

    async def _compile(self, batch: Sequence[Request]) -> dict[Constraint, Matcher]:
        """What our own compiler refuses is refused, and what vLLM does; vLLM then keeps the constraints."""
        for request in batch:
            self._check(request)
        await super()._compile(batch)
        choices = (params for request in batch for params in request.choices)
        enforced = {params.constraint for params in choices if params.constraint is not None}
        if enforced:
            await anyio.to_thread.run_sync(self._check_all, enforced, limiter=self._compile_limiter)
        return {}

    def _check(self, request: Request) -> None:
        """Beyond what every engine asks for."""
        for params in request.choices:
            check_together(params, self._info.eos_token_ids)
        limit = self._info.max_model_len
        if isinstance(request.prompt, TokenPrompt) and len(request.prompt.token_ids) == limit > 0:
            raise RequestTooLarge(
                f"vLLM draws at least one token, and the prompt fills the context of {limit}", "prompt"
            )

    # -- on other threads

    def _check_all(self, constraints: set[Constraint]) -> None:
        from vllm.exceptions import VLLMClientError
        from vllm.sampling_params import SamplingParams

        config, tokenizer = self._llm.vllm_config, self._llm.get_tokenizer()
        for constraint in constraints:
            try:
                wanted = structured_outputs(constraint, self._special_token)
                if wanted is not None:
                    params = SamplingParams(structured_outputs=wanted)
                    params.verify(config.model_config, None, config.structured_outputs_config, tokenizer)
            except (VLLMClientError, ValueError) as error:
                message = " ".join(str(error).split())[:300]
                raise InvalidConstraint(f"vLLM cannot keep this constraint: {message}", constraint.param) from error

    def _special_token(self, spelling: str) -> int | None:
        return None if self._compiler is None else self._compiler.special_token(spelling)

    # -- on the engine's thread

    def _start(self) -> tuple[StepCore, EngineInfo]:
        if find_spec("vllm") is None:
            raise ModelLoadError(
                "CHORUS_ENGINE=vllm needs vLLM, which is not installed here: deploy/engines.md says how"
            )
        config = self._config
        path = find_model(config.model, config.cache_dir, convert=_convert, with_code=config.trust_remote_code)
        try:
            self._llm = llm = self._load(path)
        except Exception as error:
            logger.exception("vLLM does not start")
            raise ModelLoadError(f"vLLM does not start: {_one_line(error)}") from error
        info = self._loaded_info(llm, path)
        self._compiler = load_compiler(str(path), info.vocab_size, info.eos_token_ids)
        if self._compiler is not None:
            info = replace(info, capabilities=info.capabilities | {Capability.CONSTRAINTS})
        self._outputs = _watch(llm)
        return self._make_core(llm, info), info

    def _load(self, path: Path) -> Any:
        return make_llm(path, self._config, self._options)

    def _make_core(self, llm: Any, info: EngineInfo) -> VllmCore:
        return VllmCore(
            llm,
            eos_token_ids=info.eos_token_ids,
            special_token=self._special_token,
            stream_credit=self._config.stream_credit,
        )

    def _loaded_info(self, llm: Any, path: Path) -> EngineInfo:
        from vllm import __version__
        from vllm.platforms import current_platform

        from engine.model import end_token_ids

        model = llm.vllm_config.model_config
        told = (model.try_get_generation_config().get("eos_token_id"), getattr(model.hf_config, "eos_token_id", None))
        dtype = str(model.dtype).removeprefix("torch.")
        more = {
            Capability.RELEASE_CONFIRMED: hasattr(llm.engine_core, "engine_core"),  # else it is told, and not asked
            Capability.KV_TRANSFER: llm.vllm_config.kv_transfer_config is not None,
        }
        return replace(
            self._info,
            backend=f"vllm {__version__.partition('+')[0]} {current_platform.device_type} {dtype}",
            capabilities=_CAPABILITIES.union(capability for capability, is_there in more.items() if is_there),
            max_model_len=model.max_model_len,
            max_num_seqs=llm.vllm_config.scheduler_config.max_num_seqs,
            vocab_size=model.get_vocab_size(),
            eos_token_ids=end_token_ids(told, llm.get_tokenizer()),
            model_path=str(path),
        )


def make_llm(path: Path, config: EngineConfig, options: VllmOptions) -> Any:
    """vLLM's LLMEngine, loaded."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.platforms import current_platform
    from vllm.v1.engine.llm_engine import LLMEngine

    _check_device(config.device, current_platform.device_type)
    arguments: dict[str, Any] = {
        "model": str(path),
        "dtype": config.dtype,
        "trust_remote_code": config.trust_remote_code,
        "max_model_len": config.max_model_len,
        "max_num_seqs": config.max_num_seqs,
        "max_num_batched_tokens": config.max_num_batched_tokens,
        "enable_prefix_caching": config.enable_prefix_caching,
        "kv_cache_memory_bytes": config.kv_cache_bytes,
        "scheduling_policy": "priority",
        "generation_config": "vllm",  # defaults of a model's makers are none of ours
        "structured_outputs_config": {"backend": "guidance"},
        **options.arguments(),
    }
    if current_platform.device_type == "cpu":
        # 0.32 takes back a seeded draw of a prompt that is not yet complete, and its CPU generators cannot
        arguments["enable_chunked_prefill"] = False
        arguments["max_num_batched_tokens"] = max(config.max_num_batched_tokens, _context(path, config))
    copies = options.data_parallel_size or 1
    if copies > 1 and EngineArgs(**arguments).create_model_config().is_moe:
        raise ModelLoadError("copies of a mixture of experts step together, as vLLM's own server has them")
    return LLMEngine.from_engine_args(EngineArgs(**arguments), enable_multiprocessing=copies > 1)


def _watch(llm: Any) -> queue.Queue[Any] | None:
    """Where the engine's core is in processes of its own: a step waits for outputs that a killed one never sends."""
    manager = getattr(getattr(llm.engine_core, "resources", None), "engine_manager", None)
    if manager is None:
        return None
    outputs: queue.Queue[Any] = llm.engine_core.outputs_queue
    descriptors = [os.pidfd_open(process.pid) for process in manager.processes]

    def wait_for_a_death() -> None:
        deaths = select.poll()
        for descriptor in descriptors:
            deaths.register(descriptor, select.POLLIN)
        deaths.poll()
        outputs.put(RuntimeError("a process of vLLM's engine core has ended"))
        for descriptor in descriptors:
            os.close(descriptor)

    threading.Thread(target=wait_for_a_death, name="chorus-vllm-watchdog", daemon=True).start()
    return outputs


def _check_device(wanted: str, device: str) -> None:
    if wanted not in ("auto", device):
        raise ModelLoadError(f"this build of vLLM serves on {device}, not on {wanted}; CUDA_VISIBLE_DEVICES names GPUs")


def _context(path: Path, config: EngineConfig) -> int:
    """The longest context, in tokens."""
    if config.max_model_len is not None:
        return config.max_model_len
    found = json.loads((path / "config.json").read_bytes()).get("max_position_embeddings")
    return found if isinstance(found, int) else 8192


def _convert(gguf: Path, folder: Path) -> None:
    from engine.model import convert_gguf

    convert_gguf(gguf, folder)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
