"""Computing from a file's four and eight bits gives the bits that the expanded weights give."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, quants
from numpy.typing import NDArray
from safetensors.numpy import save_file

from engine.model import LoadedModel
from engine.native.binding import VARIANTS, library_path, runnable_variants
from engine.native.runner import NativeRunner
from engine.packed_weights import PACKED_FILE
from tests.native.models import VOCAB, poison, runner_for, tiny, tokens
from tests.native.plans import Pages, PlanBuilder, Text

NUM_MATRICES = 3 * 4 + 1  # of the tiny models: qkv, output, gate with up, down per layer, and the head


def _quantized(family: str, folder: Path, packings: dict[str, str]) -> LoadedModel:
    """A tiny model whose weights are those of a quantized file, and the file's blocks in `folder`.

    packings: module name -> GGUF type of its weights in all layers ("" for the other modules).
    """
    loaded = tiny(family)
    model = copy.deepcopy(loaded.model)
    tensors, metadata = {}, {}
    for name, parameter in model.named_parameters():
        *_, module, kind = name.split(".")
        packing = packings.get(module, packings[""])
        if kind != "weight" or "norm" in module or not packing:
            continue
        layer = f"{name.split('.')[2]}." if ".layers." in name else ""
        blocks = quants.quantize(parameter.numpy(), GGMLQuantizationType[packing])
        weights = quants.dequantize(blocks, GGMLQuantizationType[packing])
        parameter.copy_(torch.from_numpy(weights).bfloat16().float())
        tensors[layer + module], metadata[layer + module] = blocks, packing
    save_file(tensors, folder / PACKED_FILE, metadata=metadata)
    return replace(loaded, model=model, path=folder)


def _logits(runner: NativeRunner, num_forks: int) -> list[NDArray[np.uint32]]:
    """The bits of some steps' logits: a prompt, its forks, a chunk beside them."""
    poison(runner)
    pages, prompt = Pages(160), Text(tokens(300))
    builder = PlanBuilder(pages)
    builder.add_chunk(prompt)
    runner.execute(builder.plan)
    found = [runner.last_logits.copy().view(np.uint32)]
    builder = PlanBuilder(pages)
    forks = builder.fork(prompt, num_forks)
    for step in range(3):
        for number, fork in enumerate(forks):
            fork.token_ids.append(tokens(40, seed=number)[step])
        builder.add_decodes(forks, 256)
        if step == 2:
            builder.add_chunk(Text(tokens(7, seed=9)))
        runner.execute(builder.plan)
        found.append(runner.last_logits.copy().view(np.uint32))
        builder = PlanBuilder(pages)
    return found


@pytest.mark.parametrize("num_forks", [1, 2, 7, 8, 9])
@pytest.mark.parametrize(
    "packings",
    [{"": "Q4_1"}, {"": "Q4_0"}, {"": "Q8_0"}, {"": "Q4_1", "embed_tokens": "Q8_0"}],
    ids=["Q4_1", "Q4_0", "Q8_0", "mixed"],
)
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3-heads128"])
def test_packed_weights_give_the_same_bits(
    family: str, packings: dict[str, str], num_forks: int, tmp_path: Path
) -> None:
    loaded = _quantized(family, tmp_path, packings)
    packed, plain = runner_for(loaded), runner_for(replace(loaded, path=tmp_path / "none"))
    assert (packed.num_packed, plain.num_packed) == (NUM_MATRICES, 0)
    for got, want in zip(_logits(packed, num_forks), _logits(plain, num_forks), strict=True):
        assert np.array_equal(got, want)


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_computes_from_packed_weights(variant: str, tmp_path: Path) -> None:
    path = library_path(variant)
    if path is None or variant not in runnable_variants():
        pytest.skip("not for this machine")
    loaded = _quantized("llama", tmp_path, {"": "Q4_1", "embed_tokens": "Q8_0"})
    packed = runner_for(loaded, library=(variant, path))
    plain = runner_for(replace(loaded, path=tmp_path / "none"), library=(variant, path))
    assert packed.num_packed == NUM_MATRICES
    for got, want in zip(_logits(packed, 2), _logits(plain, 2), strict=True):
        assert np.array_equal(got, want)


@pytest.mark.parametrize("packings", [{"": "Q4_1", "k_proj": "Q8_0"}, {"": "Q4_1", "k_proj": ""}])
def test_a_matrix_that_is_packed_in_part_or_in_two_ways_is_not_used(packings: dict[str, str], tmp_path: Path) -> None:
    loaded = _quantized("llama", tmp_path, packings)
    assert runner_for(loaded).num_packed == NUM_MATRICES - 3


def test_blocks_of_other_weights_are_not_used(tmp_path: Path) -> None:
    loaded = _quantized("llama", tmp_path, {"": "Q4_1"})
    weight = loaded.model.model.layers[1].mlp.down_proj.weight
    weight[-1, -1] += 1.0
    packed, plain = runner_for(loaded), runner_for(replace(loaded, path=tmp_path / "none"))
    assert packed.num_packed == NUM_MATRICES - 1
    for got, want in zip(_logits(packed, 2), _logits(plain, 2), strict=True):
        assert np.array_equal(got, want)


def test_blocks_of_another_shape_are_refused(tmp_path: Path) -> None:
    loaded = _quantized("llama", tmp_path, {"": "Q4_1"})
    save_file({"0.o_proj": np.zeros((VOCAB, 20), np.uint8)}, tmp_path / PACKED_FILE, metadata={"0.o_proj": "Q4_1"})
    with pytest.raises(ValueError, match="shape"):
        runner_for(loaded)
