"""Loading a causal language model's weights with transformers, and converting a GGUF file into such a model once."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    GgufConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.integrations.gguf.reader import read_gguf_metadata
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from engine.config import EngineConfig, ModelLoadError
from engine.model_files import find_model
from engine.packed_weights import write_packed

logger = logging.getLogger("chorus.model")

SUPPORTED_ARCHITECTURES = frozenset(
    {"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "SmolLM3ForCausalLM"}
)

CHAT_END_TOKENS = ("<|im_end|>", "<|eot_id|>", "<|end|>", "<end_of_turn>")
"""End a turn in chat templates; some models' configs name only the end of a document."""

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model in eval mode, without gradients, on `device`.

    vocab_size: number of logits (the tokenizer may know fewer ids). sliding_window: keys that a row of a sliding layer
    sees, itself included; None when all layers see everything.
    """

    model: PreTrainedModel
    path: Path
    dtype: torch.dtype
    device: torch.device
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    sliding_window: int | None
    eos_token_ids: frozenset[int]


def resolve_model(config: EngineConfig) -> Path:
    """The local folder of `config.model`, fetched or converted if need be. Raises ModelLoadError."""
    return find_model(config.model, config.cache_dir, convert=convert_gguf, with_code=config.trust_remote_code)


def load_model(
    path: Path,
    dtype: str = "auto",
    device: str = "auto",
    trust_remote_code: bool = False,
    attn_implementation: str = "sdpa",
) -> LoadedModel:
    """Load the model in folder `path`. dtype, device: as in EngineConfig. attn_implementation: a registered name.

    Raises ModelLoadError for what is not supported (naming it) and for whatever transformers does not get through.
    """
    torch_device = resolve_device(device)
    torch_dtype = resolve_dtype(dtype, torch_device)
    options: dict[str, Any] = {"local_files_only": True, "trust_remote_code": trust_remote_code}
    try:
        config = AutoConfig.from_pretrained(path, **options)
        _check_supported(config)
        model, report = AutoModelForCausalLM.from_pretrained(
            path,
            config=config,
            dtype=torch_dtype,
            attn_implementation=attn_implementation,
            output_loading_info=True,
            **options,
        )
        _check_complete(report)
        eos_token_ids = _eos_token_ids(model, AutoTokenizer.from_pretrained(path, **options))
        model = model.to(torch_device).eval().requires_grad_(False)
    except ModelLoadError:
        raise
    except Exception as exc:  # transformers raises nearly everything; the operator wants the file and the reason
        raise ModelLoadError(f"cannot load model {path}: {_line(exc)}") from exc
    return _described(model, path, torch_dtype, torch_device, eos_token_ids)


def _described(
    model: PreTrainedModel, path: Path, dtype: torch.dtype, device: torch.device, eos_token_ids: frozenset[int]
) -> LoadedModel:
    config = model.config
    num_heads: int = config.num_attention_heads
    return LoadedModel(
        model=model,
        path=path,
        dtype=dtype,
        device=device,
        num_layers=config.num_hidden_layers,
        num_heads=num_heads,
        num_kv_heads=getattr(config, "num_key_value_heads", None) or num_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // num_heads,
        vocab_size=model.get_output_embeddings().weight.shape[0],
        max_position_embeddings=config.max_position_embeddings,
        sliding_window=_sliding_window(config),
        eos_token_ids=eos_token_ids,
    )


@contextmanager
def memory_errors() -> Iterator[None]:
    """torch's ways to say that a device's memory does not suffice, as MemoryError."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise MemoryError(str(error)) from error
    except RuntimeError as error:
        if "can't allocate memory" in str(error):  # torch has no type for it on a CPU
            raise MemoryError(str(error)) from error
        raise


def resolve_device(device: str) -> torch.device:
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError) as exc:
        raise ModelLoadError(f"device {device!r} cannot be used: {_line(exc)}") from exc


def resolve_dtype(dtype: str, device: torch.device) -> torch.dtype:
    """auto: bfloat16 where the processor computes in it (elsewhere it is slower than float32 and less exact)."""
    if dtype != "auto":
        if dtype not in DTYPES:
            raise ModelLoadError(f"dtype {dtype!r} is not one of auto, {', '.join(DTYPES)}")
        return DTYPES[dtype]
    if device.type == "cuda":
        fast = torch.cuda.get_device_capability(device)[0] >= 8
    else:
        capabilities = torch.cpu.get_capabilities()
        fast = device.type == "cpu" and bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16"))
    return torch.bfloat16 if fast else torch.float32


def convert_gguf(gguf: Path, folder: Path) -> None:
    """Write `gguf` into the empty `folder` as bfloat16 safetensors with config, generation config and tokenizer.

    Beside them go the file's own blocks, where the native step can compute from them (`engine.packed_weights`).

    Raises OSError when it cannot be written, ModelLoadError when it cannot be read.
    """
    source: dict[str, Any] = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
    try:
        config = AutoConfig.from_pretrained(**source)
        _check_supported(config)
        # Given the config, transformers does not read the metadata once more, which takes seconds. Without `dequantize`
        # it keeps the weights packed and computes on slow paths.
        model = AutoModelForCausalLM.from_pretrained(
            **source, config=config, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
        )
        tokenizer = AutoTokenizer.from_pretrained(**source)
        _repair_tokenizer(tokenizer, gguf)
    except ModelLoadError:
        raise
    except Exception as exc:
        raise ModelLoadError(f"cannot read GGUF file {gguf}: {_line(exc)}") from exc
    model.config._name_or_path = gguf.stem
    try:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        num_heads: int = config.num_attention_heads
        write_packed(gguf, folder, num_heads, getattr(config, "num_key_value_heads", None) or num_heads)
    except OSError:
        raise
    except Exception as exc:  # safetensors reports a full disk as an error of its own
        raise OSError(_line(exc)) from exc


def _repair_tokenizer(tokenizer: PreTrainedTokenizerBase, gguf: Path) -> None:
    """SmolLM splits every digit off; transformers' GGUF reader does not know that and would join spaces with digits."""
    metadata, _ = read_gguf_metadata(str(gguf), ())
    if metadata.get("tokenizer.ggml.pre") == "smollm":
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )


def _check_supported(config: PretrainedConfig) -> None:
    by_type = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type, config.model_type)  # GGUF files name no class
    architecture = (config.architectures or [by_type])[0]
    if architecture not in SUPPORTED_ARCHITECTURES:
        known = ", ".join(sorted(SUPPORTED_ARCHITECTURES))
        raise ModelLoadError(f"architecture {architecture} is not supported (supported: {known})")
    quantization = getattr(config, "quantization_config", None)
    if quantization:
        method = (
            quantization.get("quant_method", "?") if isinstance(quantization, dict) else type(quantization).__name__
        )
        raise ModelLoadError(f"weights quantized by {method} are not supported; use plain safetensors or a GGUF file")


def _check_complete(report: dict[str, Any]) -> None:
    """Weights that a checkpoint lacks would be served as random numbers."""
    missing = sorted(report.get("missing_keys", ()))
    if missing:
        raise ModelLoadError(f"the checkpoint lacks {len(missing)} tensors, the first is {missing[0]}")


def _sliding_window(config: PretrainedConfig) -> int | None:
    layer_types = getattr(config, "layer_types", None)
    if layer_types is not None and "sliding_attention" not in layer_types:
        return None
    if not getattr(config, "use_sliding_window", True):
        return None
    return getattr(config, "sliding_window", None)


def _eos_token_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    generation: GenerationConfig | None = model.generation_config
    return end_token_ids((generation and generation.eos_token_id, model.config.eos_token_id), tokenizer)


def end_token_ids(told: Iterable[int | list[int] | None], tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """All ids that end an answer, wherever the model's makers wrote them down. told: by its configurations."""
    ids: set[int] = set()
    for value in (*told, tokenizer.eos_token_id):
        ids.update([value] if isinstance(value, int) else value or ())
    template = json.dumps(tokenizer.chat_template) if tokenizer.chat_template else ""
    special = set(tokenizer.all_special_tokens)
    ids.update(tokenizer.convert_tokens_to_ids(t) for t in CHAT_END_TOKENS if t in special and t in template)
    return frozenset(ids)


def _line(exc: BaseException) -> str:
    return (str(exc).strip() or type(exc).__name__).split("\n", 1)[0]
