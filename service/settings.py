"""One frozen Settings, read from CHORUS_* once. The only place that touches the process environment."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import MISSING, Field, dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

from engine.config import EngineConfig, UpstreamConfig, VllmOptions
from service.engine_settings import refusal
from service.parsers import REASONING_PARSERS, TOOL_PARSERS
from service.setting_values import (
    bind,
    choice,
    fraction,
    integer,
    json_object,
    origins,
    path,
    seconds,
    size,
    switch,
    text,
    url,
    urls,
)

PREFIX = "CHORUS_"
INSTALL_VARIABLES = ("CHORUS_TORCH_INDEX",)
"""Read by the scripts in deploy/, not here."""

LIBRARY_DEFAULTS = {
    "GOMP_SPINCOUNT": "1000",  # torch's threads would spin on, for a millisecond, on cores that others want
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "TOKENIZERS_PARALLELISM": "false",  # its thread pool competes with the engine's threads
    "TQDM_DISABLE": "1",  # progress bars between the lines of a log
    "TRANSFORMERS_VERBOSITY": "error",
    "VLLM_CONFIGURE_LOGGING": "0",  # see service.logs
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # its engine is stepped in this process
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # a fork of a process with threads may hang
}
"""What torch, transformers and vLLM read at import; written unless set already."""

BARE_VARIABLES = ("HOME", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "PATH", "PYTHONPATH", "TMPDIR")
"""What a helper process gets to see: tokens and passwords are in others."""

T = TypeVar("T")

_DEFAULTS = EngineConfig()
_UPSTREAM = UpstreamConfig(urls=())
# What Kubernetes and Docker links put into a container's environment for a service named chorus or chorus-something.
_SERVICE_LINK = re.compile(r"CHORUS_(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_\w+)?)")
_SERVICE_LINK_VALUE = re.compile(r"(tcp|udp|sctp)://")


class SettingsError(Exception):
    """A variable has a bad value; `str()` is one line that names it."""


def _setting(
    default: T,
    parse: Callable[[str], Any],
    description: str,
    shown_default: str | None = None,
    *,
    is_secret: bool = False,
) -> T:
    metadata = {"parse": parse, "description": description, "shown_default": shown_default, "is_secret": is_secret}
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Each field is CHORUS_ and its name in capitals. An empty variable counts as not set."""

    host: str = _setting("127.0.0.1", text, "address to listen on (`python -m service` only, as port and worker)")
    port: int = _setting(8000, integer(0, 65535), "port to listen on; 0 takes a free one")
    worker: str = _setting("asyncio", choice("asyncio", "uvloop", "trio"), "event loop: asyncio, uvloop or trio")
    log_level: str = _setting("info", choice("debug", "info", "warning", "error"), "debug, info, warning or error")
    log_format: str | None = _setting(
        None,
        choice("json", "console"),
        "json: an object a line; console: lines for people",
        "console on a terminal, else json",
    )

    engine: str = _setting(
        "torch", choice("torch", "fake", "vllm", "upstream"), "torch, vllm, upstream, or fake (for tests)"
    )
    model: str | None = _setting(
        None, text, "hub id, local folder or GGUF file of the model", "the default model, SmolLM2-135M-Instruct"
    )
    served_model_name: str = _setting(
        _DEFAULTS.served_model_name, text, "the name that requests give as `model`", "the model's name"
    )
    embedding_model: str | None = _setting(
        None, text, "hub id or local folder of a sentence-transformers model, for /v1/embeddings", "no embeddings"
    )
    served_embedding_model_name: str = _setting(
        _DEFAULTS.served_embedding_model_name, text, "the name that its requests give as `model`", "the model's name"
    )
    cache_dir: Path = _setting(_DEFAULTS.cache_dir, path, "folder for converted models")  # noqa: RUF009
    device: str = _setting(_DEFAULTS.device, text, "auto, cpu, cuda or cuda:N")
    dtype: str = _setting(
        _DEFAULTS.dtype, choice("auto", "float32", "bfloat16", "float16"), "auto, float32, bfloat16 or float16"
    )
    runner: str = _setting(_DEFAULTS.runner, choice("auto", "native", "torch"), "auto, native or torch")
    trust_remote_code: bool = _setting(_DEFAULTS.trust_remote_code, switch, "run code that comes with a model")
    max_model_len: int | None = _setting(
        _DEFAULTS.max_model_len, integer(1), "tokens of prompt and answer together", "the model's own"
    )
    max_num_seqs: int = _setting(_DEFAULTS.max_num_seqs, integer(1), "choices that run at once")
    max_num_batched_tokens: int = _setting(_DEFAULTS.max_num_batched_tokens, integer(1), "tokens in one engine step")
    max_queued_seqs: int = _setting(_DEFAULTS.max_queued_seqs, integer(0), "choices that may wait; beyond it 429")
    max_queued_tokens: int = _setting(
        _DEFAULTS.max_queued_tokens, integer(1), "prompt tokens of all requests that run or wait; beyond it 429"
    )
    kv_cache_bytes: int | None = _setting(
        _DEFAULTS.kv_cache_bytes, size, "memory for keys and values", "a share of the memory"
    )
    enable_prefix_caching: bool = _setting(
        _DEFAULTS.enable_prefix_caching, switch, "keep keys and values of ended requests for prompts that begin alike"
    )
    num_speculative_tokens: int = _setting(
        _DEFAULTS.num_speculative_tokens,
        integer(0),
        "tokens guessed from the text of a single choice and computed in one step (the same answers, sooner)",
    )
    stream_credit: int = _setting(
        _DEFAULTS.stream_credit, integer(1), "engine steps that a stream's reader may be behind before it waits"
    )
    num_threads: int | None = _setting(_DEFAULTS.num_threads, integer(1), "the engine's CPU threads", "torch's own")
    tensor_parallel_size: int | None = _setting(
        None, integer(1), "GPUs that each layer is spread over (this and the next ten: vllm only)", "vLLM's, 1"
    )
    pipeline_parallel_size: int | None = _setting(None, integer(1), "groups of GPUs that share the layers", "vLLM's, 1")
    data_parallel_size: int | None = _setting(
        None, integer(1), "copies of the model, each on GPUs of its own", "vLLM's, 1"
    )
    nnodes: int | None = _setting(
        None, integer(1), "machines; the others run `vllm serve --headless`, and this one is the first", "vLLM's, 1"
    )
    master_addr: str | None = _setting(None, text, "address of this machine, which the others call", "vLLM's own")
    master_port: int | None = _setting(None, integer(1, 65535), "its port for that", "vLLM's own")
    distributed_executor_backend: str | None = _setting(
        None, choice("mp", "ray", "uni"), "what starts the processes: mp, ray or uni (none)", "vLLM's choice"
    )
    gpu_memory_utilization: float | None = _setting(
        None, fraction, "share of a GPU's memory (of a CPU's, where that serves)", "vLLM's own"
    )
    quantization: str | None = _setting(None, text, "how weights are quantized, by vLLM's name", "as the model says")
    enforce_eager: bool | None = _setting(None, switch, "no compilation, no CUDA graphs", "vLLM's, false")
    kv_transfer_config: dict[str, object] | None = _setting(  # noqa: RUF009
        None, json_object, "vLLM's connector for `kv_transfer_params`, as JSON", "none"
    )
    release_timeout: float = _setting(
        _DEFAULTS.release_timeout, seconds(0), "seconds to wait for the engine to let go of an aborted request"
    )

    upstream_urls: tuple[str, ...] = _setting(
        _UPSTREAM.urls,
        urls,
        "servers that `upstream` passes requests on to, separated by commas, with or without /v1",
        "none",
    )
    upstream_model: str | None = _setting(_UPSTREAM.model, text, "the model's name there", "the first that is listed")
    upstream_api_key: str | None = _setting(
        _UPSTREAM.api_key, text, "the key that they get as bearer token", "no key", is_secret=True
    )
    upstream_connect_timeout: float = _setting(
        _UPSTREAM.connect_timeout, seconds(0.001), "seconds in which a connection to an upstream must be made"
    )
    upstream_idle_timeout: float = _setting(
        _UPSTREAM.idle_timeout, seconds(0.001), "seconds for which an upstream may send nothing within an answer"
    )
    upstream_poll_seconds: float = _setting(
        _UPSTREAM.poll_seconds, seconds(0.001), "seconds between two looks at an upstream's list of models"
    )
    upstream_max_retries: int = _setting(
        _UPSTREAM.max_retries, integer(0), "other upstreams that a choice is tried on while it has made nothing"
    )

    tool_parser: str = _setting(
        "auto",
        choice("auto", "none", *TOOL_PARSERS),
        f"how the model writes tool calls: auto (its chat template shows), none, {', '.join(TOOL_PARSERS)}",
    )
    reasoning_parser: str = _setting(
        "auto",
        choice("auto", "none", *REASONING_PARSERS),
        f"how it marks its reasoning: auto, none, {', '.join(REASONING_PARSERS)}",
    )

    trust_request_chat_template: bool = _setting(
        False, switch, "accept a client's own `chat_template`; each renders in a process that can be killed"
    )
    template_timeout: float = _setting(2.0, seconds(0.001), "seconds in which a client's own template must render")
    max_body_bytes: int = _setting(8 * 2**20, size, "largest request body; beyond it 413", "8MiB")
    body_timeout: float = _setting(30.0, seconds(0.001), "seconds in which a request body must arrive")
    max_n: int = _setting(128, integer(1), "largest `n`")
    ping_seconds: float = _setting(15.0, seconds(0.001), "seconds of silence after which a stream sends a comment")
    drain_seconds: float = _setting(30.0, seconds(0), "seconds that running requests get to finish at SIGTERM")
    keep_alive_seconds: float = _setting(75.0, seconds(0), "seconds that an idle connection is kept")
    request_timeout: float = _setting(
        600.0, seconds(0.001), "seconds after which an answer ends with what there is; requests may ask for less"
    )
    write_timeout: float = _setting(
        60.0, seconds(0.001), "seconds for which a client may take nothing of its answer before it is cut off"
    )
    step_timeout: float = _setting(
        60.0, seconds(0.001), "seconds without progress of the engine after which it counts as hung"
    )
    api_keys_file: Path | None = _setting(  # noqa: RUF009
        None, path, "file of API keys, one a line: KEY [NAME] [LIMIT=NUMBER ...]; reread when it changes", "no keys"
    )
    cors_origins: tuple[str, ...] = _setting(
        (), origins, "origins, separated by commas, whose pages may call from a browser; * for all", "none"
    )
    metrics_bind: tuple[str, int] | None = _setting(
        None,
        bind,
        "host:port that alone serves /metrics, without a key (`python -m service` only)",
        "the main address",
    )
    metrics_compat: str | None = _setting(
        None, choice("vllm"), "vllm: /metrics has vLLM's names too", "Chorus's names and OpenTelemetry's"
    )
    otlp_endpoint: str | None = _setting(
        None, url, "URL of an OpenTelemetry collector (OTLP over HTTP) that gets the spans of requests", "no tracing"
    )
    trace_content: bool = _setting(False, switch, "spans have the texts of prompts and answers too")
    playground: bool = _setting(True, switch, "serve the playground, a page at /")
    debug: bool = _setting(False, switch, "serve /debug/steps, the engine's last steps")
    responses_store: Path | None = _setting(  # noqa: RUF009
        None, path, "SQLite file that keeps responses for `previous_response_id`; texts are in it", "none are kept"
    )
    responses_max_bytes: int = _setting(2**30, size, "most that the kept responses may hold", "1GiB")
    responses_max_age: float = _setting(
        30 * 86400.0, seconds(0.001), "seconds after its last use for which a response is kept", "2592000 (30 days)"
    )
    backlog: int = _setting(2048, integer(1), "connections that may wait to be accepted")

    @property
    def max_choices(self) -> int:
        """Choices that one request may ask for over all its prompts: more could never be admitted together."""
        return self.max_num_seqs + self.max_queued_seqs

    def engine_config(self) -> EngineConfig:
        return EngineConfig(**{setting.name: getattr(self, setting.name) for setting in fields(EngineConfig)})

    def vllm_options(self) -> VllmOptions:
        return VllmOptions(**{setting.name: getattr(self, setting.name) for setting in fields(VllmOptions)})

    def upstream_config(self) -> UpstreamConfig:
        return UpstreamConfig(
            **{setting.name: getattr(self, f"upstream_{setting.name}") for setting in fields(UpstreamConfig)}
        )

    def public(self) -> dict[str, object]:
        """The settings as JSON values, for the start-up line, without those that are secret."""
        shown = (setting for setting in fields(self) if not setting.metadata["is_secret"])
        values = {setting.name: getattr(self, setting.name) for setting in shown}
        return {name: str(value) if isinstance(value, Path) else value for name, value in values.items()}


def read_settings(environ: Mapping[str, str] | None = None) -> Settings:
    """Raises SettingsError. environ: the process's own when None."""
    environ = os.environ if environ is None else environ
    environ = {"CHORUS_CACHE_DIR": str(_DEFAULTS.cache_dir)} | {name: raw for name, raw in environ.items() if raw}
    values = {setting.name: value for setting in fields(Settings) for value in _read(setting, environ)}
    if "served_model_name" not in values:
        values |= _served_model_name(values)
    if values.get("embedding_model") is not None and "served_embedding_model_name" not in values:
        values["served_embedding_model_name"] = _model_name(values["embedding_model"])
    if (reason := refusal(values, PREFIX)) is not None:
        raise SettingsError(reason)
    return Settings(**values)


def _read(setting: Field[Any], environ: Mapping[str, str]) -> Iterator[Any]:
    """The setting's value, or nothing when its variable is not set."""
    variable = _variable(setting)
    raw = environ.get(variable, "").strip()
    if not raw or (setting.name == "port" and _SERVICE_LINK_VALUE.match(raw)):
        return
    try:
        yield setting.metadata["parse"](raw)
    except ValueError as error:
        raise SettingsError(f"{variable}={raw}: {error}") from None


def _served_model_name(values: Mapping[str, Any]) -> dict[str, str]:
    if values.get("engine") == "upstream":
        return {"served_model_name": values.get("upstream_model") or ""}  # the upstreams say
    model = values.get("model")
    return {} if model is None else {"served_model_name": _model_name(model)}


def _model_name(model: str) -> str:
    """A hub id stays as it is; of a file or folder the last part counts, for its place is nobody's business."""
    path = Path(model).expanduser()
    if not path.exists():
        return model
    return path.resolve().stem if path.suffix == ".gguf" else path.resolve().name


def unknown_variables(environ: Mapping[str, str] | None = None) -> list[str]:
    """One warning for each CHORUS_* variable that means nothing here."""
    environ = os.environ if environ is None else environ
    known = [_variable(setting) for setting in fields(Settings)]
    warnings = []
    for name in sorted(set(environ).difference(known, INSTALL_VARIABLES)):
        if not name.startswith(PREFIX) or _is_service_link(name, environ[name]):
            continue
        near = difflib.get_close_matches(name, known, n=1)
        warnings.append(f"{name} is not a setting" + (f"; did you mean {near[0]}?" if near else ""))
    return warnings


def _is_service_link(name: str, value: str) -> bool:
    return bool(_SERVICE_LINK.fullmatch(name) or (name.endswith("_PORT") and _SERVICE_LINK_VALUE.match(value)))


def write_library_variables(environ: MutableMapping[str, str] | None = None) -> None:
    """Call before anything imports torch or transformers."""
    environ = os.environ if environ is None else environ
    for name, value in LIBRARY_DEFAULTS.items():
        environ.setdefault(name, value)


def bare_environment(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """For a process that runs what clients wrote."""
    environ = os.environ if environ is None else environ
    return LIBRARY_DEFAULTS | {name: environ[name] for name in BARE_VARIABLES if name in environ}


def settings_table() -> str:
    """The README's table of settings, in Markdown."""
    rows = ["| variable | default | meaning |", "| --- | --- | --- |"]
    for setting in fields(Settings):
        default = setting.metadata["shown_default"] or _shown(setting.default)
        rows.append(f"| `{_variable(setting)}` | {default} | {setting.metadata['description']} |")
    return "\n".join(rows)


def _shown(value: object) -> str:
    assert value is not None and value is not MISSING, "a default of None needs words"
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)


def _variable(setting: Field[Any]) -> str:
    return PREFIX + setting.name.upper()
