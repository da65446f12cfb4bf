"""POST /tokenize, /detokenize (vLLM's shapes) and /v1/chat/completions/render."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from service.schemas.chat import MAX_TEMPLATE, ChatTemplateKwargs, Message
from service.schemas.common import TokenId
from service.schemas.tools import Tools


class TokenizeRequest(Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Exactly one of prompt and messages; what is below messages goes with them only. null equals absent."""

    model: str | None = None
    prompt: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    messages: list[Message] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: Annotated[str, Meta(min_length=1, max_length=MAX_TEMPLATE)] | None = None
    chat_template_kwargs: ChatTemplateKwargs | None = None
    tools: Tools | None = None


CHAT_ONLY = ("add_generation_prompt", "continue_final_message", "chat_template", "chat_template_kwargs", "tools")


class Tokenized(Struct, kw_only=True, frozen=True):
    """token_strs: the text of each token where it was asked for; U+FFFD stands for parts of characters."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    model: str | None = None
    tokens: list[TokenId]


class Detokenized(Struct, kw_only=True, frozen=True):
    prompt: str


class RenderedChat(Struct, kw_only=True, frozen=True):
    """The prompt that a chat becomes: its text, special tokens and all, and the ids that the model gets."""

    model: str
    prompt: str
    token_ids: list[int]
    count: int
    max_model_len: int
