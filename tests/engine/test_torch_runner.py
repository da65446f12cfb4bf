"""The torch engine against transformers' own `generate`, in float32: the same greedy tokens whatever the schedule."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from engine.api import SamplingParams
from engine.attention import ATTENTION_NAME
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.model import load_model
from engine.plan import PAGE_SIZE
from engine.runner import TorchRunner, kv_bytes_per_page
from tests.engine.families import FAMILIES, greedy_reference, save_family
from tests.engine.support import generate, greedy, prefill_of, run_to_end


@pytest.fixture(scope="module", params=list(FAMILIES))
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[PreTrainedModel, Path]:
    folder = tmp_path_factory.mktemp(request.param)
    return save_family(request.param, folder), folder


def core_of(folder: Path, num_pages: int = 128, **options: Any) -> EngineCore:
    loaded = load_model(folder, "float32", "cpu", attn_implementation=ATTENTION_NAME)
    config = EngineConfig(kv_cache_bytes=num_pages * kv_bytes_per_page(loaded), **options)
    return EngineCore(config, TorchRunner(loaded, config))


def prompt_of(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 311) for _ in range(length)]


def test_forks_in_a_mixed_batch(family: tuple[PreTrainedModel, Path]) -> None:
    model, folder = family
    core = core_of(folder)
    prompts = [prompt_of(1), prompt_of(33), prompt_of(290), prompt_of(540)]
    answers = generate(core, prompts, [greedy(24)] * 3)
    for prompt, choices in zip(prompts, answers, strict=True):
        assert choices == [greedy_reference(model, prompt, 24)] * 3


@pytest.mark.parametrize("budget", [7, 64])
def test_chunked_prefill(family: tuple[PreTrainedModel, Path], budget: int) -> None:
    model, folder = family
    core = core_of(folder, max_num_batched_tokens=budget, max_num_seqs=4)
    prompts = [prompt_of(100), prompt_of(301, 1)]
    answers = generate(core, prompts, [greedy(12)] * 2)
    assert answers == [[greedy_reference(model, prompt, 12)] * 2 for prompt in prompts]


def test_forced_preemption(family: tuple[PreTrainedModel, Path]) -> None:
    model, folder = family
    core = core_of(folder, num_pages=12)
    prompts = [prompt_of(40, seed) for seed in range(4)]
    answers = generate(core, prompts, [greedy(80)])
    assert core.num_prompt_tokens > 160, "nothing was preempted and computed again"
    assert answers == [[greedy_reference(model, prompt, 80)] for prompt in prompts]


def test_a_warm_cache_and_a_shared_system_prompt(family: tuple[PreTrainedModel, Path]) -> None:
    model, folder = family
    core = core_of(folder)
    system = prompt_of(280)
    prompts = [system + prompt_of(40, 5), system + prompt_of(50, 6)]
    generate(core, [system], [greedy(1)])
    warm = [prefill_of(prompt, [greedy(20)] * 2) for prompt in prompts]
    sequences = [list(prefill.sequences) for prefill in warm]
    core.add(warm)
    run_to_end(core)
    assert [prefill.prompt.info.num_cached_tokens for prefill in warm] == [256, 256]
    for prompt, group in zip(prompts, sequences, strict=True):
        assert [s.output_ids for s in group] == [greedy_reference(model, prompt, 20)] * 2


def test_choice_i_of_n_is_the_answer_of_its_own_seed(family: tuple[PreTrainedModel, Path]) -> None:
    """Whatever else is in the batch, in waves and after preemption (float32).

    top_k keeps the borders between tokens few: torch's products round differently in batches of another size, and a
    draw that lies within 1e-6 of a border may fall on either side of it.
    """
    _, folder = family
    prompt = prompt_of(70)
    choices = [SamplingParams(seed=40 + i, top_k=4, max_tokens=30, ignore_eos=True) for i in range(6)]
    alone = [generate(core_of(folder), [prompt], [params])[0][0] for params in choices]
    assert len({tuple(answer) for answer in alone}) == 6
    together = generate(core_of(folder), [prompt], choices)[0]
    waves = generate(core_of(folder, max_num_seqs=2), [prompt_of(200, 8), prompt], choices)[1]
    squeezed = generate(core_of(folder, num_pages=12), [prompt, prompt_of(90, 9)], choices)[0]
    assert alone == together == waves == squeezed


def test_pool_size_and_context_follow_the_settings(family: tuple[PreTrainedModel, Path]) -> None:
    _, folder = family
    core = core_of(folder, num_pages=5, max_model_len=100)
    assert core.runner.num_pages == 5
    assert core.runner.max_model_len == 100
    assert core.cache.num_free * PAGE_SIZE == 160


def test_the_default_model(default_model_dir: Path) -> None:
    """Forks, chunks and a pool so small that choices are preempted, on the model that is served by default."""
    model = AutoModelForCausalLM.from_pretrained(default_model_dir, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(default_model_dir)
    texts = ["Once upon a time", "The three primary colours are " * 20]
    prompts = [tokenizer(text).input_ids for text in texts]
    core = core_of(default_model_dir, num_pages=8, max_num_batched_tokens=48, max_num_seqs=4)
    answers = generate(core, prompts, [greedy(40)] * 3)
    assert core.num_prompt_tokens > sum(map(len, prompts)), "nothing was preempted and computed again"
    assert answers == [[greedy_reference(model, prompt, 40)] * 3 for prompt in prompts]
