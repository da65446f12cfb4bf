"""The native model runner: Llama-shaped models in bfloat16 on x86 processors, the whole step in one call.

Same plan, same bits: thread count, company in the batch, chunking and cached prefixes change nothing (see README.md).
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.model import LoadedModel
from engine.native.binding import NativeEngine, Shape, find_variant, library_path
from engine.native.plan_arrays import PlanArrays
from engine.packed_weights import BLOCK_BYTES, read_packed
from engine.plan import SampledToken, StepPlan

ARCHITECTURES = frozenset({"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"})

ROPE_TYPES = frozenset({"default", "linear", "llama3", "yarn"})
"""Those whose frequencies do not change with the length of the text."""


def unsupported_reason(model: Any, dtype: torch.dtype) -> str | None:
    """Why the native step cannot run this transformers model on this machine; None when it can."""
    if find_variant() is None:
        return "no variant of the native step that this processor runs was built"
    config = model.config
    architecture = type(model).__name__
    if architecture not in ARCHITECTURES:
        return f"architecture {architecture}"
    if dtype != torch.bfloat16 or model.device.type != "cpu":
        return f"{str(dtype).removeprefix('torch.')} on {model.device.type} (bfloat16 on a CPU is needed)"
    if config.hidden_act != "silu":
        return f"activation {config.hidden_act}"
    rope_type = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    layer = model.model.layers[0]
    head_dim = layer.self_attn.head_dim
    if rope_type not in ROPE_TYPES or model.model.rotary_emb.inv_freq.numel() * 2 != head_dim:
        return f"rotary embedding {rope_type} over a part of each head or with changing frequencies"
    if layer.self_attn.o_proj.bias is not None or layer.mlp.down_proj.bias is not None:
        return "biases beside those of queries, keys and values"
    sizes = (head_dim, config.hidden_size, config.intermediate_size)
    if any(size % 32 for size in sizes) or head_dim > 256:
        return f"head, hidden and intermediate size {sizes} (multiples of 32 are needed, heads up to 256)"
    return None


def usable_cores() -> int:
    """Cores that this process may run on, less where the container's CPU quota allows less."""
    cores = len(os.sched_getaffinity(0))
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
    except (OSError, ValueError):
        return cores
    return cores if quota == "max" else max(1, min(cores, int(quota) // int(period)))


class NativeRunner:
    """A ModelRunner. It copies the weights: the torch model may be dropped afterwards.

    `last_logits`: [logit rows, vocab_size] float32 of the last step, valid until the next.
    """

    bitwise = True

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        num_pages: int,
        max_model_len: int,
        num_threads: int | None = None,
        library: tuple[str, Path] | None = None,
    ) -> None:
        """num_threads: None for the usable cores. library: (variant, file) instead of the fastest one that was built.

        Raises ValueError when the model does not fit (`unsupported_reason` says so beforehand), MemoryError.
        """
        variant, path = library or _fastest_library()
        self.name = f"native {variant}"
        self.num_pages = num_pages
        self.num_threads = num_threads or usable_cores()
        self.vocab_size = loaded.vocab_size
        self.max_model_len = max_model_len
        self.eos_token_ids = loaded.eos_token_ids
        self.model_path: str | None = str(loaded.path)
        self._num_logit_rows = 0
        self.engine = NativeEngine(path, _shape(loaded, max_model_len), num_pages, self.num_threads)
        for name, layer, parameter in _parameters(loaded.model):
            matrix = parameter.detach().to(torch.bfloat16).contiguous()
            self.engine.load(
                name, layer, matrix.data_ptr(), matrix.shape[0], matrix.shape[1] if matrix.dim() > 1 else 1
            )

        self.num_packed = self._load_packed(loaded.path)

    def _load_packed(self, folder: Path) -> int:
        """Give the step the file's own blocks as well, where there are some; how many matrices it computes from."""
        found = False
        for name, layer, packing, blocks in read_packed(folder):
            rows, row_bytes = blocks.shape
            columns = row_bytes // BLOCK_BYTES[packing] * 32
            self.engine.load_packed(name, layer, packing, blocks.ctypes.data, rows, columns)
            found = True
        return self.engine.check_packed() if found else 0

    def execute(self, plan: StepPlan) -> list[SampledToken]:
        """Raises ValueError, before anything is written, for a plan that reaches outside model, pool or batch."""
        arrays = PlanArrays(plan)
        self.engine.execute(arrays.plan)
        self._num_logit_rows = len(plan.logit_rows)
        return arrays.results()

    @property
    def last_logits(self) -> NDArray[np.float32]:
        pointer, width = self.engine.logits()
        return np.ctypeslib.as_array(pointer, (self._num_logit_rows, width))[:, : self.vocab_size]


def _fastest_library() -> tuple[str, Path]:
    variant = find_variant()
    path = library_path(variant) if variant else None
    if variant is None or path is None:
        raise ValueError("no variant of the native step that this processor runs was built")
    return variant, path


def _shape(loaded: LoadedModel, max_model_len: int) -> Shape:
    config, model = loaded.model.config, loaded.model.model
    inv_freq = model.rotary_emb.inv_freq.float().tolist()
    attention = [layer.self_attn for layer in model.layers]
    # Qwen decides layer by layer, Mistral for all of them.
    windows = [getattr(layer, "sliding_window", loaded.sliding_window) or 0 for layer in attention]
    return Shape(
        num_layers=loaded.num_layers,
        hidden=config.hidden_size,
        num_heads=loaded.num_heads,
        num_kv_heads=loaded.num_kv_heads,
        head_dim=loaded.head_dim,
        intermediate=config.intermediate_size,
        vocab=loaded.vocab_size,
        tied=_is_tied(loaded.model),
        qkv_bias=attention[0].q_proj.bias is not None,
        qk_norm=hasattr(attention[0], "q_norm"),
        max_positions=max_model_len,
        rms_eps=config.rms_norm_eps,
        rope_scale=model.rotary_emb.attention_scaling,
        inv_freq=(ctypes.c_float * len(inv_freq))(*inv_freq),
        windows=(ctypes.c_int32 * len(windows))(*windows),
    )


def _is_tied(model: Any) -> bool:
    return bool(model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr())


def _parameters(model: Any) -> Iterator[tuple[str, int, Tensor]]:
    """(module name, layer, weight or bias) of everything that the step needs; a bias has one dimension."""
    yield "embed_tokens", 0, model.model.embed_tokens.weight
    yield "norm", 0, model.model.norm.weight
    if not _is_tied(model):
        yield "lm_head", 0, model.lm_head.weight
    for index, layer in enumerate(model.model.layers):
        yield "input_layernorm", index, layer.input_layernorm.weight
        yield "post_attention_layernorm", index, layer.post_attention_layernorm.weight
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            module = getattr(layer.self_attn, name)
            yield name, index, module.weight
            if module.bias is not None:
                yield name, index, module.bias
        for name in ("q_norm", "k_norm"):
            if hasattr(layer.self_attn, name):
                yield name, index, getattr(layer.self_attn, name).weight
        for name in ("gate_proj", "up_proj", "down_proj"):
            yield name, index, getattr(layer.mlp, name).weight
