"""Loading weights: tiny random models of each family, a tiny GGUF file, and the real default model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel, SmolLM3Config, SmolLM3ForCausalLM

from engine.config import EngineConfig, ModelLoadError
from engine.model import convert_gguf, load_model, resolve_device, resolve_dtype, resolve_model
from engine.native.runner import NativeRunner, unsupported_reason
from tests.engine.families import FAMILIES, save_family
from tests.engine.tiny_gguf import SPECIAL_TOKENS, write_tiny_gguf

CPU = torch.device("cpu")


@pytest.fixture
def llama_dir(tmp_path: Path) -> Path:
    save_family("llama", tmp_path)
    return tmp_path


def edit_json(path: Path, **changes: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize("name", FAMILIES)
def test_each_family_loads_with_its_facts(name: str, tmp_path: Path) -> None:
    source = save_family(name, tmp_path)
    loaded = load_model(resolve_model(EngineConfig(model=str(tmp_path))), "float32", "cpu")
    config = source.config
    assert (loaded.num_layers, loaded.num_heads, loaded.num_kv_heads) == (3, 6, 2)
    assert (loaded.vocab_size, loaded.max_position_embeddings) == (311, 1024)
    assert loaded.head_dim == source.model.layers[0].self_attn.head_dim
    assert loaded.sliding_window == (48 if name == "mistral" else None)
    assert loaded.eos_token_ids == {config.eos_token_id}
    assert not loaded.model.training
    assert not any(parameter.requires_grad for parameter in loaded.model.parameters())
    tokens = torch.arange(20)[None]
    with torch.no_grad():
        assert torch.equal(loaded.model(tokens).logits, source(tokens).logits)


def test_smollm3_loads(tmp_path: Path) -> None:
    save_family("llama", tmp_path)  # for its tokenizer
    config = SmolLM3Config(
        vocab_size=311,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        pad_token_id=None,
        eos_token_id=2,
    )
    SmolLM3ForCausalLM(config).save_pretrained(tmp_path)
    loaded = load_model(tmp_path, "float32", "cpu")
    assert (loaded.num_layers, loaded.head_dim, loaded.sliding_window) == (4, 8, None)


def test_end_of_sequence_is_gathered_from_all_that_name_it(llama_dir: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(llama_dir)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_end|>", "<|eot_id|>"]})
    tokenizer.chat_template = "{{ messages[0].content }}<|im_end|>"
    tokenizer.save_pretrained(llama_dir)
    edit_json(llama_dir / "config.json", eos_token_id=[5, 6])
    edit_json(llama_dir / "generation_config.json", eos_token_id=7)
    loaded = load_model(llama_dir, "float32", "cpu")
    end_of_turn = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert loaded.eos_token_ids == {2, 5, 6, 7, end_of_turn}, "<|eot_id|> is not in the template"


def test_window_that_the_model_does_not_use_is_none(tmp_path: Path) -> None:
    save_family("qwen2", tmp_path)
    edit_json(tmp_path / "config.json", use_sliding_window=False, sliding_window=64)
    assert load_model(tmp_path, "float32", "cpu").sliding_window is None


class TestRefused:
    """Each ends in one line that says what is wrong."""

    def refusal(self, folder: Path, **options: str) -> str:
        with pytest.raises(ModelLoadError) as caught:
            load_model(folder, **({"dtype": "float32", "device": "cpu"} | options))
        assert "\n" not in str(caught.value)
        return str(caught.value)

    def test_other_architecture(self, tmp_path: Path) -> None:
        config = GPT2Config(vocab_size=300, n_embd=16, n_layer=1, n_head=2)
        GPT2LMHeadModel(config).save_pretrained(tmp_path)
        assert "architecture GPT2LMHeadModel is not supported" in self.refusal(tmp_path)

    def test_unknown_model_type(self, llama_dir: Path) -> None:
        edit_json(llama_dir / "config.json", model_type="llama99", architectures=None)
        assert "llama99" in self.refusal(llama_dir)

    def test_code_of_a_stranger_is_not_asked_about(self, llama_dir: Path) -> None:
        edit_json(llama_dir / "config.json", model_type="x", auto_map={"AutoConfig": "code.Config"})
        assert "custom code" in self.refusal(llama_dir)

    def test_quantized_checkpoint(self, llama_dir: Path) -> None:
        edit_json(llama_dir / "config.json", quantization_config={"quant_method": "gptq", "bits": 4})
        assert "quantized by gptq" in self.refusal(llama_dir)

    def test_damaged_weights(self, llama_dir: Path) -> None:
        (llama_dir / "model.safetensors").write_bytes(b"\0" * 100)
        assert f"cannot load model {llama_dir}" in self.refusal(llama_dir)

    def test_missing_tensor_is_not_filled_with_random_numbers(self, llama_dir: Path) -> None:
        weights = load_file(llama_dir / "model.safetensors")
        del weights["model.layers.1.mlp.up_proj.weight"]
        save_file(weights, llama_dir / "model.safetensors", {"format": "pt"})
        message = self.refusal(llama_dir)
        assert "lacks 1 tensors, the first is model.layers.1.mlp.up_proj.weight" in message

    def test_tensor_of_another_shape(self, llama_dir: Path) -> None:
        edit_json(llama_dir / "config.json", intermediate_size=128)
        assert "cannot load model" in self.refusal(llama_dir)

    def test_dtype_and_device(self, llama_dir: Path) -> None:
        assert "dtype 'int4' is not one of auto" in self.refusal(llama_dir, dtype="int4")
        assert "device 'abacus' cannot be used" in self.refusal(llama_dir, device="abacus")


@pytest.mark.parametrize(
    ("capabilities", "dtype"),
    [
        ({"avx512_bf16": True}, torch.bfloat16),
        ({"amx_bf16": True}, torch.bfloat16),
        ({"avx512_f": True, "avx512_bf16": False}, torch.float32),
    ],
)
def test_auto_is_bfloat16_only_where_the_cpu_computes_in_it(
    capabilities: dict[str, bool], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
    assert resolve_dtype("auto", CPU) == dtype
    assert resolve_dtype("float16", CPU) == torch.float16


def test_auto_device_is_the_cpu_without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert resolve_device("auto") == CPU
    assert resolve_device("cpu") == CPU


def test_gguf_file_becomes_the_same_model(tmp_path: Path) -> None:
    source = write_tiny_gguf(tmp_path / "tiny.gguf")
    folder = resolve_model(EngineConfig(model=str(tmp_path / "tiny.gguf"), cache_dir=tmp_path / "cache"))
    assert {tensor.dtype for tensor in load_file(folder / "model.safetensors").values()} == {torch.bfloat16}
    loaded = load_model(folder, "float32", "cpu")
    assert loaded.eos_token_ids == {2}
    assert loaded.max_position_embeddings == 128
    tokens = torch.arange(100)[None]
    with torch.no_grad():
        torch.testing.assert_close(loaded.model(tokens).logits, source(tokens).logits)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == (
        "<|im_start|>user\nhi<|im_end|>\n"
    )
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode(SPECIAL_TOKENS[2])) == [SPECIAL_TOKENS[2]]


@pytest.mark.parametrize(("pre_tokenizer", "pieces"), [("smollm", ["ĠĠ", "1", "1"]), ("gpt-2", ["Ġ", "Ġ1", "1"])])
def test_only_smollm_splits_digits_off(tmp_path: Path, pre_tokenizer: str, pieces: list[str]) -> None:
    write_tiny_gguf(tmp_path / "tiny.gguf", pre_tokenizer)
    (tmp_path / "model").mkdir()
    convert_gguf(tmp_path / "tiny.gguf", tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("  11")) == pieces


def test_gguf_of_another_architecture_is_refused_before_it_is_converted(tmp_path: Path) -> None:
    write_tiny_gguf(tmp_path / "tiny.gguf", architecture="gpt2")
    with pytest.raises(ModelLoadError, match="architecture GPT2LMHeadModel is not supported"):
        resolve_model(EngineConfig(model=str(tmp_path / "tiny.gguf"), cache_dir=tmp_path / "cache"))


def test_truncated_gguf_is_one_clear_line(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_tiny_gguf(path)
    path.write_bytes(path.read_bytes()[:2000])
    with pytest.raises(ModelLoadError, match=r"^cannot read GGUF file .*tiny\.gguf: [^\n]+$"):
        resolve_model(EngineConfig(model=str(path), cache_dir=tmp_path / "cache"))


def test_default_model_is_whole(default_model_dir: Path, model_cache_dir: Path) -> None:
    assert resolve_model(EngineConfig(cache_dir=model_cache_dir)) == default_model_dir
    loaded = load_model(default_model_dir, "float32", "cpu")
    assert (loaded.num_layers, loaded.num_kv_heads, loaded.head_dim) == (30, 3, 64)
    assert (loaded.vocab_size, loaded.max_position_embeddings, loaded.eos_token_ids) == (49152, 8192, {2})
    tokenizer = AutoTokenizer.from_pretrained(default_model_dir)
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("a  12")) == ["a", "ĠĠ", "1", "2"]
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}], tokenize=False, add_generation_prompt=True
    )
    tokens = tokenizer(text, return_tensors="pt", add_special_tokens=False)
    output = loaded.model.generate(**tokens, max_new_tokens=12, do_sample=False)
    assert "Paris" in tokenizer.decode(output[0, tokens["input_ids"].shape[1] :])


def test_a_conversion_keeps_the_blocks_that_the_native_step_computes_from(default_model_dir: Path) -> None:
    loaded = load_model(default_model_dir, "bfloat16", "cpu")
    if unsupported_reason(loaded.model, loaded.dtype) is not None:
        pytest.skip("the native step does not run here")
    runner = NativeRunner(loaded, num_pages=1, max_model_len=64, num_threads=1)
    assert runner.num_packed == 30 * 4 + 1, "not all matrices of the file are those of the converted model"
