"""Texts' tokens to vectors: a sentence-transformers model by transformers' own code, padded batches, in float32."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModel, AutoTokenizer, PretrainedConfig

from engine.api import EmbeddingInfo, EmbedRequest
from engine.config import EngineConfig, ModelLoadError
from engine.embedding_files import EmbeddingFiles, read_embedding_files
from engine.model import DTYPES, memory_errors, resolve_device
from engine.model_files import find_embedding_model

POSITIONS_AFTER_PADDING = frozenset({"camembert", "mpnet", "roberta", "xlm-roberta"})
"""Model types whose first token has the position after the padding token's id."""


def load_embedder(config: EngineConfig) -> TorchEmbedder | None:
    """The configured embedding model, None where there is none. Raises ModelLoadError."""
    if config.embedding_model is None:
        return None
    files = read_embedding_files(find_embedding_model(config.embedding_model))
    device = resolve_device(config.device)
    dtype = torch.float32 if config.dtype == "auto" else DTYPES[config.dtype]
    options: dict[str, Any] = {"attn_implementation": "sdpa", "local_files_only": True, "use_safetensors": True}
    try:
        tokenizer = AutoTokenizer.from_pretrained(files.transformer, local_files_only=True)
        model, report = AutoModel.from_pretrained(files.transformer, dtype=dtype, output_loading_info=True, **options)
        _check_complete(report)
        model = model.to(device).eval().requires_grad_(False)
    except ModelLoadError:
        raise
    except Exception as error:  # transformers raises nearly everything; the operator wants the place and the reason
        raise ModelLoadError(f"cannot load embedding model {files.transformer}: {_line(error)}") from error
    limit = _max_model_len(files, model.config, int(tokenizer.model_max_length))
    return TorchEmbedder(model, files, config.served_embedding_model_name, limit, tokenizer.pad_token_id or 0)


class TorchEmbedder:
    """See engine.embedding.Embedder."""

    def __init__(self, model: Any, files: EmbeddingFiles, name: str, max_model_len: int, pad_token_id: int) -> None:
        dimensions = int(model.config.hidden_size)
        smaller = files.smaller_dimensions
        if isinstance(smaller, bool):
            smaller = range(1, dimensions) if smaller else ()
        model.config.use_cache = False  # of decoders that serve as encoders
        self._model = model
        self._files = files
        self._pad_token_id = pad_token_id
        self.info = EmbeddingInfo(
            model=name,
            max_model_len=max_model_len,
            dimensions=dimensions,
            smaller_dimensions=smaller,
            vocab_size=model.get_input_embeddings().weight.shape[0],
            model_path=str(files.transformer),
            prefix=files.prefix,
            lower_case=files.lower_case,
        )

    def embed(self, batch: Sequence[EmbedRequest]) -> list[array[float] | None]:
        with memory_errors():
            return self._embed(batch)

    @torch.inference_mode()
    def _embed(self, batch: Sequence[EmbedRequest]) -> list[array[float] | None]:
        rows = [request.token_ids for request in batch]
        longest = max(map(len, rows))
        padded = [[*row, *[self._pad_token_id] * (longest - len(row))] for row in rows]
        device = self._model.device
        mask = torch.arange(longest).unsqueeze(0) < torch.tensor([[len(row)] for row in rows])
        mask = mask.to(device)
        output = self._model(input_ids=torch.tensor(padded, device=device), attention_mask=mask.long())
        vectors = pooled(output.last_hidden_state.float(), mask, self._files.pooling)
        finite = torch.isfinite(vectors).all(dim=1).tolist()
        whole = self._scaled(vectors).cpu()
        made: list[array[float] | None] = []
        for row, (request, is_finite) in enumerate(zip(batch, finite, strict=True)):
            vector = whole[row]
            if request.dimensions is not None and request.dimensions < self.info.dimensions:
                vector = self._scaled(vectors[row : row + 1, : request.dimensions])[0].cpu()
            made.append(array("f", vector.numpy().tobytes()) if is_finite else None)
        return made

    def _scaled(self, vectors: Tensor) -> Tensor:
        return torch.nn.functional.normalize(vectors, dim=-1) if self._files.normalize else vectors


def pooled(hidden: Tensor, mask: Tensor, pooling: str) -> Tensor:
    """[B, D] float32. hidden: [B, T, D] float32. mask: [B, T], true where there is a token; rows begin with theirs."""
    lengths = mask.sum(dim=1, keepdim=True)
    kept = mask.unsqueeze(-1)
    match pooling:
        case "cls":
            return hidden[:, 0]
        case "lasttoken":
            return hidden[torch.arange(len(hidden)), lengths[:, 0] - 1]
        case "max":
            return hidden.masked_fill(~kept, -torch.inf).amax(dim=1)
        case "weightedmean":
            weights = kept * torch.arange(1, hidden.shape[1] + 1, device=hidden.device).view(1, -1, 1)
            return (hidden * weights).sum(dim=1) / weights.sum(dim=1)
    total = (hidden * kept).sum(dim=1)
    return total / (lengths.sqrt() if pooling == "mean_sqrt_len" else lengths)


def _max_model_len(files: EmbeddingFiles, config: PretrainedConfig, tokenizers_limit: int) -> int:
    """The smallest of what the model, its tokenizer and sentence-transformers' files say. Raises ModelLoadError."""
    limits = [files.max_seq_length, tokenizers_limit]
    if (positions := getattr(config, "max_position_embeddings", None)) is not None:
        offset = (config.pad_token_id or 0) + 1 if config.model_type in POSITIONS_AFTER_PADDING else 0
        limits.append(positions - offset)
    limit = min(limit for limit in limits if limit is not None)
    if limit < 1:
        raise ModelLoadError(f"embedding model {files.transformer} takes no tokens")
    return limit


def _check_complete(report: dict[str, Any]) -> None:
    """Weights that a checkpoint lacks would be served as random numbers; BERT's own pooler is not used."""
    missing = sorted(name for name in report.get("missing_keys", ()) if not name.startswith("pooler."))
    if missing:
        raise ModelLoadError(f"the embedding model's checkpoint lacks {len(missing)} tensors, such as {missing[0]}")


def _line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).split("\n", 1)[0]
