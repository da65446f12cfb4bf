"""The whole server over a model that writes bytes at random: what is enforced has to hold all the same."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from engine.plan import ModelRunner
from engine.thread import EngineThread
from service.settings import Settings
from tests.engine.constrained import RandomRunner
from tests.engine.families import byte_tokenizer

from .apps import Client, serving

TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
)


@contextmanager
def random_model(folder: Path, runner: type[RandomRunner] = RandomRunner) -> Iterator[Client]:
    """folder: empty, for the tokenizer. The model is served as org/m and writes calls as hermes does."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    settings = Settings(engine="fake", served_model_name="org/m", tool_parser="hermes", reasoning_parser="none")

    def load(_: object) -> ModelRunner:
        return runner(num_pages=256, model_path=str(folder))

    with serving(settings, engine=EngineThread(settings.engine_config(), load)) as client:  # type: ignore[arg-type]
        yield client
