"""Who may import what: the rooms of the architecture stay apart only while this holds."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
MODULES = sorted(path for folder in ("service", "engine") for path in (ROOT / folder).rglob("*.py"))

ENGINE_CONTRACT = {"engine.api", "engine.config", "engine.stats"}
BUILDS_THE_ENGINE = {"service/backends.py"}
WITH_TORCH = {f"engine/{name}.py" for name in ("attention", "grammar", "kv_cache", "model", "runner", "sampler")}
WITH_TORCH |= {"engine/embedder.py", "engine/native/runner.py"}
WITH_TRANSFORMERS = {"service/tokenizer.py", "service/template_process.py"}  # the latter is a process of its own
READS_ENVIRONMENT = {"environ", "environb", "getenv", "getenvb"}
WITH_THREADS = {"engine/thread.py", "engine/vllm.py"}


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def imported(node: ast.AST) -> Iterator[str]:
    """Full names that an import statement may load: `from engine import api` gives engine and engine.api."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        assert node.level == 0 and node.module, "imports are absolute, so that these rules can be read off them"
        yield node.module
        yield from (f"{node.module}.{alias.name}" for alias in node.names)


def offences(packages: set[str], *, folder: str = "", allowed: Iterable[str] = ()) -> list[str]:
    """Places under `folder`, other than the `allowed` files, that import one of `packages` or from within it."""
    return [
        f"{name}:{node.lineno} imports {target}"
        for path in MODULES
        if (name := path.relative_to(ROOT).as_posix()).startswith(folder) and name not in allowed
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for target in imported(node)
        if target.split(".")[0] in packages
    ]


def is_within(target: str, modules: set[str]) -> bool:
    """A package above a module says nothing by itself: `from engine import api` names engine and engine.api."""
    return any(f"{target}.".startswith(f"{module}.") or module.startswith(f"{target}.") for module in modules)


def test_asyncio_is_imported_nowhere() -> None:
    assert offences({"asyncio"}, allowed={"engine/vllm.py"}) == []


def test_engine_never_imports_service() -> None:
    assert offences({"service"}, folder="engine/") == []


def test_service_knows_the_engine_by_its_contract_only() -> None:
    imports = offences({"engine"}, folder="service/", allowed=BUILDS_THE_ENGINE)
    beyond = [line for line in imports if not is_within(line.split(" imports ")[1], ENGINE_CONTRACT)]
    assert beyond == []


def test_schemas_import_nothing_local_but_schemas() -> None:
    assert offences({"engine"}, folder="service/schemas/") == []
    local = offences({"service"}, folder="service/schemas/")
    assert [line for line in local if not is_within(line.split(" imports ")[1], {"service.schemas"})] == []


def test_torch_stays_in_the_rooms_that_compute() -> None:
    assert offences({"torch", "transformers"}, folder="engine/", allowed=WITH_TORCH) == []
    assert offences({"torch", "transformers"}, folder="service/", allowed=WITH_TRANSFORMERS) == []


def test_threads_stay_in_the_engine_thread() -> None:
    assert offences({"threading", "queue", "concurrent", "multiprocessing"}, allowed=WITH_THREADS) == []


def test_environment_is_read_in_settings_only() -> None:
    reads = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in MODULES
        if path != ROOT / "service" / "settings.py"
        for node in ast.walk(tree(path))
        if (isinstance(node, ast.Attribute) and node.attr in READS_ENVIRONMENT)
        or (isinstance(node, ast.ImportFrom) and not READS_ENVIRONMENT.isdisjoint(a.name for a in node.names))
    ]
    assert reads == []


def test_importing_the_app_loads_neither_torch_nor_transformers() -> None:
    """They take seconds, and the port has to answer before the model is there."""
    code = "import sys, service.app; print(*sorted({'torch', 'transformers', 'tokenizers'} & set(sys.modules)))"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stderr
