"""vLLM under the contract suite: a tiny random Llama, loaded once for each shape of engine that the tests want.

Only where vllm is importable: `.ci/vllm` makes such an environment.
"""

from __future__ import annotations

import os
import tempfile
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from engine.api import EngineInfo
from engine.config import EngineConfig, VllmOptions
from engine.sequence import Update
from engine.vllm import VllmEngine, make_llm
from engine.vllm_core import VllmCore
from service.settings import write_library_variables

os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
write_library_variables()

VOCAB_SIZE = 320


@cache
def tiny_folder() -> Path:
    """As tests.contract.torch_engine's model, in a folder of its own; tokens are bytes, from the fourth on."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder = Path(tempfile.mkdtemp(prefix="chorus-tiny-"))
    torch.manual_seed(8)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=8192,
        initializer_range=0.4,
        bos_token_id=1,
        eos_token_id=2,
    )
    LlamaForCausalLM(config).eval().save_pretrained(folder)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2} | {letter: 3 + k for k, letter in enumerate(letters)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>")
    wrapped.save_pretrained(folder)
    return folder


@cache
def loaded(config: EngineConfig) -> Any:
    return make_llm(tiny_folder(), config, VllmOptions(enforce_eager=True))


class BreakableCore(VllmCore):
    """is_broken: its next step raises. It is closed without what it stepped, which the next test uses."""

    is_broken = False

    def step(self) -> list[Update] | None:
        if self.is_broken:
            raise RuntimeError("killed by a test")
        return super().step()

    def close(self) -> None:
        self.abort_all()


class TinyVllmEngine(VllmEngine):
    """A VllmEngine on the tiny model, which a test can break."""

    core: BreakableCore

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(replace(config, model=str(tiny_folder()), dtype="float32"), VllmOptions())

    def _load(self, path: Path) -> Any:
        shape = EngineConfig(
            max_model_len=self._config.max_model_len,
            max_num_seqs=self._config.max_num_seqs,
            dtype="float32",
            kv_cache_bytes=64 << 20,
        )
        llm = loaded(shape)
        llm.reset_prefix_cache()
        return llm

    def _make_core(self, llm: Any, info: EngineInfo) -> VllmCore:
        self.core = BreakableCore(
            llm,
            eos_token_ids=info.eos_token_ids,
            special_token=self._special_token,
            stream_credit=self._config.stream_credit,
        )
        return self.core
