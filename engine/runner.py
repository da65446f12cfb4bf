"""The torch model runner: any supported architecture, any device. Also decides which runner serves a model."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor

from engine.attention import ATTENTION_NAME, TreeAttention
from engine.config import EngineConfig, ModelLoadError
from engine.memory import available_memory
from engine.model import LoadedModel, load_model, memory_errors, resolve_model
from engine.native.runner import NativeRunner, unsupported_reason
from engine.plan import PAGE_SIZE, ModelRunner, SampledToken, StepPlan
from engine.sampler import sample

logger = logging.getLogger("chorus.engine")


def load_runner(config: EngineConfig) -> ModelRunner:
    """Fetch and load the configured model, and make the fastest runner that fits it. Raises ModelLoadError."""
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    path = resolve_model(config)
    loaded = load_model(path, config.dtype, config.device, config.trust_remote_code, ATTENTION_NAME)
    runner = _choose_runner(loaded, config)
    logger.info("model %s loaded: %s, %d KV pages", path, runner.name, runner.num_pages)
    return runner


def _choose_runner(loaded: LoadedModel, config: EngineConfig) -> ModelRunner:
    """The native step where it fits, else torch; which one, and why, is said in the log."""
    if config.runner != "torch":
        reason = unsupported_reason(loaded.model, loaded.dtype)
        if reason is None:
            limit = max_model_len(loaded, config)
            num_pages = num_kv_pages(loaded, config, limit)
            return NativeRunner(loaded, num_pages=num_pages, max_model_len=limit, num_threads=config.num_threads)
        if config.runner == "native":
            raise ModelLoadError(f"the native runner cannot serve this model: {reason}")
        logger.info("the general path serves this model, more slowly than the native one would: %s", reason)
    return TorchRunner(loaded, config)


class TorchRunner:
    """Runs plans through transformers' model code with tree attention."""

    bitwise = False

    def __init__(self, loaded: LoadedModel, config: EngineConfig) -> None:
        self.name = f"torch {loaded.device.type} {str(loaded.dtype).removeprefix('torch.')}"
        self.vocab_size = loaded.vocab_size
        self.eos_token_ids = loaded.eos_token_ids
        self.model_path: str | None = str(loaded.path)
        self.max_model_len = max_model_len(loaded, config)
        self.num_pages = num_kv_pages(loaded, config, self.max_model_len)
        self.last_logits: Tensor | None = None
        self._model: Any = loaded.model
        self._device = loaded.device
        self._attention = TreeAttention(
            num_layers=loaded.num_layers,
            num_pages=self.num_pages,
            num_kv_heads=loaded.num_kv_heads,
            head_dim=loaded.head_dim,
            dtype=loaded.dtype,
            device=loaded.device,
        )

    def execute(self, plan: StepPlan) -> list[SampledToken]:
        """Raises MemoryError when the device's memory does not suffice."""
        with memory_errors():
            return self._execute(plan)

    @torch.inference_mode()
    def _execute(self, plan: StepPlan) -> list[SampledToken]:
        self._attention.plan(plan)
        output = self._model(
            input_ids=torch.tensor([plan.token_ids], device=self._device),
            position_ids=torch.tensor([plan.positions], device=self._device),
            use_cache=False,
            logits_to_keep=torch.tensor(plan.logit_rows, dtype=torch.long, device=self._device),
            tree_attention=self._attention,
        )
        self.last_logits = output.logits[0].float()
        return sample(self.last_logits, plan.sampling_rows)


def max_model_len(loaded: LoadedModel, config: EngineConfig) -> int:
    """The configured limit, else the model's own. Raises ModelLoadError where the model cannot reach it."""
    limit = loaded.max_position_embeddings
    if config.max_model_len is not None and config.max_model_len > limit:
        raise ModelLoadError(f"max_model_len {config.max_model_len} exceeds the model's {limit} positions")
    return config.max_model_len or limit


def kv_bytes_per_page(loaded: LoadedModel) -> int:
    return 2 * loaded.num_layers * loaded.num_kv_heads * loaded.head_dim * PAGE_SIZE * loaded.dtype.itemsize


def num_kv_pages(loaded: LoadedModel, config: EngineConfig, context: int) -> int:
    """Pages for the configured bytes, else for a quarter of the free memory, at most what max_num_seqs full contexts
    fill.
    """
    per_page = kv_bytes_per_page(loaded)
    if config.kv_cache_bytes is not None:
        num_pages = config.kv_cache_bytes // per_page
        if num_pages < 1:
            raise ModelLoadError(f"kv_cache_bytes {config.kv_cache_bytes} is less than one page of {per_page} bytes")
        return num_pages
    if loaded.device.type == "cuda":
        budget = torch.cuda.mem_get_info(loaded.device)[0] * 8 // 10
    else:
        budget = available_memory() // 4
    most = -(-context // PAGE_SIZE) * config.max_num_seqs
    return max(1, min(budget // per_page, most))
