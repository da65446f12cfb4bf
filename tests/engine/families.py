"""Tiny random models, one of each supported family, as oracles for the engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
)

_SHAPE: dict[str, Any] = {
    "vocab_size": 311,
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.15,
}

FAMILIES: dict[str, tuple[type[PreTrainedModel], Any]] = {
    "llama": (LlamaForCausalLM, LlamaConfig(**_SHAPE, head_dim=16, tie_word_embeddings=True)),
    "llama3-rope": (
        LlamaForCausalLM,
        LlamaConfig(
            **_SHAPE,
            rope_parameters={
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 256,
            },
        ),
    ),
    "mistral": (MistralForCausalLM, MistralConfig(**_SHAPE, head_dim=16, sliding_window=48)),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config(**_SHAPE)),
    "smollm3": (SmolLM3ForCausalLM, SmolLM3Config(**_SHAPE, no_rope_layer_interval=2)),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config(**_SHAPE, head_dim=32)),
}


def save_family(name: str, folder: Path) -> PreTrainedModel:
    """Make the family's random model, the same every time, and save it; returns it in float32."""
    cls, config = FAMILIES[name]
    torch.manual_seed(20)
    model = cls(config).eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith("bias"):  # start at zero, which would hide a bias that is left out
                parameter.normal_(std=0.3)
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return model


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Ids 0 to 2 are special, each byte has one of the next 256."""
    specials = ["<unk>", "<s>", "</s>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(specials + alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


def greedy_reference(model: PreTrainedModel, prompt: list[int], num_tokens: int) -> list[int]:
    """transformers' own greedy continuation, which no end-of-sequence token cuts short."""
    output: Any = model.generate(  # type: ignore[operator]
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=num_tokens,
        min_new_tokens=num_tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    return list(output[0, len(prompt) :].tolist())
