"""The torch runner under the contract suite: a tiny random Llama whose context outlasts every test."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from engine.attention import ATTENTION_NAME
from engine.config import EngineConfig
from engine.embedder import TorchEmbedder, load_embedder
from engine.model import LoadedModel
from engine.plan import SampledToken, StepPlan
from engine.runner import TorchRunner, kv_bytes_per_page
from engine.thread import EngineThread
from tests.contract.runners import BreakableEmbedder
from tests.minilm import minilm_folder

NUM_PAGES = 600


@cache
def tiny_llama() -> LoadedModel:
    config = LlamaConfig(
        vocab_size=160,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=8192,
        initializer_range=0.4,
        attn_implementation=ATTENTION_NAME,
    )
    torch.manual_seed(8)
    model = LlamaForCausalLM(config).eval().requires_grad_(False)
    return LoadedModel(
        model=model,
        path=Path("tiny"),
        dtype=torch.float32,
        device=torch.device("cpu"),
        num_layers=1,
        num_heads=2,
        num_kv_heads=1,
        head_dim=16,
        vocab_size=160,
        max_position_embeddings=8192,
        sliding_window=None,
        eos_token_ids=frozenset({2}),
    )


@cache
def minilm() -> TorchEmbedder:
    embedder = load_embedder(EngineConfig(embedding_model=str(minilm_folder()), served_embedding_model_name="minilm"))
    assert embedder is not None
    return embedder


class BreakableRunner(TorchRunner):
    """is_broken: its next step raises."""

    is_broken = False

    def execute(self, plan: StepPlan) -> list[SampledToken]:
        if self.is_broken:
            raise RuntimeError("killed by a test")
        return super().execute(plan)


class TinyTorchEngine(EngineThread):
    """An EngineThread on the tiny model, which a test can break."""

    def __init__(self, config: EngineConfig) -> None:
        loaded = tiny_llama()
        self.runner: BreakableRunner
        self.embedder: BreakableEmbedder | None = None

        def load(config: EngineConfig) -> BreakableRunner:
            torch.set_num_threads(1)  # threads cost more than they bring on a model of this size
            self.runner = BreakableRunner(loaded, config)
            return self.runner

        def load_breakable(config: EngineConfig) -> BreakableEmbedder | None:
            self.embedder = BreakableEmbedder(minilm())
            return self.embedder

        super().__init__(_with_pages(config, kv_bytes_per_page(loaded)), load, load_breakable)


def _with_pages(config: EngineConfig, page_bytes: int) -> EngineConfig:
    return config if config.kv_cache_bytes is not None else replace(config, kv_cache_bytes=NUM_PAGES * page_bytes)
