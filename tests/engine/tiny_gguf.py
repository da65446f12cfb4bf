"""A tiny llama written as a GGUF file the way llama.cpp's converter does."""

from __future__ import annotations

from pathlib import Path

import torch
from gguf import GGUFWriter, TokenType
from tokenizers import pre_tokenizers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHAT_TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"

_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def write_tiny_gguf(path: Path, pre_tokenizer: str = "smollm", architecture: str = "llama") -> LlamaForCausalLM:
    """Returns the model whose weights were written: float32, rounded to what bfloat16 holds."""
    tokens = [*SPECIAL_TOKENS, *sorted(pre_tokenizers.ByteLevel.alphabet()), "ĠĠ", "Ġ1"]
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=len(tokens),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.2,
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
    writer = GGUFWriter(path, architecture)
    writer.add_name("tiny")
    writer.add_block_count(2)
    writer.add_context_length(128)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(64)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_rope_dimension_count(8)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    _add_tokenizer(writer, tokens, pre_tokenizer)
    _add_weights(writer, model)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def _add_tokenizer(writer: GGUFWriter, tokens: list[str], pre_tokenizer: str) -> None:
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre_tokenizer)
    writer.add_token_list(tokens)
    writer.add_token_types([TokenType.CONTROL] * len(SPECIAL_TOKENS) + [TokenType.NORMAL] * (len(tokens) - 3))
    writer.add_token_merges(["Ġ Ġ", "Ġ 1"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template(CHAT_TEMPLATE)


def _add_weights(writer: GGUFWriter, model: LlamaForCausalLM) -> None:
    weights = model.state_dict()
    writer.add_tensor("token_embd.weight", weights["model.embed_tokens.weight"].numpy())
    writer.add_tensor("output_norm.weight", weights["model.norm.weight"].numpy())
    for layer in range(2):
        for gguf_name, name in _LAYER_NAMES.items():
            tensor = weights[f"model.layers.{layer}.{name}.weight"]
            if gguf_name in ("attn_q", "attn_k"):
                tensor = _interleaved(tensor, num_heads=4 if gguf_name == "attn_q" else 2)
            writer.add_tensor(f"blk.{layer}.{gguf_name}.weight", tensor.contiguous().numpy())


def _interleaved(weight: Tensor, num_heads: int) -> Tensor:
    """Rotary pairs stand side by side in GGUF, half a head apart in transformers."""
    rows, columns = weight.shape
    return weight.reshape(num_heads, 2, rows // num_heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)
