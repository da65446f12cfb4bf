"""Engine settings, built by `service.backends` from the service's Settings. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path


class ModelLoadError(Exception):
    """The model cannot be had or is not supported; `str()` is one clear line for the operator."""


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """model: None for the default model, else a hub id, a local folder or a GGUF file. Names and meanings as in vLLM.

    dtype: auto (bfloat16 where the processor is fast at it, else float32), float32, bfloat16, float16.
    runner: auto, native or torch. max_model_len: None for the model's own. kv_cache_bytes: None for a share of memory.
    max_queued_seqs: choices that may wait beyond those that run. max_queued_tokens: prompt tokens of all that is
    admitted. stream_credit: updates a reader may be behind. num_speculative_tokens: how many tokens of a single choice
    may be guessed from its text and computed in one step (where the runner is bitwise); 0 for none.
    """

    model: str | None = None
    served_model_name: str = "SmolLM2-135M-Instruct"
    embedding_model: str | None = None
    served_embedding_model_name: str = ""
    cache_dir: Path = Path("~/.cache/chorus")
    dtype: str = "auto"
    device: str = "auto"
    runner: str = "auto"
    trust_remote_code: bool = False
    max_model_len: int | None = None
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 1024
    max_queued_seqs: int = 512
    max_queued_tokens: int = 262_144
    kv_cache_bytes: int | None = None
    enable_prefix_caching: bool = True
    num_speculative_tokens: int = 7
    stream_credit: int = 64
    num_threads: int | None = None
    release_timeout: float = 5.0


@dataclass(frozen=True, slots=True)
class VllmOptions:
    """What only vLLM has, by its names and with its meanings; None for its own default.

    nnodes: machines that one model is spread over; this process is on the first, at master_addr, and on the others
    runs `vllm serve --headless`. kv_transfer_config: its connector, as JSON.
    """

    tensor_parallel_size: int | None = None
    pipeline_parallel_size: int | None = None
    data_parallel_size: int | None = None
    nnodes: int | None = None
    master_addr: str | None = None
    master_port: int | None = None
    distributed_executor_backend: str | None = None
    gpu_memory_utilization: float | None = None
    quantization: str | None = None
    enforce_eager: bool | None = None
    kv_transfer_config: dict[str, object] | None = None

    def arguments(self) -> dict[str, object]:
        """Those that are given, as vLLM's EngineArgs take them."""
        given = ((option.name, getattr(self, option.name)) for option in fields(self))
        return {name: value for name, value in given if value is not None}


@dataclass(frozen=True, slots=True)
class UpstreamConfig:
    """Servers that requests are passed on to. urls: without /v1. model: its name there, None for the first that one of
    them lists. max_retries: further tries of a choice that has made nothing yet. idle_timeout: seconds of silence
    within an answer. All times are seconds.
    """

    urls: tuple[str, ...]
    model: str | None = None
    api_key: str | None = None
    connect_timeout: float = 5.0
    idle_timeout: float = 120.0
    poll_seconds: float = 2.0
    max_retries: int = 2
