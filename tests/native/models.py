"""Tiny random models of every family that the native step runs, as a bfloat16 model to load and a float32 oracle.

Their weights are whole bfloat16 numbers, so that one and the same torch model serves as both.
"""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from engine.model import LoadedModel
from engine.native.runner import NativeRunner

VOCAB = 331  # no multiple of 32

_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 96,
    "intermediate_size": 224,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "max_position_embeddings": 2048,
    "initializer_range": 0.12,
    "tie_word_embeddings": False,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}

FAMILIES: dict[str, tuple[type[PreTrainedModel], Any]] = {
    "llama": (LlamaForCausalLM, LlamaConfig(**_SHAPE | {"tie_word_embeddings": True})),
    "llama-rope3-heads128": (
        LlamaForCausalLM,
        LlamaConfig(**_SHAPE | {"head_dim": 128, "num_key_value_heads": 3}, rope_parameters=_LLAMA3_ROPE),
    ),
    "mistral-window": (MistralForCausalLM, MistralConfig(**_SHAPE, sliding_window=300)),
    "qwen2": (
        Qwen2ForCausalLM,
        Qwen2Config(**_SHAPE | {"num_attention_heads": 28, "num_key_value_heads": 1}, attention_bias=True),
    ),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config(**_SHAPE | {"num_attention_heads": 4, "num_key_value_heads": 2})),
    "qwen3-heads128": (Qwen3ForCausalLM, Qwen3Config(**_SHAPE | {"head_dim": 128, "tie_word_embeddings": True})),
}


@cache
def tiny(family: str) -> LoadedModel:
    cls, config = FAMILIES[family]
    torch.manual_seed(7)
    model = cls(config).eval().requires_grad_(False)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):  # start at zero, which would hide one that is left out
            parameter.normal_(std=0.3)
        elif "norm" in name:  # start at one, likewise
            parameter.normal_(mean=1.0, std=0.2)
        parameter.copy_(parameter.bfloat16().float())
    return LoadedModel(
        model=model,
        path=Path(family),
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
        num_layers=config.num_hidden_layers,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        vocab_size=VOCAB,
        max_position_embeddings=config.max_position_embeddings,
        sliding_window=config.sliding_window if isinstance(config, MistralConfig) else None,
        eos_token_ids=frozenset({2}),
    )


def runner_of(
    family: str, *, num_pages: int = 160, num_threads: int = 2, library: tuple[str, Path] | None = None
) -> NativeRunner:
    return runner_for(tiny(family), num_pages=num_pages, num_threads=num_threads, library=library)


def runner_for(
    loaded: LoadedModel, *, num_pages: int = 160, num_threads: int = 2, library: tuple[str, Path] | None = None
) -> NativeRunner:
    """library: None for the one named by CHORUS_TEST_NATIVE_LIBRARY (tests/native/sanitize), else the installed one."""
    if library is None and (named := os.environ.get("CHORUS_TEST_NATIVE_LIBRARY")):
        library = ("under test", Path(named))
    return NativeRunner(loaded, num_pages=num_pages, max_model_len=2048, num_threads=num_threads, library=library)


def tokens(length: int, seed: int = 0) -> list[int]:
    ids: list[int] = np.random.default_rng(seed).integers(3, VOCAB, length).tolist()
    return ids


def oracle_logits(family: str, token_ids: list[int]) -> NDArray[np.float32]:
    """transformers' own forward in float32: [tokens, VOCAB]."""
    with torch.inference_mode():
        logits: NDArray[np.float32] = tiny(family).model(torch.tensor([token_ids])).logits[0].numpy()
    return logits


def error(got: NDArray[np.float32], want: NDArray[np.float32]) -> float:
    """Root mean square of the difference, relative to the spread of the wanted logits."""
    return float(np.sqrt(np.mean(np.square(got - want))) / np.std(want))


def poison(runner: NativeRunner) -> None:
    """Fill the whole KV pool with NaN, as if every page held the remains of somebody's overflow."""
    pointer, size = runner.engine.pool()
    np.ctypeslib.as_array(pointer, (size,))[:] = 0x7FC0
