"""openai-python on the real model: models that it parses, helpers that fold its streams, a conversation with tools."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel, Field

from tests.e2e.server import Server

from . import DEFAULT, EMBEDDER, NEAR_AND_FAR, cosine

pytestmark = pytest.mark.timeout(400)  # the first of these loads the default model

ASKED: Any = [{"role": "user", "content": "Describe the city of Paris."}]


class City(BaseModel):
    """A city."""

    name: str = Field(max_length=20)
    continent: Literal["Africa", "America", "Asia", "Europe"]
    inhabitants: int = Field(ge=0, le=99_999_999)


class Weather(BaseModel):
    """The weather in a city."""

    city: Literal["Paris", "Rome"]
    unit: Literal["C", "F"]


WEATHER = openai.pydantic_function_tool(Weather)
NAMED: Any = {"type": "function", "function": {"name": "Weather"}}


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
async def async_client(anyio_backend: str, server: Server) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_parse_gives_a_model_for_every_choice(client: openai.OpenAI) -> None:
    answer = client.chat.completions.parse(
        model=DEFAULT, messages=ASKED, response_format=City, n=3, seed=1, max_tokens=80
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    for choice in answer.choices:
        assert choice.finish_reason == "stop"
        assert choice.message.parsed == City.model_validate_json(choice.message.content or "")


def test_stream_helper_parses_every_choice_as_parse_does(client: openai.OpenAI) -> None:
    asked: Any = {"model": DEFAULT, "messages": ASKED, "response_format": City, "n": 2, "seed": 1, "max_tokens": 80}
    with client.chat.completions.stream(**asked) as stream:
        done = [event.parsed for event in stream if event.type == "content.done"]
        final = stream.get_final_completion()
    whole = client.chat.completions.parse(**asked)
    expected = [choice.message.parsed for choice in whole.choices]
    assert [choice.message.parsed for choice in final.choices] == expected
    assert len(done) == 2 and all(model in expected for model in done)


def test_tools_go_round_their_loop(client: openai.OpenAI) -> None:
    """Two calls at most: the model is made to call, and answers in words once it may not."""
    asked: Any = [{"role": "user", "content": "What is the weather in Rome, in Celsius?"}]
    called = client.chat.completions.parse(
        model=DEFAULT,
        messages=asked,
        tools=[WEATHER],
        tool_choice="required",
        parallel_tool_calls=False,
        temperature=0,
        max_tokens=80,
    ).choices[0]
    assert called.finish_reason == "tool_calls"
    (call,) = called.message.tool_calls or []
    assert isinstance(call.function.parsed_arguments, Weather)
    told = {"role": "tool", "tool_call_id": call.id, "content": '{"degrees": 31}'}
    answer = client.chat.completions.create(
        model=DEFAULT,
        messages=[*asked, called.message, told],
        tools=[WEATHER],
        tool_choice="none",
        temperature=0,
        max_tokens=30,
    ).choices[0]
    assert answer.message.content and not answer.message.tool_calls


def test_stream_helper_folds_the_calls_of_every_choice(client: openai.OpenAI) -> None:
    asked: Any = {
        "model": DEFAULT,
        "messages": [{"role": "user", "content": "The weather in Rome, please."}],
        "tools": [WEATHER],
        "tool_choice": NAMED,
        "n": 3,
        "seed": 5,
        "max_tokens": 80,
    }
    with client.chat.completions.stream(**asked) as stream:
        done = [event for event in stream if event.type == "tool_calls.function.arguments.done"]
        final = stream.get_final_completion()
    whole = client.chat.completions.parse(**asked)
    assert len(done) == 3
    for streamed, expected in zip(final.choices, whole.choices, strict=True):
        (call,), (other) = streamed.message.tool_calls or [], expected.message.tool_calls or []
        assert isinstance(call.function.parsed_arguments, Weather)
        assert [call.function.parsed_arguments] == [one.function.parsed_arguments for one in other]
        assert streamed.finish_reason == expected.finish_reason == "stop"


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings:UserWarning")  # of the client's own types
@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("more", [{"response_format": City}, {"tools": [WEATHER], "tool_choice": NAMED}])
def test_parsed_answer_can_be_sent_back_as_it_came(client: openai.OpenAI, more: Any, streamed: bool) -> None:
    """With what the client has added to it, in each form in which programs keep it."""
    asked: Any = {"model": DEFAULT, "messages": ASKED, "seed": 1, "max_tokens": 80, **more}
    if streamed:
        with client.chat.completions.stream(**asked) as stream:
            message: Any = stream.get_final_completion().choices[0].message
    else:
        message = client.chat.completions.parse(**asked).choices[0].message
    told = [{"role": "tool", "tool_call_id": call.id, "content": "{}"} for call in message.tool_calls or []]
    prompts = set()
    for sent in (message, message.model_dump(), message.model_dump(exclude_none=True)):
        again = client.chat.completions.create(
            model=DEFAULT, messages=[*ASKED, sent, *told, {"role": "user", "content": "Why?"}], max_tokens=1
        )
        assert again.usage is not None
        prompts.add(again.usage.prompt_tokens)
    assert len(prompts) == 1


@pytest.mark.anyio
@pytest.mark.filterwarnings("ignore:Async generator:ResourceWarning")  # the client leaves its own to trio's collector
async def test_async_helpers_agree(async_client: openai.AsyncOpenAI) -> None:
    asked: Any = {"model": DEFAULT, "messages": ASKED, "response_format": City, "n": 2, "seed": 3, "max_tokens": 80}
    whole = await async_client.chat.completions.parse(**asked)
    async with async_client.chat.completions.stream(**asked) as stream:
        kinds = {event.type async for event in stream}
        final = await stream.get_final_completion()
    assert {"chunk", "content.delta", "content.done"} <= kinds
    parsed = [choice.message.parsed for choice in final.choices]
    assert parsed == [choice.message.parsed for choice in whole.choices]
    assert all(isinstance(model, City) for model in parsed)


@pytest.mark.anyio
async def test_async_tools_are_parsed(async_client: openai.AsyncOpenAI) -> None:
    answer = await async_client.chat.completions.parse(
        model=DEFAULT, messages=ASKED, tools=[WEATHER], tool_choice=NAMED, n=2, max_tokens=80
    )
    for choice in answer.choices:
        (call,) = choice.message.tool_calls or []
        assert isinstance(call.function.parsed_arguments, Weather)


def test_embeddings_come_as_they_are_asked_for(client: openai.OpenAI) -> None:
    by_default = client.embeddings.create(model=EMBEDDER, input=NEAR_AND_FAR)
    as_floats = client.embeddings.create(model=EMBEDDER, input=NEAR_AND_FAR, encoding_format="float")
    vectors = [item.embedding for item in by_default.data]
    assert [len(vector) for vector in vectors] == [384] * 3
    for vector, item in zip(vectors, as_floats.data, strict=True):
        assert vector == pytest.approx(item.embedding, abs=2e-6)
    assert cosine(vectors[0], vectors[1]) > 0.5 > 0.2 > cosine(vectors[0], vectors[2])
    assert by_default.usage.prompt_tokens == by_default.usage.total_tokens == 27


def test_token_ids_of_the_models_own_tokenizer_give_the_same_vector(client: openai.OpenAI, server: Server) -> None:
    told = server.post("/tokenize", {"model": EMBEDDER, "prompt": NEAR_AND_FAR[0]}).json()
    assert told["max_model_len"] == 256
    by_text, by_ids = (
        client.embeddings.create(model=EMBEDDER, input=given).data[0].embedding
        for given in (NEAR_AND_FAR[0], told["tokens"])
    )
    assert by_ids == pytest.approx(by_text, abs=2e-6)


def test_what_cannot_be_embedded_is_the_clients_own_error(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.embeddings.create(model=EMBEDDER, input=["x", "word " * 300])
    assert (caught.value.param, caught.value.code) == ("input", "context_length_exceeded")
    with pytest.raises(openai.BadRequestError) as caught:
        client.embeddings.create(model=EMBEDDER, input="x", dimensions=64)
    assert caught.value.param == "dimensions"
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model="text-embedding-3-small", input="x")
