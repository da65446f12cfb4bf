"""A real embedding model against plain transformers and its own files, and what becomes of files that say otherwise."""

from __future__ import annotations

import json
import math
import shutil
from array import array
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModel, AutoTokenizer, BertConfig, BertModel

from engine.api import EmbedRequest
from engine.config import EngineConfig, ModelLoadError
from engine.embedder import TorchEmbedder, load_embedder, pooled
from engine.embedding_files import POOLING_FLAGS, read_embedding_files
from service.tokenizer import load_encoder
from tests.contract.torch_engine import minilm
from tests.minilm import DIMENSIONS, minilm_folder

TEXTS = [
    "The cat sits on the mat.",
    "A feline rests on a rug.",
    "Shares of the bank fell by 3% today.",
    "naïve café 世界 🧪🧪",
    "x",
    "word " * 200,
]


@cache
def reference(text: str) -> list[float]:
    """As the model's makers show it, one text at a time: mean over the tokens, then length 1."""
    tokenizer = AutoTokenizer.from_pretrained(minilm_folder())
    model = AutoModel.from_pretrained(minilm_folder(), attn_implementation="eager", dtype=torch.float32).eval()
    given = tokenizer([text], padding=True, truncation=True, max_length=256, return_tensors="pt")
    with torch.no_grad():
        hidden = model(**given).last_hidden_state
    mask = given["attention_mask"].unsqueeze(-1).float()
    mean = (hidden * mask).sum(1) / mask.sum(1).clamp(min=1e-9)
    vector: list[float] = torch.nn.functional.normalize(mean, p=2, dim=1)[0].tolist()
    return vector


@cache
def token_ids(text: str) -> tuple[int, ...]:
    return tuple(load_encoder(str(minilm_folder())).encode(text, add_special_tokens=True))


def embed(embedder: TorchEmbedder, *rows: EmbedRequest) -> list[list[float]]:
    vectors = embedder.embed(rows)
    assert all(isinstance(vector, array) for vector in vectors)
    return [vector.tolist() for vector in vectors if vector is not None]


def test_vectors_are_those_of_plain_transformers() -> None:
    made = embed(minilm(), *(EmbedRequest(token_ids(text)) for text in TEXTS))
    for text, vector in zip(TEXTS, made, strict=True):
        assert vector == pytest.approx(reference(text), abs=2e-6), text[:30]
    near, far = (math.sumprod(made[0], made[k]) for k in (1, 2)) if hasattr(math, "sumprod") else _cosines(made)
    assert near > 0.5 > 0.2 > far, "what means the same is near"


def _cosines(made: list[list[float]]) -> tuple[float, float]:
    near, far = (sum(a * b for a, b in zip(made[0], made[k], strict=True)) for k in (1, 2))
    return near, far


def test_vectors_are_the_same_in_whatever_batch_and_padding() -> None:
    rows = [EmbedRequest(token_ids(text)) for text in TEXTS]
    alone = [embed(minilm(), row)[0] for row in rows]
    for order in (rows, rows[::-1], rows * 3):
        for row, vector in zip(order, embed(minilm(), *order), strict=True):
            assert vector == pytest.approx(alone[rows.index(row)], abs=2e-6)


def test_its_tokenizer_neither_cuts_nor_pads_although_its_file_says_so() -> None:
    """The file asks for 128 tokens, cut or padded."""
    tokenizer = AutoTokenizer.from_pretrained(minilm_folder())
    for text in (*TEXTS, "word " * 1000):
        assert list(token_ids(text)) == tokenizer(text, truncation=False, padding=False, verbose=False)["input_ids"]


def test_what_its_files_say_is_what_is_told() -> None:
    info = minilm().info
    assert (info.max_model_len, info.dimensions, info.vocab_size) == (256, DIMENSIONS, 30522)
    assert tuple(info.smaller_dimensions) == ()
    files = read_embedding_files(minilm_folder())
    assert (files.pooling, files.normalize, files.prefix, files.lower_case) == ("mean", True, "", False)


def test_rows_that_are_not_finite_have_no_vector(tmp_path: Path) -> None:
    embedder = load(small_model(tmp_path))
    with torch.no_grad():
        embedder._model.get_input_embeddings().weight[7] = math.inf
    first, second = embedder.embed([EmbedRequest((7, 2)), EmbedRequest((3, 2))])
    assert first is None and second is not None


@pytest.mark.parametrize(
    ("pooling", "expected"),
    [
        ("cls", [1.0, 10.0]),
        ("mean", [2.0, 6.0]),
        ("max", [3.0, 10.0]),
        ("mean_sqrt_len", [6 / math.sqrt(3), 18 / math.sqrt(3)]),
        ("weightedmean", [(1 + 4 + 9) / 6, (10 + 12 + 6) / 6]),
        ("lasttoken", [3.0, 2.0]),
    ],
)
def test_each_way_to_pool_leaves_padding_out(pooling: str, expected: list[float]) -> None:
    hidden = torch.tensor([[[1.0, 10], [2, 6], [3, 2], [99, 99]], [[5.0, 5]] * 4])
    mask = torch.tensor([[True, True, True, False], [True] * 4])
    first, second = pooled(hidden, mask, pooling).tolist()
    assert first == pytest.approx(expected)
    assert second == pytest.approx([10.0, 10] if pooling == "mean_sqrt_len" else [5.0, 5])


def small_model(folder: Path, **config: Any) -> Path:
    """A random BERT with MiniLM's tokenizer and the files of sentence-transformers."""
    torch.manual_seed(3)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
    BertModel(BertConfig(vocab_size=30522, max_position_embeddings=40, **sizes, **config)).save_pretrained(folder)
    for name in ("modules.json", "sentence_bert_config.json", "tokenizer.json", "tokenizer_config.json", "1_Pooling"):
        source = minilm_folder() / name
        (shutil.copytree if source.is_dir() else shutil.copy)(source, folder / name)
    return folder


def change(path: Path, **more: Any) -> None:
    content = json.loads(path.read_text()) | more if path.exists() else more
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not ...}))


def load(folder: Path) -> TorchEmbedder:
    embedder = load_embedder(EngineConfig(embedding_model=str(folder), served_embedding_model_name="e"))
    assert embedder is not None
    return embedder


def test_a_model_that_was_made_for_it_can_be_cut(tmp_path: Path) -> None:
    folder = small_model(tmp_path)
    (whole,) = embed(load(folder), EmbedRequest((5, 6, 7)))
    change(folder / "config.json", matryoshka_dimensions=[4, 8])
    assert list(load(folder).info.smaller_dimensions) == [4, 8]
    change(folder / "config.json", matryoshka_dimensions=..., is_matryoshka=True)
    embedder = load(folder)
    assert list(embedder.info.smaller_dimensions) == list(range(1, 16))
    short, same = embed(embedder, EmbedRequest((5, 6, 7), dimensions=4), EmbedRequest((5, 6, 7), dimensions=16))
    assert short == pytest.approx([value / math.hypot(*whole[:4]) for value in whole[:4]], abs=1e-6)
    assert same == pytest.approx(whole, abs=1e-6)


def test_vectors_keep_their_length_where_the_model_does_not_normalize(tmp_path: Path) -> None:
    folder = small_model(tmp_path)
    (unit,) = embed(load(folder), EmbedRequest((5, 6, 7)))
    modules = json.loads((folder / "modules.json").read_text())
    (folder / "modules.json").write_text(json.dumps(modules[:2]))
    (plain,) = embed(load(folder), EmbedRequest((5, 6, 7)))
    length = math.hypot(*plain)
    assert abs(length - 1) > 1e-3
    assert [value / length for value in plain] == pytest.approx(unit, abs=1e-6)


def test_the_files_limit_prefix_and_case_are_kept(tmp_path: Path) -> None:
    folder = small_model(tmp_path)
    assert load(folder).info.max_model_len == 40, "the model's own positions"
    change(folder / "sentence_bert_config.json", max_seq_length=24, do_lower_case=True)
    prompts = {"query": "query: ", "document": "passage: "}
    change(folder / "config_sentence_transformers.json", prompts=prompts, default_prompt_name="query")
    info = load(folder).info
    assert (info.max_model_len, info.prefix, info.lower_case) == (24, "query: ", True)


@pytest.mark.parametrize("mode", list(POOLING_FLAGS))
def test_the_way_to_pool_is_read_in_both_spellings(tmp_path: Path, mode: str) -> None:
    folder = small_model(tmp_path)
    flags = {flag: name == mode for name, flag in POOLING_FLAGS.items()}
    change(folder / "1_Pooling" / "config.json", **flags)
    assert read_embedding_files(folder).pooling == mode
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode": mode}))
    assert read_embedding_files(folder).pooling == mode


def _dense(folder: Path) -> None:
    modules = json.loads((folder / "modules.json").read_text())
    modules.insert(2, {"idx": 2, "name": "2", "path": "2_Dense", "type": "sentence_transformers.models.Dense"})
    (folder / "modules.json").write_text(json.dumps(modules))


BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "no modules": (lambda folder: (folder / "modules.json").unlink(), "modules.json is not there"),
    "modules are no list": (lambda folder: (folder / "modules.json").write_text("{}"), "modules.json cannot be read"),
    "modules are nothing": (lambda folder: (folder / "modules.json").write_text("[3]"), "modules.json cannot be read"),
    "no JSON": (lambda folder: (folder / "modules.json").write_text("{"), "is not JSON"),
    "dense": (_dense, "module Dense is not supported"),
    "two ways to pool": (
        lambda folder: change(folder / "1_Pooling" / "config.json", pooling_mode_cls_token=True),
        "pooling by cls and mean is not supported",
    ),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), "cannot load embedding model"),
    "no tokenizer": (
        lambda folder: (folder / "tokenizer.json").unlink(),
        "has no tokenizer",
    ),
    "more layers than weights": (
        lambda folder: change(folder / "config.json", num_hidden_layers=2),
        "the embedding model's checkpoint lacks 16 tensors",
    ),
}


@pytest.mark.parametrize("broken", list(BROKEN))
def test_what_cannot_be_served_ends_the_load_with_its_name(tmp_path: Path, broken: str) -> None:
    folder = small_model(tmp_path)
    breaks, message = BROKEN[broken]
    breaks(folder)
    with pytest.raises(ModelLoadError, match=message) as caught:
        load(folder)
    assert str(folder) in str(caught.value) or "tensors" in message


@pytest.mark.parametrize("model", ["/no/such/folder", "a/b/c", __file__])
def test_a_model_that_is_nowhere_is_named(model: str) -> None:
    with pytest.raises(ModelLoadError, match=f"embedding model '{model}'"):
        load_embedder(EngineConfig(embedding_model=model))


def test_none_is_loaded_where_none_is_wanted() -> None:
    assert load_embedder(EngineConfig()) is None
