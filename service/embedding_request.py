"""From a decoded request for embeddings to a job. 4xx ends here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import anyio

from engine.api import EmbeddingInfo, EmbedRequest
from service.auth import Caller
from service.errors import CONTEXT_LENGTH_EXCEEDED, ApiError, ErrorInfo, invalid, model_not_found
from service.job import Arrival
from service.lifespan import Services
from service.prompts import forms
from service.schemas.embeddings import MAX_INPUTS, EmbeddingCreateRequest
from service.tokenizer import Encoder


@dataclass(frozen=True, slots=True)
class EmbeddingJob:
    """One HTTP request, checked and tokenised. received_at: of time.monotonic(). timeout: seconds from then."""

    model: str
    batch: Sequence[EmbedRequest]
    as_base64: bool
    caller: Caller
    request_id: str | None
    received_at: float
    timeout: float

    @property
    def num_tokens(self) -> int:
        return sum(len(request.token_ids) for request in self.batch)


async def prepare_embedding(request: EmbeddingCreateRequest, services: Services, arrival: Arrival) -> EmbeddingJob:
    """Raises ApiError (4xx), EngineNotReady and EngineDead."""
    _check_model(request.model, services)
    texts = forms(request.input, "input")
    if len(texts) > MAX_INPUTS:
        raise invalid(f"`input` has {len(texts)} inputs, more than {MAX_INPUTS}.", "input")
    for index, text in enumerate(texts):
        if not text:
            raise invalid(f"{_place(index, texts)} is empty.", "input")
    services.check_ready()
    info, tokenizer = services.engine.info.embedding, services.embedding_tokenizer
    assert info is not None and tokenizer is not None
    _check_dimensions(request.dimensions, info)
    batch = await anyio.to_thread.run_sync(
        lambda: [
            EmbedRequest(_token_ids(index, texts, tokenizer, info), request.dimensions, arrival.caller.owner)
            for index in range(len(texts))
        ],
        limiter=services.tokenizer_limiter,
    )
    return EmbeddingJob(
        model=request.model,
        batch=batch,
        as_base64=request.encoding_format == "base64",
        caller=arrival.caller,
        request_id=arrival.request_id,
        received_at=arrival.received_at,
        timeout=arrival.seconds(None, services.settings),
    )


def _check_model(model: str, services: Services) -> None:
    settings = services.settings
    if services.engine.info.embedding is None:
        passes_on = settings.engine == "upstream"  # where there is no such setting
        why = "it passes chats and completions on" if passes_on else "its operator has set no CHORUS_EMBEDDING_MODEL"
        message = f"This server makes no embeddings: {why}."
        raise ApiError(ErrorInfo(404, message, param="model", code="model_not_found"))
    if model == services.model_name:
        raise invalid(f"The model `{model}` makes no embeddings.", "model")
    if model != settings.served_embedding_model_name:
        raise model_not_found(model)


def _check_dimensions(wanted: int | None, info: EmbeddingInfo) -> None:
    if wanted is None or wanted == info.dimensions or wanted in info.smaller_dimensions:
        return
    if wanted > info.dimensions:
        message = f"This model's vectors have {info.dimensions} dimensions; {wanted} were asked for."
    elif info.smaller_dimensions:
        message = f"This model's vectors can be cut to {', '.join(map(str, info.smaller_dimensions))} dimensions."
    else:
        message = f"This model's vectors have {info.dimensions} dimensions, and it was not made to have them cut."
    raise invalid(message, "dimensions")


def _token_ids(
    index: int, texts: Sequence[str | list[int]], tokenizer: Encoder, info: EmbeddingInfo
) -> tuple[int, ...]:
    text = texts[index]
    if isinstance(text, str):
        text = info.prefix + (text.lower() if info.lower_case else text)
        token_ids = tokenizer.encode(text, add_special_tokens=True)
        if not token_ids:
            raise invalid(f"{_place(index, texts)} has no tokens.", "input")
    else:
        token_ids = text
        if (low := min(token_ids)) < 0 or max(token_ids) >= info.vocab_size:
            raise _unknown_token(low if low < 0 else max(token_ids), info)
    if len(token_ids) > info.max_model_len:
        message = (
            f"{_place(index, texts)} has {len(token_ids)} tokens; this model's maximum is {info.max_model_len} "
            "for each input."
        )
        raise invalid(message, "input", CONTEXT_LENGTH_EXCEEDED)
    return tuple(token_ids)


def _unknown_token(token_id: int, info: EmbeddingInfo) -> ApiError:
    """LangChain's OpenAIEmbeddings, unless told otherwise, cuts texts into the tokens of OpenAI's own models."""
    message = (
        f"Token id {token_id} is outside of 0 to {info.vocab_size - 1}. Token ids must be this model's own; a client "
        "that tokenizes for OpenAI's models has to send text (LangChain: check_embedding_ctx_length=False)."
    )
    return invalid(message, "input")


def _place(index: int, texts: Sequence[object]) -> str:
    return "`input`" if len(texts) == 1 else f"`input[{index}]`"
