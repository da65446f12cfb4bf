"""instructor on the real model: pydantic models by each of its modes, whole and in parts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel, ConfigDict, Field

from tests.e2e.server import Server

from . import DEFAULT

pytestmark = [pytest.mark.client("instructor"), pytest.mark.timeout(400)]

ASKED: Any = [{"role": "user", "content": "Describe the city of Paris."}]


class City(BaseModel):
    """A city."""

    model_config = ConfigDict(extra="forbid")  # else a model may go on with fields of its own, as the schema allows

    name: str = Field(max_length=20)
    continent: Literal["Africa", "America", "Asia", "Europe"]


@pytest.fixture
def plain(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.mark.parametrize("mode", ["TOOLS", "JSON_SCHEMA"])
def test_every_mode_gives_models_at_the_first_try(plain: openai.OpenAI, mode: str) -> None:
    import instructor

    client = instructor.from_openai(plain, mode=instructor.Mode[mode])
    asked: Any = {"model": DEFAULT, "messages": ASKED, "response_model": City, "max_tokens": 80, "max_retries": 0}
    city, answer = client.chat.completions.create_with_completion(**asked, temperature=0)
    assert isinstance(city, City)
    assert answer.usage.completion_tokens > 0
    *_, last = client.chat.completions.create_partial(**asked, temperature=0)
    assert last.model_dump() == city.model_dump()
