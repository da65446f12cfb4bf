"""What the files of a sentence-transformers model say of how a text becomes a vector. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.config import ModelLoadError

POOLING_FLAGS = {
    "cls": "pooling_mode_cls_token",
    "mean": "pooling_mode_mean_tokens",
    "max": "pooling_mode_max_tokens",
    "mean_sqrt_len": "pooling_mode_mean_sqrt_len_tokens",
    "weightedmean": "pooling_mode_weightedmean_tokens",
    "lasttoken": "pooling_mode_lasttoken",
}
"""Names of ways to pool, and the older way to say which."""


@dataclass(frozen=True, slots=True)
class EmbeddingFiles:
    """transformer: the folder of weights and tokenizer. max_seq_length: None where only the model itself bounds it.

    smaller_dimensions: what the model was made to be cut to; True for any.
    """

    transformer: Path
    pooling: str
    normalize: bool
    max_seq_length: int | None
    lower_case: bool
    prefix: str
    smaller_dimensions: Sequence[int] | bool


TOKENIZERS = ("tokenizer.json", "tokenizer.model", "sentencepiece.bpe.model", "vocab.json", "vocab.txt")


def read_embedding_files(folder: Path) -> EmbeddingFiles:
    """Raises ModelLoadError naming what is missing or not supported: a guess would give vectors, but other ones."""
    modules = _read(folder / "modules.json", kind=list)
    try:
        kinds = [str(module["type"]).rpartition(".")[2] for module in modules]
        paths = [folder / module["path"] for module in modules]
    except (KeyError, TypeError):
        raise ModelLoadError(f"{folder / 'modules.json'} cannot be read") from None
    for kind in kinds:
        if kind not in ("Transformer", "Pooling", "Normalize"):
            raise ModelLoadError(f"embedding model {folder}: its module {kind} is not supported")
    if kinds not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
        raise ModelLoadError(f"embedding model {folder}: its modules {', '.join(kinds)} are not supported")
    if not any((paths[0] / name).is_file() for name in TOKENIZERS):
        raise ModelLoadError(f"embedding model {paths[0]} has no tokenizer ({', '.join(TOKENIZERS)})")
    sentences = _sentence_config(paths[0])
    return EmbeddingFiles(
        transformer=paths[0],
        pooling=_pooling(paths[1] / "config.json"),
        normalize="Normalize" in kinds,
        max_seq_length=sentences.get("max_seq_length"),
        lower_case=bool(sentences.get("do_lower_case")),
        prefix=_prefix(folder / "config_sentence_transformers.json"),
        smaller_dimensions=_smaller_dimensions(_read(paths[0] / "config.json")),
    )


def _read(path: Path, kind: type = dict) -> Any:
    try:
        value = json.loads(path.read_bytes())
    except OSError as error:
        reason = "is not there" if isinstance(error, FileNotFoundError) else f"cannot be read: {error.strerror}"
        raise ModelLoadError(f"embedding models are sentence-transformers': {path} {reason}") from None
    except ValueError as error:
        raise ModelLoadError(f"{path} is not JSON: {error}") from None
    if not isinstance(value, kind):
        raise ModelLoadError(f"{path} cannot be read")
    return value


def _sentence_config(folder: Path) -> dict[str, Any]:
    """Its name is sentence_bert_config.json, or another architecture's."""
    found = sorted(folder.glob("sentence_*_config.json"))
    return dict(_read(found[0])) if found else {}


def _pooling(path: Path) -> str:
    config = _read(path)
    if not config.get("include_prompt", True):
        raise ModelLoadError(f"{path}: pooling without the prompt is not supported")
    named = config.get("pooling_mode")
    modes = [named] if isinstance(named, str) else [mode for mode, flag in POOLING_FLAGS.items() if config.get(flag)]
    if len(modes) != 1 or modes[0] not in POOLING_FLAGS:
        raise ModelLoadError(f"{path}: pooling by {' and '.join(modes) or 'nothing'} is not supported")
    return str(modes[0])


def _prefix(path: Path) -> str:
    """What the model's makers have before every text, if anything."""
    if not path.is_file():
        return ""
    config = _read(path)
    name = config.get("default_prompt_name")
    return "" if name is None else str((config.get("prompts") or {}).get(name, ""))


def _smaller_dimensions(config: dict[str, Any]) -> Sequence[int] | bool:
    named = config.get("matryoshka_dimensions")
    if isinstance(named, list):
        return [dimensions for dimensions in named if isinstance(dimensions, int) and dimensions > 0]
    return bool(config.get("is_matryoshka"))
