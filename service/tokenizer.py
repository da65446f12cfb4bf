"""Text to tokens and back. The only room of the service that imports transformers, and only once a model is loaded."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from engine.config import ModelLoadError

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend
    from transformers import PreTrainedTokenizerBase

Message = Mapping[str, object]


class TemplateError(Exception):
    """The chat template refuses these messages; `str()` is what it says about them, without its source."""


class Tokenizer(Protocol):
    """Every method may be called from any thread.

    strips_leading_space: decoding a whole text drops one space at its start (sentencepiece's dummy prefix).
    """

    vocab_size: int
    strips_leading_space: bool

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Spellings of special tokens in `text` become those tokens."""
        ...

    def render_chat(self, messages: Sequence[Message]) -> list[int]:
        """The prompt that asks for the assistant's next message.

        Spellings of special tokens inside message strings stay plain text; without any, the ids are those that
        transformers' own apply_chat_template gives. Raises TemplateError.
        """
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """The token's exact bytes, which need not be whole characters; b"" for an id that stands for nothing."""
        ...

    def is_special(self, token_id: int) -> bool:
        """Whether the token is no part of the text."""
        ...


class ByteTokenizer:
    """For the fake engine: ids 0..255 are bytes, the rest markers. A chat is <|start|>role, newline, content<|end|>."""

    vocab_size = 259
    strips_leading_space = False
    markers: Mapping[str, int] = {"<|eos|>": 256, "<|start|>": 257, "<|end|>": 258}

    def __init__(self) -> None:
        self._markers_re = re.compile("(" + "|".join(map(re.escape, self.markers)) + ")")

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        token_ids: list[int] = []
        for piece in self._markers_re.split(text):
            token_ids += [self.markers[piece]] if piece in self.markers else piece.encode()
        return token_ids

    def render_chat(self, messages: Sequence[Message]) -> list[int]:
        token_ids: list[int] = []
        for position, message in enumerate(messages):
            if message["role"] == "system" and position > 0:
                raise TemplateError("The system message must come first.")
            text = f"{message['role']}\n{message.get('content') or ''}"
            token_ids += [self.markers["<|start|>"], *text.encode(), self.markers["<|end|>"]]
        return [*token_ids, self.markers["<|start|>"], *b"assistant\n"]

    def token_bytes(self, token_id: int) -> bytes:
        if self.is_special(token_id):
            return next((text.encode() for text, marker in self.markers.items() if marker == token_id), b"")
        return bytes([token_id])

    def is_special(self, token_id: int) -> bool:
        return token_id > 255


class HFTokenizer:
    """A fast tokenizer of transformers.

    Encoding goes to the `tokenizers` object below it: transformers' own calls set truncation on that shared object,
    which fails while another thread uses it.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._backend: Backend = tokenizer.backend_tokenizer
        added = self._backend.get_added_tokens_decoder()
        self._added = {token_id: token.content.encode() for token_id, token in added.items()}
        self._special = {token_id for token_id, token in added.items() if token.special}
        self._special.update(tokenizer.all_special_ids)
        self._piece_bytes, self.strips_leading_space = _decoder_rules(self._backend)
        self._byte_level = self._piece_bytes is _byte_level_bytes
        self.vocab_size = self._backend.get_vocab_size(with_added_tokens=True)
        # what a template writes itself separates messages even where the tokenizer does not call it special
        template = str(tokenizer.chat_template or "")
        control = {
            token.content: token_id
            for token_id, token in added.items()
            if token_id in self._special or (token.content in template and not token.content.isspace())
        }
        self._control = control
        self._control_re = re.compile("|".join(map(re.escape, sorted(control, key=len, reverse=True))) or "(?!)")
        self._plain_backend = _without_added_tokens(self._backend)
        self._guards = {guard: self._encode_with(self._backend, guard) for guard in ("\n", "\x01")}

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        token_ids: list[int] = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        return token_ids

    def render_chat(self, messages: Sequence[Message]) -> list[int]:
        marker = _unused_character(json.dumps(messages, ensure_ascii=False, default=dict))
        rendered = self._render([_mark(message, self._control_re, marker) for message in messages])
        # [text, control token in a user's string, text, ..., text]; None stands for a marker that a template parted
        first, *rest = re.split(f"{marker}({self._control_re.pattern}){marker}|{marker}", rendered)
        token_ids = self._encode_with(self._backend, first)
        for position, piece in enumerate(rest, start=1):
            if piece:
                token_ids += self._encode_plainly(piece) if position % 2 else self._continue_with(self._backend, piece)
        return token_ids

    def token_bytes(self, token_id: int) -> bytes:
        if token_id in self._added:
            return self._added[token_id]
        piece = self._backend.id_to_token(token_id)
        return b"" if piece is None else self._piece_bytes(piece)

    def is_special(self, token_id: int) -> bool:
        return token_id in self._special

    def _render(self, messages: list[Any]) -> str:
        from jinja2.exceptions import TemplateError as JinjaError

        if self._tokenizer.chat_template is None:
            raise TemplateError("This model has no chat template; use /v1/completions.")
        try:
            text = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except JinjaError as error:
            raise TemplateError(str(error.message)) from error
        except Exception as error:
            # a template is a sandboxed program run on the client's data: whatever it trips over is in that data
            raise TemplateError(f"The chat template cannot render these messages: {error}") from error
        return str(text)

    def _encode_with(self, backend: Backend, text: str) -> list[int]:
        token_ids: list[int] = backend.encode(text, add_special_tokens=False).ids
        return token_ids

    def _continue_with(self, backend: Backend, piece: str) -> list[int]:
        """Encode a piece that text precedes: sentencepiece would put its dummy space before it."""
        if not self._byte_level:
            for guard, guard_ids in self._guards.items():
                token_ids = self._encode_with(backend, guard + piece)
                # unless the two have merged
                if token_ids[: len(guard_ids)] == guard_ids:
                    return token_ids[len(guard_ids) :]
        return self._encode_with(backend, piece)

    def _encode_plainly(self, spelling: str) -> list[int]:
        token_ids = self._continue_with(self._plain_backend, spelling)
        if self._control[spelling] in token_ids:
            # some vocabularies reach a control token by merging plain text: keep its halves apart
            halves = spelling[:1], spelling[1:]
            token_ids = [t for half in halves for t in self._continue_with(self._plain_backend, half)]
        return token_ids


def load_tokenizer(path: str | None) -> Tokenizer:
    """The tokenizer of the model in a local folder, or the fake engine's. Takes seconds. Raises ModelLoadError."""
    if path is None:
        return ByteTokenizer()
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise ModelLoadError(f"no tokenizer can be loaded from {path}: {error}") from error
    if not hasattr(tokenizer, "backend_tokenizer"):
        raise ModelLoadError(f"the tokenizer {type(tokenizer).__name__} is not supported: it is no fast tokenizer")
    return HFTokenizer(tokenizer)


def _unused_character(text: str) -> str:
    return next(character for character in map(chr, range(0xF0000, 0xFFFFE)) if character not in text)


def _mark(value: Any, control_re: re.Pattern[str], marker: str) -> Any:
    """Put markers around control tokens in every string of a message; keys stay."""
    match value:
        case str():
            return control_re.sub(lambda match: f"{marker}{match.group()}{marker}", value)
        case Mapping():
            return {key: _mark(inner, control_re, marker) for key, inner in value.items()}
        case list() | tuple():
            return [_mark(inner, control_re, marker) for inner in value]
    return value


def _without_added_tokens(backend: Backend) -> Backend:
    from tokenizers import Tokenizer as Backend

    state = json.loads(backend.to_str())
    state["added_tokens"] = []
    return Backend.from_str(json.dumps(state))


def _byte_table() -> dict[str, int]:
    """GPT-2's printable character for each byte, inverted."""
    kept = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = [byte for byte in range(256) if byte not in set(kept)]
    return {chr(byte): byte for byte in kept} | {chr(256 + k): byte for k, byte in enumerate(moved)}


_BYTE_OF = _byte_table()
_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_level_bytes(piece: str) -> bytes:
    if all(character in _BYTE_OF for character in piece):
        return bytes(_BYTE_OF[character] for character in piece)
    return piece.encode()


def _sentencepiece_bytes(piece: str) -> bytes:
    if match := _BYTE_PIECE.fullmatch(piece):
        return bytes([int(match.group(1), 16)])
    return piece.replace("▁", " ").encode()


def _decoder_rules(backend: Backend) -> tuple[Callable[[str], bytes], bool]:
    """How this tokenizer's pieces become bytes, and whether a space at the very start goes."""
    decoder = json.loads(backend.to_str())["decoder"] or {"type": "none"}
    steps = {step["type"]: step for step in decoder.get("decoders", [decoder])}
    if "ByteLevel" in steps:
        return _byte_level_bytes, False
    if "Metaspace" in steps:
        return _sentencepiece_bytes, steps["Metaspace"].get("prepend_scheme") != "never"
    if "Replace" in steps and steps["Replace"].get("content") == " ":
        return _sentencepiece_bytes, steps.get("Strip", {}).get("start", 0) > 0
    raise ModelLoadError(f"the tokenizer's decoder ({', '.join(steps)}) is not supported")
