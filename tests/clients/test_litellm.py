"""litellm on the real models: chats whole and streamed, tools, embeddings, and errors by their kind."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.e2e.server import Server

from . import DEFAULT, EMBEDDER, NEAR_AND_FAR, PARIS, QUESTION, cosine

pytestmark = [
    pytest.mark.client("litellm"),
    pytest.mark.timeout(400),
    pytest.mark.usefixtures("event_loop_of_the_thread"),
    # of the client itself, at import and when it copies answers
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Pydantic serializer warnings:UserWarning"),
]

TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Paris", "Rome"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


@pytest.fixture
def litellm(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """What it keeps open until its process ends is closed."""
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # it would fetch its list of prices
    import litellm

    yield litellm
    for client in litellm.in_memory_llm_clients_cache.cache_dict.values():
        if isinstance(client, openai.OpenAI):
            client.close()
    litellm.in_memory_llm_clients_cache.flush_cache()
    litellm.module_level_client.close()


def given(server: Server, model: str = DEFAULT, **more: Any) -> dict[str, Any]:
    return {"model": f"openai/{model}", "api_base": f"{server.url}/v1", "api_key": "none", "max_retries": 0, **more}


def asked(server: Server, **more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": QUESTION}]
    return given(server, messages=messages, temperature=0, max_tokens=40, **more)


def test_whole_and_streamed_are_the_same_answer(litellm: Any, server: Server) -> None:
    whole = litellm.completion(**asked(server, n=2))
    assert [choice.message.content for choice in whole.choices] == [PARIS, PARIS]
    assert whole.usage.prompt_tokens == 37
    chunks = list(litellm.completion(**asked(server, stream=True, stream_options={"include_usage": True})))
    assert "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices) == PARIS
    folded = litellm.stream_chunk_builder(chunks)
    assert folded.choices[0].finish_reason == "stop"
    assert folded.usage.completion_tokens * 2 == whole.usage.completion_tokens


def test_a_named_tool_is_called(litellm: Any, server: Server) -> None:
    choice = {"type": "function", "function": {"name": "weather"}}
    answer = litellm.completion(**asked(server, tools=[TOOL], tool_choice=choice))
    (call,) = answer.choices[0].message.tool_calls
    assert call.function.name == "weather"
    assert json.loads(call.function.arguments)["city"] in ("Paris", "Rome")


def test_embeddings(litellm: Any, server: Server) -> None:
    answer = litellm.embedding(**given(server, EMBEDDER, input=NEAR_AND_FAR))
    vectors = [item["embedding"] for item in answer.data]
    assert cosine(vectors[0], vectors[1]) > 0.5 > 0.2 > cosine(vectors[0], vectors[2])
    assert answer.usage.prompt_tokens == 27


def test_errors_are_of_the_clients_own_kinds(litellm: Any, server: Server) -> None:
    with pytest.raises(litellm.BadRequestError, match="top_p"):
        litellm.completion(**asked(server, top_p=7))
    with pytest.raises(litellm.BadRequestError, match="256"):
        litellm.embedding(**given(server, EMBEDDER, input=["word " * 300]))
    with pytest.raises(litellm.NotFoundError):
        litellm.embedding(**given(server, "other", input=["x"]))
