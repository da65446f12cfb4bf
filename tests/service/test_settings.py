from __future__ import annotations

import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from engine.config import EngineConfig
from service.settings import (
    Settings,
    SettingsError,
    read_settings,
    settings_table,
    unknown_variables,
    write_library_variables,
)


def test_nothing_set_gives_the_defaults() -> None:
    assert read_settings({}) == Settings(cache_dir=Path("~/.cache/chorus").expanduser())


def test_an_empty_variable_counts_as_not_set() -> None:
    assert read_settings({"CHORUS_PORT": "", "CHORUS_MODEL": " "}) == read_settings({})


def test_every_engine_setting_can_be_set_and_has_the_engines_default() -> None:
    ours, theirs = Settings().engine_config(), EngineConfig()
    for setting in fields(EngineConfig):
        assert getattr(ours, setting.name) == getattr(theirs, setting.name)


@pytest.mark.parametrize(
    ("name", "raw", "field", "value"),
    [
        ("CHORUS_PORT", "0", "port", 0),
        ("CHORUS_WORKER", "trio", "worker", "trio"),
        ("CHORUS_MAX_MODEL_LEN", "512", "max_model_len", 512),
        ("CHORUS_MAX_QUEUED_SEQS", "0", "max_queued_seqs", 0),
        ("CHORUS_KV_CACHE_BYTES", "2GiB", "kv_cache_bytes", 2 * 2**30),
        ("CHORUS_KV_CACHE_BYTES", "4096", "kv_cache_bytes", 4096),
        ("CHORUS_ENABLE_PREFIX_CACHING", "false", "enable_prefix_caching", False),
        ("CHORUS_DRAIN_SECONDS", "0", "drain_seconds", 0.0),
        ("CHORUS_BODY_TIMEOUT", "1.5", "body_timeout", 1.5),
        ("CHORUS_SERVED_MODEL_NAME", "a/b c", "served_model_name", "a/b c"),
    ],
)
def test_a_variable_is_parsed(name: str, raw: str, field: str, value: object) -> None:
    assert getattr(read_settings({name: raw}), field) == value


def test_settings_of_vllm_have_its_names_and_are_its_alone() -> None:
    environ = {
        "CHORUS_ENGINE": "vllm",
        "CHORUS_TENSOR_PARALLEL_SIZE": "4",
        "CHORUS_NNODES": "2",
        "CHORUS_DISTRIBUTED_EXECUTOR_BACKEND": "ray",
        "CHORUS_GPU_MEMORY_UTILIZATION": "0.85",
        "CHORUS_ENFORCE_EAGER": "true",
        "CHORUS_KV_TRANSFER_CONFIG": '{"kv_connector": "NixlConnector", "kv_role": "kv_both"}',
    }
    assert read_settings(environ).vllm_options().arguments() == {
        "tensor_parallel_size": 4,
        "nnodes": 2,
        "distributed_executor_backend": "ray",
        "gpu_memory_utilization": 0.85,
        "enforce_eager": True,
        "kv_transfer_config": {"kv_connector": "NixlConnector", "kv_role": "kv_both"},
    }
    for name in environ.keys() - {"CHORUS_ENGINE"}:
        with pytest.raises(SettingsError, match=f"{name} needs CHORUS_ENGINE=vllm"):
            read_settings({name: environ[name]})


@pytest.mark.parametrize("name", ["CHORUS_RUNNER", "CHORUS_NUM_SPECULATIVE_TOKENS", "CHORUS_NUM_THREADS"])
def test_a_setting_that_vllm_would_ignore_is_refused(name: str) -> None:
    raw = "torch" if name == "CHORUS_RUNNER" else "2"
    with pytest.raises(SettingsError, match=f"{name} means nothing to vLLM"):
        read_settings({"CHORUS_ENGINE": "vllm", name: raw})


@pytest.mark.parametrize(
    ("name", "raw"),
    [
        ("CHORUS_GPU_MEMORY_UTILIZATION", "1.5"),
        ("CHORUS_KV_TRANSFER_CONFIG", "[1]"),
        ("CHORUS_PORT", "65536"),
        ("CHORUS_PORT", "8000.0"),
        ("CHORUS_PORT", "-1"),
        ("CHORUS_WORKER", "Trio"),
        ("CHORUS_ENGINE", "llama"),
        ("CHORUS_MAX_NUM_SEQS", "0"),
        ("CHORUS_MAX_N", "many"),
        ("CHORUS_BODY_TIMEOUT", "0"),
        ("CHORUS_BODY_TIMEOUT", "nan"),
        ("CHORUS_BODY_TIMEOUT", "inf"),
        ("CHORUS_KV_CACHE_BYTES", "2GB"),
        ("CHORUS_TRUST_REMOTE_CODE", "maybe"),
        ("CHORUS_METRICS_COMPAT", "vLLM"),
    ],
)
def test_a_bad_value_is_one_line_that_names_the_variable(name: str, raw: str) -> None:
    with pytest.raises(SettingsError) as caught:
        read_settings({name: raw})
    assert name in str(caught.value) and "\n" not in str(caught.value)


def test_a_local_model_is_served_under_its_own_name_not_its_path(tmp_path: Path) -> None:
    (tmp_path / "tiny.gguf").touch()
    assert read_settings({"CHORUS_MODEL": str(tmp_path / "tiny.gguf")}).served_model_name == "tiny"
    assert read_settings({"CHORUS_MODEL": str(tmp_path)}).served_model_name == tmp_path.name
    assert read_settings({"CHORUS_MODEL": "org/model"}).served_model_name == "org/model"
    named = read_settings({"CHORUS_MODEL": "org/model", "CHORUS_SERVED_MODEL_NAME": "m"})
    assert named.served_model_name == "m"


def test_a_misspelt_variable_is_warned_of_with_the_nearest_name() -> None:
    (warning,) = unknown_variables(
        {"CHORUS_MAX_NUM_SEQ": "3", "CHORUS_PORT": "1", "CHORUS_TORCH_INDEX": "x", "PATH": "/"}
    )
    assert "CHORUS_MAX_NUM_SEQ " in warning and "CHORUS_MAX_NUM_SEQS?" in warning


def test_kubernetes_service_links_are_no_settings() -> None:
    links = {
        "CHORUS_PORT": "tcp://10.0.0.1:80",
        "CHORUS_SERVICE_HOST": "10.0.0.1",
        "CHORUS_SERVICE_PORT": "80",
        "CHORUS_SERVICE_PORT_HTTP": "80",
        "CHORUS_PORT_80_TCP": "tcp://10.0.0.1:80",
        "CHORUS_PORT_80_TCP_ADDR": "10.0.0.1",
        "CHORUS_METRICS_PORT": "tcp://10.0.0.2:81",
        "CHORUS_METRICS_SERVICE_HOST": "10.0.0.2",
    }
    assert unknown_variables(links) == []
    assert read_settings(links).port == 8000


def test_library_variables_do_not_override_the_operators_own() -> None:
    environ = {"TOKENIZERS_PARALLELISM": "true"}
    write_library_variables(environ)
    assert environ["TOKENIZERS_PARALLELISM"] == "true" and environ["HF_HUB_DISABLE_TELEMETRY"] == "1"
    assert "HF_HUB_OFFLINE" not in environ


def test_the_table_has_one_row_a_setting() -> None:
    rows = settings_table().splitlines()[2:]
    assert len(rows) == len(fields(Settings))
    assert all(row.count("|") == 4 and "None" not in row for row in rows)


def test_the_readme_has_the_table() -> None:
    """To renew it: python -c 'from service.settings import settings_table; print(settings_table())'."""
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    assert settings_table() in readme


def test_a_bad_value_ends_the_command_with_status_2() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "service"], env={"CHORUS_PORT": "x"}, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2
    assert done.stderr.splitlines() == ["chorus: CHORUS_PORT=x: expected a whole number"]
