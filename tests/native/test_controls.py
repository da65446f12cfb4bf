"""Negative controls: each change breaks one rule of attention.h, and the bitwise comparison must notice it."""

from __future__ import annotations

import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

import engine.native
from engine.native.binding import runnable_variants
from tests.native.bits import is_bitwise, logits_alone
from tests.native.models import runner_of, tokens

SOURCES = Path(engine.native.__file__).parent
PYPROJECT = SOURCES.parent.parent / "pyproject.toml"

MUTANTS = {
    "reversed fold": (
        "attention.h",
        "for (int tile = 0; tile < plan_.num_tiles(row); ++tile) {",
        "for (int tile = plan_.num_tiles(row) - 1; tile >= 0; --tile) {",
    ),
    "other tiles": ("plan.h", "constexpr int kTile = 256;", "constexpr int kTile = 128;"),
    "running maximum": (
        "attention.h",
        "const float max_score = maximum(top);",
        "static thread_local float most = 0.0f; const float max_score = most = std::max(most, maximum(top));",
    ),
    "sums that know their block": (
        "kernel.h",
        "acc[r][0] = acc[r][1] = splat(0.0f);",
        "acc[r][0] = acc[r][1] = splat(R * 1e-6f);",
    ),
    "values that are not zeroed": (
        "step.h",
        "std::fill_n(kv.values(plan.slots[row] / kPage, kv_head), kPage * s.head_dim, bf16{0});",
        "continue;",
    ),
}


def compile_library(folder: Path, variant: str) -> Path:
    """Compile the sources in `folder` as pyproject.toml says for this variant, less optimised."""
    modules = tomllib.loads(PYPROJECT.read_text())["tool"]["setuptools"]["ext-modules"]
    flags = next(module["extra-compile-args"] for module in modules if module["name"].endswith(f"._{variant}"))
    output = folder / "library.so"
    command = ["g++", *flags, "-O1", "-shared", "-fPIC", "-w", str(folder / "library.cpp"), "-o", str(output)]
    subprocess.run(command, check=True)
    return output


@pytest.mark.skipif(shutil.which("g++") is None or not runnable_variants(), reason="needs g++ and a known processor")
@pytest.mark.parametrize("mutant", [None, *MUTANTS])
def test_the_comparison_notices(mutant: str | None, tmp_path: Path) -> None:
    for source in (*SOURCES.glob("*.h"), *SOURCES.glob("*.cpp")):
        shutil.copy(source, tmp_path)
    if mutant is not None:
        name, old, new = MUTANTS[mutant]
        text = (tmp_path / name).read_text()
        assert text.count(old) == 1
        (tmp_path / name).write_text(text.replace(old, new))
    variant = runnable_variants()[0]
    runner = runner_of("llama", library=(variant, compile_library(tmp_path, variant)))
    alone = logits_alone(runner_of("llama"), tokens(560))
    assert is_bitwise(runner, alone) == (mutant is None)
