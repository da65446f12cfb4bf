"""Which variant is picked, that all that run here compute the same model, and what is left to the torch runner."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from engine.native.binding import VARIANTS, find_variant, library_path, runnable_variants
from engine.native.runner import NativeRunner, unsupported_reason
from tests.native.bits import is_bitwise, logits_alone
from tests.native.models import error, oracle_logits, runner_of, tiny, tokens
from tests.native.plans import Pages, PlanBuilder, Text


@pytest.mark.skipif(shutil.which("g++") is None, reason="nothing to build it with")
def test_a_machine_with_a_compiler_runs_the_fastest_variant_that_its_processor_has() -> None:
    runnable = runnable_variants()
    assert find_variant() == (runnable[0] if runnable else None)


def test_variants_by_processor() -> None:
    assert runnable_variants(VARIANTS["avx512_bf16"]) == ["avx512_bf16", "avx512", "avx2"]
    assert runnable_variants(VARIANTS["avx512"] | {"sse2"}) == ["avx512", "avx2"]
    assert runnable_variants(VARIANTS["avx2"]) == ["avx2"]
    assert runnable_variants(frozenset({"avx2"})) == []


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("family", ["llama", "qwen3-heads128"])
def test_every_variant_computes_the_model_and_is_bitwise(variant: str, family: str) -> None:
    path = library_path(variant)
    if path is None or variant not in runnable_variants():
        pytest.skip("not for this machine")
    runner = runner_of(family, library=(variant, path))
    assert runner.name == f"native {variant}"
    alone = logits_alone(runner, tokens(560))
    assert error(runner.last_logits, oracle_logits(family, tokens(560))) < 0.02
    assert is_bitwise(runner, alone)


def _llama(**changes: Any) -> Any:
    shape = {"vocab_size": 40, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}
    return LlamaForCausalLM(LlamaConfig(**shape | {"num_attention_heads": 2, "num_key_value_heads": 1} | changes))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"head_dim": 16}, "16"),
        ({"hidden_size": 72, "head_dim": 32}, "72"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"mlp_bias": True}, "bias"),
        ({"attention_bias": True}, "bias"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "dynamic"),
    ],
)
def test_what_the_native_step_leaves_to_the_torch_runner(changes: dict[str, Any], reason: str | None) -> None:
    got = unsupported_reason(_llama(**changes), torch.bfloat16)
    assert got is None if reason is None else got is not None and reason in got


def test_only_bfloat16_is_native() -> None:
    assert "float32" in (unsupported_reason(_llama(), torch.float32) or "")


def test_the_context_may_be_shorter_than_the_model_allows() -> None:
    runner = NativeRunner(tiny("llama"), num_pages=4, max_model_len=50)
    assert (runner.max_model_len, runner.num_pages, runner.vocab_size) == (50, 4, 331)
    assert runner.eos_token_ids == {2} and runner.bitwise and runner.model_path == "llama"
    builder = PlanBuilder(Pages(4))
    builder.add_chunk(Text(tokens(51)))
    with pytest.raises(ValueError, match="position"):
        runner.execute(builder.plan)


def test_weights_of_another_shape_are_refused() -> None:
    with pytest.raises(ValueError, match="shape"):
        NativeRunner(replace(tiny("llama"), vocab_size=300, path=Path("x")), num_pages=4, max_model_len=50)


def test_a_pool_without_a_page_is_refused() -> None:
    with pytest.raises(ValueError, match="page"):
        NativeRunner(tiny("llama"), num_pages=0, max_model_len=50)
