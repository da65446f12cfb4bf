"""A GGUF file's own blocks, kept beside the converted model for runners that compute from them. Imports no torch.

The file PACKED_FILE in a model folder holds matrices as the GGUF file has them, under the names and in the row order of
the converted model: [rows, bytes of a row]. Its metadata gives each one's GGUF type.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.numpy import save_file

PACKED_FILE = "packed.blocks"
"""In the format of safetensors but not named so: vLLM takes every file of that name for weights."""

BLOCK_BYTES = {"Q4_0": 18, "Q4_1": 20, "Q8_0": 34}
"""GGUF types whose blocks are 32 weights of one scale (and one minimum)."""

_MODULES = {
    "attn_q": "q_proj",
    "attn_k": "k_proj",
    "attn_v": "v_proj",
    "attn_output": "o_proj",
    "ffn_gate": "gate_proj",
    "ffn_up": "up_proj",
    "ffn_down": "down_proj",
}

Blocks = NDArray[np.uint8]


def write_packed(gguf: Path, folder: Path, num_heads: int, num_kv_heads: int) -> None:
    """Write PACKED_FILE into `folder`; nothing where the file holds no matrix of BLOCK_BYTES. Raises OSError."""
    from gguf import GGUFReader

    reader = GGUFReader(gguf)
    field = reader.get_field("general.architecture")
    interleaved = field is not None and field.contents() == "llama"
    tensors: dict[str, Blocks] = {}
    packings: dict[str, str] = {}
    for tensor in reader.tensors:
        name = _module_of(tensor.name)
        if name is None or tensor.tensor_type.name not in BLOCK_BYTES:
            continue
        blocks: Blocks = np.asarray(tensor.data, dtype=np.uint8).reshape(int(tensor.shape[1]), -1)
        if interleaved and name.endswith((".q_proj", ".k_proj")):
            blocks = _halves(blocks, num_heads if name.endswith(".q_proj") else num_kv_heads)
        tensors[name] = np.ascontiguousarray(blocks)
        packings[name] = tensor.tensor_type.name
    if tensors:
        save_file(tensors, folder / PACKED_FILE, metadata=packings)


def read_packed(folder: Path) -> Iterator[tuple[str, int, str, Blocks]]:
    """(module, layer, packing, blocks) of every matrix in the folder's PACKED_FILE; none where there is none."""
    path = folder / PACKED_FILE
    if not path.is_file():
        return
    with safe_open(path, framework="numpy") as file:
        packings: dict[str, str] = file.metadata()
        for name, packing in packings.items():
            layer, _, module = name.rpartition(".")
            yield module, int(layer or 0), packing, file.get_tensor(name)


def _module_of(name: str) -> str | None:
    """ "layer.module" for a layer's matrix, "module" for the others; None for what is no matrix of a product."""
    if name in ("token_embd.weight", "output.weight"):
        return "embed_tokens" if name.startswith("token") else "lm_head"
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", name)
    module = _MODULES.get(match[2]) if match else None
    return f"{match[1]}.{module}" if match and module else None


def _halves(blocks: Blocks, num_heads: int) -> Blocks:
    """Llama's GGUF files have a head's rotary pairs side by side; the converted model has them half a head apart."""
    pairs = blocks.reshape(num_heads, -1, 2, blocks.shape[1])
    return pairs.swapaxes(1, 2).reshape(blocks.shape)
