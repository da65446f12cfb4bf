"""Text to tokens and back. The only room of the service that imports transformers, and only once a model is loaded."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from engine.config import ModelLoadError
from service.templates import PLAIN, Message, TemplateCall, TemplateError, TemplateOptions, template_call
from service.token_bytes import byte_level_bytes, decoder_rules

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend
    from transformers import PreTrainedTokenizerBase


class Encoder(Protocol):
    """Text to tokens and back, for models that write nothing. Every method may be called from any thread."""

    vocab_size: int

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Spellings of special tokens in `text` become those tokens."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """Special tokens are spelled out; U+FFFD stands for bytes that are no characters."""
        ...

    def piece(self, token_id: int) -> str:
        """One token as it may be shown; "" for an id that stands for nothing."""
        ...


class Tokenizer(Encoder, Protocol):
    """Of a model that writes.

    strips_leading_space: decoding a whole text drops one space at its start (sentencepiece's dummy prefix).
    chat_template: its source, "" without one. model_type: as the model's configuration has it. special_spellings: of
    special tokens.
    """

    strips_leading_space: bool
    chat_template: str
    model_type: str | None
    special_spellings: frozenset[str]

    def render_chat(self, messages: Sequence[Message], options: TemplateOptions = PLAIN) -> list[int]:
        """The prompt that asks for the assistant's next message.

        Spellings of special tokens inside message strings stay plain text; without any, the ids are those that
        transformers' own apply_chat_template gives. Raises TemplateError.
        """
        ...

    def call_of(self, template: str, messages: Sequence[Message], options: TemplateOptions) -> TemplateCall:
        """What a client's own template is to be rendered with, elsewhere."""
        ...

    def encode_rendered(self, rendered: str, call: TemplateCall) -> list[int]:
        """The prompt that a rendering is. Raises TemplateError."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """The token's exact bytes, which need not be whole characters; b"" for an id that stands for nothing."""
        ...

    def is_special(self, token_id: int) -> bool:
        """Whether the token is no part of the text."""
        ...


class ByteTokenizer:
    """For the fake engine: ids 0..255 are bytes, the rest markers. A chat is <|start|>role, newline, content<|end|>.

    Tools, before all messages, and calls, behind a content, are JSON.
    """

    vocab_size = 262
    strips_leading_space = False
    chat_template = "{{ messages }} {{ tools }} {{ tool_calls }} {{ enable_thinking }}"
    model_type: str | None = None
    special_spellings = frozenset({"<fim_prefix>", "<fim_suffix>", "<fim_middle>"})
    markers: Mapping[str, int] = {
        "<|eos|>": 256,
        "<|start|>": 257,
        "<|end|>": 258,
        "<fim_prefix>": 259,
        "<fim_suffix>": 260,
        "<fim_middle>": 261,
    }

    def __init__(self) -> None:
        self._markers_re = re.compile("(" + "|".join(map(re.escape, self.markers)) + ")")

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        token_ids: list[int] = []
        for piece in self._markers_re.split(text):
            token_ids += [self.markers[piece]] if piece in self.markers else piece.encode()
        return token_ids

    def render_chat(self, messages: Sequence[Message], options: TemplateOptions = PLAIN) -> list[int]:
        token_ids = [self.markers["<|start|>"], *json.dumps(options.tools).encode()] if options.tools else []
        for position, message in enumerate(messages):
            if message["role"] == "system" and position > 0:
                raise TemplateError("The system message must come first.")
            calls = json.dumps(message["tool_calls"]) if "tool_calls" in message else ""
            text = f"{message['role']}\n{message.get('content') or ''}{calls}"
            token_ids += [self.markers["<|start|>"], *text.encode(), self.markers["<|end|>"]]
        if options.continues_last:
            return token_ids[:-1]
        if not options.generation_prompt:
            return token_ids
        thought = b"" if options.variables.get("enable_thinking", True) else b"<think></think>"
        return [*token_ids, self.markers["<|start|>"], *b"assistant\n", *thought]

    def call_of(self, template: str, messages: Sequence[Message], options: TemplateOptions) -> TemplateCall:
        return template_call(template, messages, options, self.markers)

    def encode_rendered(self, rendered: str, call: TemplateCall) -> list[int]:
        token_ids: list[int] = []
        for position, piece in enumerate(call.pieces(rendered)):
            plain = position % 2
            token_ids += (piece or "").encode() if plain else self.encode(piece or "", add_special_tokens=False)
        return token_ids

    def token_bytes(self, token_id: int) -> bytes:
        if self.is_special(token_id):
            return next((text.encode() for text, marker in self.markers.items() if marker == token_id), b"")
        return bytes([token_id])

    def decode(self, token_ids: Sequence[int]) -> str:
        return b"".join(map(self.token_bytes, token_ids)).decode(errors="replace")

    def piece(self, token_id: int) -> str:
        return self.token_bytes(token_id).decode(errors="replace")

    def is_special(self, token_id: int) -> bool:
        return token_id > 255


class NoTokenizer:
    """Of an engine that reads and writes text itself: what needs tokens has been refused before anybody asks."""

    vocab_size = 0
    strips_leading_space = False
    chat_template = ""
    model_type: str | None = None
    special_spellings: frozenset[str] = frozenset()

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        raise NotImplementedError

    def decode(self, token_ids: Sequence[int]) -> str:
        raise NotImplementedError

    def piece(self, token_id: int) -> str:
        raise NotImplementedError

    def render_chat(self, messages: Sequence[Message], options: TemplateOptions = PLAIN) -> list[int]:
        raise NotImplementedError

    def call_of(self, template: str, messages: Sequence[Message], options: TemplateOptions) -> TemplateCall:
        raise NotImplementedError

    def encode_rendered(self, rendered: str, call: TemplateCall) -> list[int]:
        raise NotImplementedError

    def token_bytes(self, token_id: int) -> bytes:
        raise NotImplementedError

    def is_special(self, token_id: int) -> bool:
        raise NotImplementedError


class HFTokenizer:
    """A fast tokenizer of transformers.

    Encoding goes to the `tokenizers` object below it: transformers' own calls set truncation on that shared object,
    which fails while another thread uses it.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, model_type: str | None = None) -> None:
        self._tokenizer = tokenizer
        self.model_type = model_type
        self._backend: Backend = tokenizer.backend_tokenizer
        added = self._backend.get_added_tokens_decoder()
        self._added = {token_id: token.content.encode() for token_id, token in added.items()}
        self._special = {token_id for token_id, token in added.items() if token.special}
        self._special.update(tokenizer.all_special_ids)
        self.special_spellings = frozenset(token.content for token in added.values())
        self._piece_bytes, self.strips_leading_space = decoder_rules(self._backend)
        self._byte_level = self._piece_bytes is byte_level_bytes
        self.vocab_size = self._backend.get_vocab_size(with_added_tokens=True)
        self.chat_template = str(tokenizer.chat_template or "")
        self._own_control_tokens = self._control_tokens(self.chat_template)
        self._plain_backend = _without_added_tokens(self._backend)
        self._guards = {guard: self._encode_with(self._backend, guard) for guard in ("\n", "\x01")}

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        token_ids: list[int] = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        return token_ids

    def render_chat(self, messages: Sequence[Message], options: TemplateOptions = PLAIN) -> list[int]:
        call = template_call(self.chat_template, messages, options, self._own_control_tokens)
        return self.encode_rendered(self._render(call), call)

    def call_of(self, template: str, messages: Sequence[Message], options: TemplateOptions) -> TemplateCall:
        # a value is refused below where it is no string: templates know these as such
        call = template_call(template, messages, options, self._control_tokens(template))
        return replace(call, variables={**self._tokenizer.special_tokens_map, **call.variables})

    def encode_rendered(self, rendered: str, call: TemplateCall) -> list[int]:
        first, *rest = call.pieces(rendered)
        token_ids = self._encode_with(self._backend, first or "")
        for position, piece in enumerate(rest, start=1):
            if piece:
                token_ids += self._encode_plainly(piece) if position % 2 else self._continue_with(self._backend, piece)
        return token_ids

    def token_bytes(self, token_id: int) -> bytes:
        if token_id in self._added:
            return self._added[token_id]
        piece = self._backend.id_to_token(token_id)
        return b"" if piece is None else self._piece_bytes(piece)

    def decode(self, token_ids: Sequence[int]) -> str:
        text = b"".join(map(self.token_bytes, token_ids)).decode(errors="replace")
        return text.removeprefix(" ") if self.strips_leading_space else text

    def piece(self, token_id: int) -> str:
        return self.token_bytes(token_id).decode(errors="replace")

    def is_special(self, token_id: int) -> bool:
        return token_id in self._special

    def _control_tokens(self, template: str) -> set[str]:
        """What a template writes itself separates messages, even where the tokenizer does not call it special."""
        added = ((token_id, spelling.decode()) for token_id, spelling in self._added.items())
        return {
            spelling
            for token_id, spelling in added
            if token_id in self._special or (spelling in template and not spelling.isspace())
        }

    def _render(self, call: TemplateCall) -> str:
        from jinja2.exceptions import TemplateError as JinjaError

        if self._tokenizer.chat_template is None:
            raise TemplateError("This model has no chat template; use /v1/completions.")
        try:
            text = self._tokenizer.apply_chat_template(
                call.messages,
                tools=call.tools or None,
                tokenize=False,
                add_generation_prompt=call.generation_prompt,
                continue_final_message=call.continues_last,
                **call.variables,
            )
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
        if self._backend.token_to_id(spelling) in token_ids:
            # some vocabularies reach a control token by merging plain text: keep its halves apart
            halves = spelling[:1], spelling[1:]
            token_ids = [t for half in halves for t in self._continue_with(self._plain_backend, half)]
        return token_ids


class HFEncoder:
    """The fast tokenizer of an embedding model, which may write its pieces in any way."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._backend: Backend = tokenizer.backend_tokenizer
        self._backend.no_truncation()  # files may ask for it: a text that is too long is to be refused, not cut
        self._backend.no_padding()
        self.vocab_size = self._backend.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        token_ids: list[int] = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        return token_ids

    def decode(self, token_ids: Sequence[int]) -> str:
        text: str = self._backend.decode(list(token_ids), skip_special_tokens=False)
        return text

    def piece(self, token_id: int) -> str:
        return self._backend.id_to_token(token_id) or ""


def load_tokenizer(path: str | None) -> Tokenizer:
    """The tokenizer of the model in a local folder, or the fake engine's. Takes seconds. Raises ModelLoadError."""
    return ByteTokenizer() if path is None else HFTokenizer(_load_fast(path), _model_type(Path(path)))


def load_encoder(path: str | None) -> Encoder:
    """The same for an embedding model."""
    return ByteTokenizer() if path is None else HFEncoder(_load_fast(path))


def _load_fast(path: str) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer

    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(path, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise ModelLoadError(f"no tokenizer can be loaded from {path}: {error}") from error
    if not hasattr(tokenizer, "backend_tokenizer"):
        raise ModelLoadError(f"the tokenizer {type(tokenizer).__name__} is not supported: it is no fast tokenizer")
    return tokenizer


def _model_type(path: Path) -> str | None:
    try:
        return str(json.loads((path / "config.json").read_text(encoding="utf-8"))["model_type"])
    except (OSError, ValueError, KeyError):
        return None


def _without_added_tokens(backend: Backend) -> Backend:
    from tokenizers import Tokenizer as Backend

    state = json.loads(backend.to_str())
    state["added_tokens"] = []
    return Backend.from_str(json.dumps(state))
