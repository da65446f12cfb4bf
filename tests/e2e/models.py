"""A tiny random float32 model in a folder, with room for long contexts and a chat template that is hard to please."""

from __future__ import annotations

import json
from pathlib import Path

MAX_MODEL_LEN = 32768
PAGE_BYTES = 3 * 2 * 2 * 16 * 32 * 4
"""Layers, keys and values, heads, their size, tokens, float32."""

CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if message.role == 'system' -%}{{ raise_exception('System role not supported') }}{%- endif -%}"
    "{%- if (message.role == 'user') != (loop.index0 % 2 == 0) -%}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{%- endif -%}"
    "<s>{{ message.role }}: {{ message.content }}</s>"
    "{%- endfor -%}"
    "{%- if add_generation_prompt %}<s>assistant: {% endif -%}"
)


def save_tiny_model(folder: Path) -> None:
    from tests.engine.families import save_family

    save_family("llama", folder)
    config = folder / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "max_position_embeddings": MAX_MODEL_LEN}))
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
