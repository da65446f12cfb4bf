"""LlamaIndex on the real models: its chat model, its embeddings, and an index that finds by them."""

from __future__ import annotations

from typing import Any

import pytest

from tests.e2e.server import Server

from . import DEFAULT, EMBEDDER, NEAR_AND_FAR, PARIS, QUESTION, cosine

pytestmark = [
    pytest.mark.client("llama_index.core"),
    pytest.mark.timeout(400),
    pytest.mark.usefixtures("event_loop_of_the_thread"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of the client's own dependencies
    pytest.mark.filterwarnings("ignore:Pydantic serializer warnings:UserWarning"),
]

FACTS = ["Paris is the capital of France.", "The kitten rests on a rug.", "Shares of the bank fell today."]


def llm(server: Server) -> Any:
    from llama_index.llms.openai_like import OpenAILike

    return OpenAILike(
        model=DEFAULT,
        api_base=f"{server.url}/v1",
        api_key="none",
        is_chat_model=True,
        context_window=8192,
        temperature=0,
        max_tokens=40,
        max_retries=0,
    )


def embedder(server: Server) -> Any:
    from llama_index.embeddings.openai_like import OpenAILikeEmbedding

    return OpenAILikeEmbedding(model_name=EMBEDDER, api_base=f"{server.url}/v1", api_key="none", max_retries=0)


def test_chat_whole_and_streamed_are_the_same_answer(server: Server) -> None:
    from llama_index.core.llms import ChatMessage

    messages = [ChatMessage(role="user", content=QUESTION)]
    assert llm(server).chat(messages).message.content == PARIS
    deltas = [part.delta or "" for part in llm(server).stream_chat(messages)]
    assert len(deltas) > 3 and "".join(deltas) == PARIS
    assert llm(server).complete(QUESTION).text == PARIS


def test_embeddings_one_by_one_and_in_batches(server: Server) -> None:
    model = embedder(server)
    vectors = model.get_text_embedding_batch(NEAR_AND_FAR)
    assert cosine(vectors[0], vectors[1]) > 0.5 > 0.2 > cosine(vectors[0], vectors[2])
    assert model.get_query_embedding(NEAR_AND_FAR[1]) == pytest.approx(vectors[1], abs=2e-6)


def test_an_index_finds_what_is_asked_about(server: Server) -> None:
    from llama_index.core import VectorStoreIndex
    from llama_index.core.schema import TextNode

    index = VectorStoreIndex([TextNode(text=fact) for fact in FACTS], embed_model=embedder(server))
    (found,) = index.as_retriever(similarity_top_k=1).retrieve("Where does the cat sleep?")
    assert found.node.get_content() == FACTS[1]
    answer = index.as_query_engine(llm=llm(server), similarity_top_k=1).query("What is the capital of France?")
    assert "Paris" in str(answer)
    assert answer.source_nodes[0].node.get_content() == FACTS[0]
