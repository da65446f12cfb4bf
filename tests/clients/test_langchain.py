"""LangChain's ChatOpenAI and OpenAIEmbeddings on real models: what their users call, whole, streamed and in batches."""

from __future__ import annotations

import json
from typing import Any, Literal

import httpx
import pytest
from pydantic import BaseModel, Field

from tests.e2e.server import Server

from . import DEFAULT, EMBEDDER, NEAR_AND_FAR, PARIS, QUESTION, cosine

pytestmark = [pytest.mark.client("langchain_openai"), pytest.mark.timeout(400)]


class City(BaseModel):
    """A city."""

    name: str = Field(max_length=20)
    continent: Literal["Africa", "America", "Asia", "Europe"]


class weather(BaseModel):
    """The weather in a city."""

    city: Literal["Paris", "Rome"]


def chat(server: Server, **more: Any) -> Any:
    from langchain_openai import ChatOpenAI

    options = {"temperature": 0, "max_tokens": 80, "max_retries": 0, **more}
    return ChatOpenAI(model=DEFAULT, base_url=f"{server.url}/v1", api_key="none", **options)


def test_invoke_gives_text_usage_and_the_end(server: Server) -> None:
    message = chat(server).invoke(QUESTION)
    assert message.content == PARIS
    assert message.usage_metadata["input_tokens"] == 37
    assert message.usage_metadata["total_tokens"] == 37 + message.usage_metadata["output_tokens"]
    assert message.response_metadata["finish_reason"] == "stop"
    assert message.response_metadata["model_name"] == DEFAULT


def test_stream_adds_up_to_what_invoke_gives(server: Server) -> None:
    chunks = list(chat(server, stream_usage=True).stream(QUESTION))
    assert len(chunks) > 3
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole += chunk
    assert whole.content == PARIS
    assert whole.usage_metadata["input_tokens"] == 37
    assert whole.response_metadata["finish_reason"] == "stop"


def test_the_responses_interface_gives_the_same_streamed_or_not(server: Server) -> None:
    model = chat(server, use_responses_api=True)
    whole = model.invoke(QUESTION)
    assert [part["text"] for part in whole.content] == [PARIS]
    assert whole.usage_metadata["input_tokens"] == 37
    parts = [part for chunk in model.stream(QUESTION) for part in chunk.content]
    assert "".join(part.get("text", "") for part in parts) == PARIS
    asked = model.with_structured_output(City, method="json_schema").invoke(QUESTION)
    assert isinstance(asked, City)
    (call,) = model.bind_tools([weather], tool_choice="weather").invoke(QUESTION).tool_calls
    assert call["name"] == "weather" and weather(**call["args"])


def test_batch_answers_each_by_itself(server: Server) -> None:
    countries = ["France", "Germany", "Japan", "Greece"]
    answers = chat(server).batch([f"What is the capital of {country}?" for country in countries])
    expected = zip(countries, ["Paris", "Berlin", "Tokyo", "Athens"], strict=True)
    assert [answer.content for answer in answers] == [f"The capital of {a} is {b}." for a, b in expected]


def test_generate_gives_n_choices(server: Server) -> None:
    from langchain_core.messages import HumanMessage

    (choices,) = chat(server, n=3).generate([[HumanMessage(QUESTION)]]).generations
    assert [choice.text for choice in choices] == [PARIS] * 3


def test_log_probabilities_arrive(server: Server) -> None:
    message = chat(server, logprobs=True, top_logprobs=2).invoke(QUESTION)
    content = message.response_metadata["logprobs"]["content"]
    assert "".join(token["token"] for token in content).startswith(PARIS)
    assert all(len(token["top_logprobs"]) == 2 for token in content)


@pytest.mark.parametrize("choice", ["weather", "any"])
def test_bound_tools_are_called_and_their_results_taken(server: Server, choice: str) -> None:
    from langchain_core.messages import HumanMessage, ToolMessage

    model = chat(server).bind_tools([weather], tool_choice=choice, parallel_tool_calls=False)
    asked = HumanMessage("What is the weather in Rome?")
    called = model.invoke([asked])
    (call,) = called.tool_calls
    assert call["name"] == "weather"
    weather.model_validate(call["args"])
    assert called.response_metadata["finish_reason"] == ("stop" if choice == "weather" else "tool_calls")
    whole = None
    for chunk in model.stream([asked]):
        whole = chunk if whole is None else whole + chunk
    assert whole is not None
    assert [one["args"] for one in whole.tool_calls] == [call["args"]]
    for message in (called, whole):
        told = ToolMessage("31 degrees", tool_call_id=message.tool_calls[0]["id"])
        assert chat(server).invoke([asked, message, told]).content


@pytest.mark.parametrize("method", ["json_schema", "function_calling", "json_mode"])
def test_structured_output_gives_models(server: Server, method: str) -> None:
    asked = 'Describe the city of Paris as JSON: {"name": "...", "continent": "..."}'
    model = chat(server, max_tokens=200).with_structured_output(City, method=method, include_raw=True)
    answer = model.invoke(asked)
    if method == "json_mode":  # any object will do
        assert isinstance(json.loads(answer["raw"].content), dict)
        return
    assert answer["parsing_error"] is None
    assert isinstance(answer["parsed"], City)


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings:UserWarning")  # of the client's own types
def test_structured_output_streams(server: Server) -> None:
    parts = list(chat(server).with_structured_output(City).stream("Describe the city of Paris."))
    assert isinstance(parts[-1], City)


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])  # LangChain knows no other
async def test_async_stream_adds_up(server: Server) -> None:
    async with httpx.AsyncClient() as http:  # its own stays open
        texts = [chunk.content async for chunk in chat(server, http_async_client=http).astream(QUESTION)]
    assert "".join(texts) == PARIS


def embeddings(server: Server, **more: Any) -> Any:
    from langchain_openai import OpenAIEmbeddings

    return OpenAIEmbeddings(model=EMBEDDER, base_url=f"{server.url}/v1", api_key="none", max_retries=0, **more)


def test_texts_are_embedded_as_texts(server: Server) -> None:
    embedder = embeddings(server, check_embedding_ctx_length=False)
    vectors = embedder.embed_documents(NEAR_AND_FAR)
    assert cosine(vectors[0], vectors[1]) > 0.5 > 0.2 > cosine(vectors[0], vectors[2])
    assert embedder.embed_query(NEAR_AND_FAR[1]) == pytest.approx(vectors[1], abs=2e-6)


def test_without_being_told_it_sends_the_tokens_of_another_model_and_is_told_so(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of OpenAI's models, whose tokenizer it would fetch: here one that has ids of the same size."""
    import openai
    import tiktoken

    ranks = {bytes([byte]): 40_000 + byte for byte in range(256)}
    encoding = tiktoken.Encoding("theirs", pat_str=r"\w+|\W+", mergeable_ranks=ranks, special_tokens={})
    monkeypatch.setattr(tiktoken, "encoding_for_model", lambda name: encoding)
    monkeypatch.setattr(tiktoken, "get_encoding", lambda name: encoding)
    with pytest.raises(openai.BadRequestError) as caught:
        embeddings(server).embed_documents(NEAR_AND_FAR)
    assert caught.value.param == "input"
    assert "check_embedding_ctx_length=False" in str(caught.value)


@pytest.mark.client("langchain")
@pytest.mark.parametrize("streamed", [False, True])
def test_an_agent_calls_its_tool_and_answers_from_the_result(server: Server, streamed: bool) -> None:
    """A model this small has to be told when to call; the loop, its messages and its end are the agent's own."""
    from langchain.agents import create_agent
    from langchain.agents.middleware import wrap_model_call

    asked_for: list[str] = []

    def weather(city: Literal["Paris", "Rome"]) -> str:
        """The weather in a city."""
        asked_for.append(city)
        return f"31 degrees in {city}"

    @wrap_model_call
    def call_first(request: Any, handler: Any) -> Any:
        has_called = any(message.type == "tool" for message in request.messages)
        one_call = {} if has_called else {"parallel_tool_calls": False}
        return handler(request.override(tool_choice="none" if has_called else "any", model_settings=one_call))

    agent = create_agent(chat(server, max_tokens=60), tools=[weather], middleware=[call_first])
    question = {"messages": [{"role": "user", "content": "What is the weather in Rome?"}]}
    if streamed:
        *_, last = agent.stream(question, stream_mode="values")
        tokens = [token for token, _ in agent.stream(question, stream_mode="messages")]
        assert sum(bool(token.content) for token in tokens if token.type == "AIMessageChunk") > 1
    else:
        last = agent.invoke(question)
    kinds = [message.type for message in last["messages"]]
    assert kinds == ["human", "ai", "tool", "ai"]
    assert asked_for and set(asked_for) <= {"Paris", "Rome"}
    assert last["messages"][2].content == f"31 degrees in {asked_for[0]}"
    assert last["messages"][3].content and not last["messages"][3].tool_calls


@pytest.mark.client("langchain")
def test_an_agent_whose_model_does_not_call_just_answers(server: Server) -> None:
    """Tools are bound without a choice: the default model's template knows none, and a 400 would end every agent."""
    from langchain.agents import create_agent

    def weather(city: str) -> str:
        """The weather in a city."""
        return "31 degrees"

    agent = create_agent(chat(server, max_tokens=60), tools=[weather])
    last = agent.invoke({"messages": [{"role": "user", "content": QUESTION}]}, {"recursion_limit": 6})
    assert last["messages"][-1].content
