"""The official client against the default model: what its users see, on both of its interfaces and both event loops."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

import anyio
import openai
import pytest
from openai.types.chat import ChatCompletionChunk

from tests.e2e.fixtures import MODEL
from tests.e2e.server import Server

pytestmark = pytest.mark.timeout(400)  # the first of these loads the default model

DEFAULT = "SmolLM2-135M-Instruct"
QUESTION: Any = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture
def client(default_model: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{default_model.url}/v1", api_key="none", max_retries=0) as client:
        yield client
    default_model.wait_idle()


@pytest.fixture
def fake_client(fake: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{fake.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
async def async_client(anyio_backend: str, default_model: Server) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{default_model.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_instruct_model_answers_the_question(client: openai.OpenAI) -> None:
    """The real model through its own chat template: a wrong template or a wrong weight shows in the answer."""
    answer = client.chat.completions.create(model=DEFAULT, messages=QUESTION, n=2, temperature=0, max_tokens=24)
    assert [choice.message.content for choice in answer.choices] == ["The capital of France is Paris."] * 2
    assert {choice.finish_reason for choice in answer.choices} == {"stop"}
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == 37


def test_streamed_chat_has_every_choice_and_the_usage(client: openai.OpenAI) -> None:
    chunks = list(
        client.chat.completions.create(
            model=DEFAULT,
            messages=QUESTION,
            n=4,
            seed=5,
            max_tokens=12,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    texts = _texts(chunks)
    assert set(texts) == {0, 1, 2, 3}
    assert all(texts.values())
    usage = chunks[-1].usage
    assert usage is not None
    assert usage.prompt_tokens == 37
    assert 4 <= usage.completion_tokens <= 4 * 12


@pytest.mark.parametrize("n", [1, 2, 8])
def test_completion_has_n_choices_streamed_or_not(client: openai.OpenAI, n: int) -> None:
    whole = client.completions.create(model=DEFAULT, prompt="The sky is", n=n, seed=1, max_tokens=8)
    assert [choice.index for choice in whole.choices] == list(range(n))
    streamed = client.completions.create(model=DEFAULT, prompt="The sky is", n=n, seed=1, max_tokens=8, stream=True)
    ends = {
        choice.index: choice.finish_reason for chunk in streamed for choice in chunk.choices if choice.finish_reason
    }
    assert set(ends) == set(range(n))


def test_seed_repeats_an_answer(client: openai.OpenAI) -> None:
    first, second = (
        client.chat.completions.create(model=DEFAULT, messages=QUESTION, seed=11, max_tokens=12, temperature=1.2)
        for _ in range(2)
    )
    assert first.choices[0].message.content == second.choices[0].message.content
    assert first.id != second.id


def test_extra_body_reaches_the_sampler(client: openai.OpenAI) -> None:
    """top_k 1 at a high temperature is greedy."""
    answer = client.chat.completions.create(
        model=DEFAULT, messages=QUESTION, n=2, temperature=2, max_tokens=24, extra_body={"top_k": 1, "min_p": 0.0}
    )
    assert [choice.message.content for choice in answer.choices] == ["The capital of France is Paris."] * 2


def test_answer_can_be_sent_back_as_it_came(client: openai.OpenAI) -> None:
    """The next turn of every chat program does that."""
    answer = client.chat.completions.create(model=DEFAULT, messages=QUESTION, temperature=0, max_tokens=24)
    said: Any = answer.choices[0].message
    for message in (said, said.model_dump()):
        more = client.chat.completions.create(
            model=DEFAULT,
            messages=[*QUESTION, message, {"role": "user", "content": "And of Italy?"}],
            temperature=0,
            max_tokens=16,
        )
        assert "Rome" in (more.choices[0].message.content or "")
        assert more.usage is not None
        assert more.usage.prompt_tokens_details is not None
        assert more.usage.prompt_tokens_details.cached_tokens is not None


def test_stream_helper_collects_what_was_streamed(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(model=DEFAULT, messages=QUESTION, temperature=0, max_tokens=24) as stream:
        stream.until_done()
        final = stream.get_final_completion()
    assert final.choices[0].message.content == "The capital of France is Paris."


def test_a_response_is_the_chats_answer_streamed_or_not(client: openai.OpenAI) -> None:
    asked: Any = {"model": DEFAULT, "input": QUESTION, "temperature": 0, "max_output_tokens": 24}
    whole = client.responses.create(**asked)
    assert whole.output_text == "The capital of France is Paris."
    assert whole.usage is not None
    assert whole.usage.input_tokens == 37
    with client.responses.stream(**asked) as stream:
        deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
        assert stream.get_final_response().output_text == whole.output_text == "".join(deltas)


def test_a_conversation_of_responses_goes_on(client: openai.OpenAI) -> None:
    """With the output sent back, as a client does whose server keeps nothing."""
    first = client.responses.create(model=DEFAULT, input=QUESTION, temperature=0, max_output_tokens=24)
    conversation: Any = [*QUESTION, *first.output, {"role": "user", "content": "And of Italy?"}]
    more = client.responses.create(model=DEFAULT, input=conversation, temperature=0, max_output_tokens=16)
    assert "Rome" in more.output_text


def test_client_that_closes_its_stream_stops_the_work(default_model: Server, client: openai.OpenAI) -> None:
    with client.chat.completions.create(
        model=DEFAULT, messages=QUESTION, n=4, max_tokens=2000, stream=True, extra_body={"ignore_eos": True}
    ) as stream:
        next(iter(stream))
    default_model.wait_idle()


def test_model_is_listed_under_the_name_that_requests_use(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [DEFAULT]
    assert client.models.retrieve(DEFAULT).id == DEFAULT


def test_model_name_with_a_slash_is_found(fake_client: openai.OpenAI) -> None:
    assert fake_client.models.retrieve(MODEL).id == MODEL


@pytest.mark.anyio
@pytest.mark.filterwarnings("ignore:Async generator:ResourceWarning")  # the client leaves its own to trio's collector
async def test_async_client_streams_and_collects_at_once(async_client: openai.AsyncOpenAI) -> None:
    """Eight requests together, half of them streamed: each gets its own choices, and none of another's."""
    texts: dict[int, list[str]] = {}

    async def whole(seed: int) -> None:
        answer = await async_client.chat.completions.create(
            model=DEFAULT, messages=QUESTION, n=2, seed=seed, max_tokens=10, temperature=0
        )
        texts[seed] = [choice.message.content or "" for choice in answer.choices]

    async def streamed(seed: int) -> None:
        stream = await async_client.chat.completions.create(
            model=DEFAULT, messages=QUESTION, n=2, seed=seed, max_tokens=10, temperature=0, stream=True
        )
        found = _texts([chunk async for chunk in stream])
        texts[seed] = [found[index] for index in sorted(found)]

    async with anyio.create_task_group() as group:
        for seed in range(8):
            group.start_soon(streamed if seed % 2 else whole, seed)
    assert texts == {seed: ["The capital of France is Paris."] * 2 for seed in range(8)}


@pytest.mark.anyio
async def test_async_client_that_is_cancelled_stops_the_work(
    async_client: openai.AsyncOpenAI, default_model: Server
) -> None:
    async with anyio.create_task_group() as group:

        async def endless() -> None:
            await async_client.completions.create(
                model=DEFAULT, prompt="On and on", n=3, max_tokens=1900, extra_body={"ignore_eos": True}
            )

        group.start_soon(endless)
        await anyio.to_thread.run_sync(
            default_model.wait_metric, "chorus_sequences_running", lambda value: value == 3, abandon_on_cancel=True
        )
        group.cancel_scope.cancel()
    await anyio.to_thread.run_sync(default_model.wait_idle)


def test_errors_are_the_clients_own_with_field_and_code(fake_client: openai.OpenAI) -> None:
    chat, completions = fake_client.chat.completions, fake_client.completions
    with pytest.raises(openai.BadRequestError) as refused:
        chat.create(model=MODEL, messages=QUESTION, n=0)
    assert (refused.value.param, refused.value.type) == ("n", "invalid_request_error")
    with pytest.raises(openai.BadRequestError) as unsupported:
        chat.create(model=MODEL, messages=QUESTION, service_tier="flex", stream=True)
    assert (unsupported.value.param, unsupported.value.code) == ("service_tier", "unsupported_parameter")
    with pytest.raises(openai.BadRequestError) as too_long:
        completions.create(model=MODEL, prompt="x", max_tokens=2**20)
    assert (too_long.value.param, too_long.value.code) == ("max_tokens", "context_length_exceeded")
    with pytest.raises(openai.NotFoundError) as unknown:
        chat.create(model="gpt-4", messages=QUESTION)
    assert (unknown.value.param, unknown.value.code) == ("model", "model_not_found")
    with pytest.raises(openai.NotFoundError):
        fake_client.models.retrieve("org/other")
    with pytest.raises(openai.NotFoundError):
        fake_client.moderations.create(input="x")
    with pytest.raises(openai.BadRequestError) as misspelt:
        chat.create(model=MODEL, messages=QUESTION, extra_body={"max_token": 5})
    assert "max_tokens" in misspelt.value.message


def _texts(chunks: list[ChatCompletionChunk]) -> dict[int, str]:
    texts: dict[int, str] = {}
    for choice in (choice for chunk in chunks for choice in chunk.choices):
        texts[choice.index] = texts.get(choice.index, "") + (choice.delta.content or "")
    return texts
