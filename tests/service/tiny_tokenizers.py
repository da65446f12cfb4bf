"""Tokenizers of the two families that causal models use, small enough to be made in a test."""

from __future__ import annotations

import json
from functools import cache

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from service.tokenizer import HFTokenizer

TEXTS = [
    "hello world, hello there",
    "the cat  sat\n\non the mat",
    "naïve café 世界 🧪🧪",
    "def f(x):\n    return x + 1",
]
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role == 'tool' %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}"
    "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ["<|im_start|>", "<|im_end|>"]
ADDED = ["<tool_call>", "<think>"]


@cache
def byte_level() -> Tokenizer:
    """As GPT-2, Llama 3, Qwen, SmolLM."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=320, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(TEXTS, trainer)
    return _with_added_tokens(tokenizer)


@cache
def sentencepiece() -> Tokenizer:
    """As Llama 2, Mistral, Phi 3: a dummy space before the text, bytes for characters outside the vocabulary."""
    trained = Tokenizer(models.BPE())
    trained.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    trained.train_from_iterator(
        ["hello world, hello there", TEXTS[1]], trainers.BpeTrainer(vocab_size=90, show_progress=False)
    )
    model = json.loads(trained.to_str())["model"]
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *model["vocab"]]
    vocab = {piece: token_id for token_id, piece in enumerate(pieces)}
    merges = [tuple(merge) for merge in model["merges"]]
    tokenizer = Tokenizer(models.BPE(vocab, merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = trained.normalizer
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return _with_added_tokens(tokenizer)


def _with_added_tokens(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in ADDED])
    return tokenizer


@cache
def wrapped(family: str, chat_template: str | None = CHAT_TEMPLATE) -> tuple[HFTokenizer, PreTrainedTokenizerFast]:
    """Ours, and the transformers tokenizer that it wraps."""
    backend = {"byte_level": byte_level, "sentencepiece": sentencepiece}[family]()
    theirs = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>")
    theirs.chat_template = chat_template
    return HFTokenizer(theirs), theirs
