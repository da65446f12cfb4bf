"""Which runner serves a model, and how the operator learns of it."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import pytest

from engine.config import EngineConfig, ModelLoadError
from engine.native.binding import find_variant
from engine.runner import load_runner
from tests.engine.families import save_family


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("qwen3")
    save_family("qwen3", folder)
    return folder


def config(folder: Path, **options: object) -> EngineConfig:
    return EngineConfig(model=str(folder), device="cpu", kv_cache_bytes=2**20, **options)  # type: ignore[arg-type]


def test_the_native_step_is_there_where_it_could_be_built() -> None:
    flags = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    if shutil.which("c++") is None or " avx2 " not in flags:
        pytest.skip("no compiler, or a processor without AVX2: the general path serves")
    assert find_variant() is not None


def test_a_model_that_fits_gets_the_native_step(folder: Path) -> None:
    if find_variant() is None:
        pytest.skip("the native step was not built here")
    assert load_runner(config(folder, dtype="bfloat16")).name.startswith("native ")


def test_torch_is_used_when_asked_for(folder: Path) -> None:
    assert load_runner(config(folder, dtype="bfloat16", runner="torch")).name == "torch cpu bfloat16"


def test_a_model_that_does_not_fit_is_served_by_torch_and_the_log_says_why(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "chorus.engine"):
        assert load_runner(config(folder, dtype="float32")).name == "torch cpu float32"
    assert "the general path serves this model" in caplog.text


def test_insisting_on_native_names_what_does_not_fit(folder: Path) -> None:
    with pytest.raises(ModelLoadError, match="the native runner cannot serve this model"):
        load_runner(config(folder, dtype="float32", runner="native"))


def test_a_context_beyond_the_models_is_refused(folder: Path) -> None:
    with pytest.raises(ModelLoadError, match="exceeds the model's 1024 positions"):
        load_runner(config(folder, dtype="float32", max_model_len=2000))
