"""Spans: one for a request and one for each choice, made at its end, and gone to the collector before the app's."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import Any

import anyio
import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.trace import SpanKind, StatusCode

from engine.api import ChoiceFailed, EmbedRequest, EndReason, EngineOverloaded
from engine.config import EngineConfig
from engine.fake import FakeEngine
from service.app import create_app
from service.auth import ANYONE
from service.choice_text import ChoiceEvent
from service.embedding_request import EmbeddingJob
from service.embedding_response import EmbeddingResponse
from service.event_stream import GenerationResponse
from service.job import GenerationJob
from service.lifespan import Services
from service.parsers import ToolCallArguments, ToolCallStart
from service.settings import Settings, SettingsError, read_settings
from service.tracing import MAX_WAITING, Tracing, tracing_to
from service.transcript import MAX_TEXT, Transcript, output_messages

from .apps import SETTINGS
from .asgi import Client, make_job, services_of
from .inloop import app_and_client

pytestmark = pytest.mark.anyio

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = "b7ad6b7169203331"
CHAT = "/v1/chat/completions"
BODY = {"model": "org/m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, "seed": 1}


class Collector(SpanExporter):
    def __init__(self, result: SpanExportResult = SpanExportResult.SUCCESS) -> None:
        self.batches: list[Sequence[ReadableSpan]] = []
        self._result = result

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.batches.append(spans)
        return self._result

    @property
    def request(self) -> Any:
        (span,) = (span for span in self.spans if span.kind is SpanKind.SERVER)
        return span

    @property
    def choices(self) -> list[Any]:
        return [span for span in self.spans if span.kind is not SpanKind.SERVER]

    @property
    def spans(self) -> list[Any]:
        return [span for batch in self.batches for span in batch]


@asynccontextmanager
async def traced(engine: FakeEngine, collector: Collector) -> AsyncIterator[Services]:
    """All spans are with the collector at the end."""
    async with services_of(engine) as services:
        services.tracing = Tracing(collector)
        async with anyio.create_task_group() as group:
            group.start_soon(services.tracing.run)
            await anyio.lowlevel.checkpoint()
            yield services
            group.cancel_scope.cancel()


async def ask(services: Services, job: GenerationJob, *headers: tuple[bytes, bytes]) -> None:
    client = Client()
    job = replace(job, received_at=time.monotonic())
    await GenerationResponse(job, services)({"headers": list(headers)}, client.receive, client.send)  # type: ignore


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
async def test_a_request_is_a_span_and_each_choice_one_below_it(stream: bool) -> None:
    """Not one per token or per send: 11 tokens make 4 spans."""
    collector, before = Collector(), time.time_ns()
    async with traced(FakeEngine(EngineConfig()), collector) as services:
        await ask(services, make_job(3, stream=stream, max_tokens=(1, 5, 5)))
    request = collector.request
    assert len(collector.spans) == 4
    assert before <= request.start_time <= request.end_time <= time.time_ns()
    attributes = dict(request.attributes)
    assert request.name == "chat m" and request.status.status_code is StatusCode.UNSET
    assert attributes["gen_ai.operation.name"] == "chat" and attributes["gen_ai.request.choice.count"] == 3
    assert (attributes["gen_ai.usage.input_tokens"], attributes["gen_ai.usage.output_tokens"]) == (3, 11)
    assert attributes["gen_ai.response.finish_reasons"] == ("length",) * 3
    assert attributes["gen_ai.response.id"] == "id-1" and attributes["chorus.outcome"] == "ok"
    for index, choice in enumerate(collector.choices):
        assert choice.parent.span_id == request.context.span_id
        assert [event.name for event in choice.events] == ["queue", "prefill", "decode"]
        times = [event.timestamp for event in choice.events]
        assert request.start_time == times[0] <= times[1] <= times[2] <= choice.end_time <= request.end_time
        assert choice.attributes["gen_ai.request.seed"] == str(index)
        assert choice.attributes["gen_ai.usage.output_tokens"] == (1, 5, 5)[index]


async def test_the_callers_trace_goes_on() -> None:
    collector = Collector()
    async with traced(FakeEngine(EngineConfig()), collector) as services:
        await ask(services, make_job(), (b"traceparent", f"00-{TRACE}-{PARENT}-01".encode()))
    assert {f"{span.context.trace_id:032x}" for span in collector.spans} == {TRACE}
    assert f"{collector.request.parent.span_id:016x}" == PARENT


@pytest.mark.parametrize("value", [b"nonsense", b"\xff", b"00-0-0-01", b""])
async def test_what_is_no_traceparent_is_passed_over(value: bytes) -> None:
    collector = Collector()
    async with traced(FakeEngine(EngineConfig()), collector) as services:
        await ask(services, make_job(), (b"traceparent", value))
    assert collector.request.parent is None


async def test_a_trace_that_its_caller_does_not_sample_leaves_nothing() -> None:
    collector = Collector()
    async with traced(FakeEngine(EngineConfig()), collector) as services:
        await ask(services, make_job(), (b"traceparent", f"00-{TRACE}-{PARENT}-00".encode()))
    assert collector.spans == []


async def test_failures_and_refusals_are_errors_with_a_type() -> None:
    collector = Collector()
    engine = FakeEngine(EngineConfig(), rule=lambda *_: -1)
    async with traced(engine, collector) as services:
        with pytest.raises(ChoiceFailed):
            await ask(services, make_job(2, stream=False))
        engine.refuse_next(EngineOverloaded("full"))
        with pytest.raises(EngineOverloaded):
            await ask(services, make_job())
    failed, refused = (span for span in collector.spans if span.kind is SpanKind.SERVER)
    for span, outcome, name in ((failed, "error", "ChoiceFailed"), (refused, "refused", "EngineOverloaded")):
        assert span.status.status_code is StatusCode.ERROR and span.attributes["error.type"] == name
        assert span.attributes["chorus.outcome"] == outcome
    assert len(collector.choices) == 2, "what is refused has no choices"


async def test_no_text_of_prompt_or_answer_is_in_a_span() -> None:
    collector = Collector()
    async with traced(FakeEngine(EngineConfig()), collector) as services:
        await ask(services, make_job(2, max_tokens=(8,), stop=("zebra",)))
    said = "".join(span.to_json() for span in collector.spans)
    assert "defgh" not in said and "zebra" not in said


async def test_a_request_that_ends_before_there_is_a_job_is_an_error_with_a_type(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its span has the route and nothing that the client has written."""
    collector, parent = Collector(), {"traceparent": f"00-{TRACE}-{PARENT}-01"}
    async with app_and_client(SETTINGS) as (app, client):
        tracing = app.state.services.tracing = Tracing(collector)
        await client.post(CHAT, json=BODY | {"model": "zebra"}, headers=parent)
        await client.post("/v1/completions", json={"model": "org/m", "prompt": "zebra", "n": 0})
        monkeypatch.setattr(type(app.state.services.tokenizer), "render_chat", lambda *_: 1 / 0)
        await client.post(CHAT, json=BODY)
        await tracing._export()
    model, field, bug = collector.spans
    for span, route, status, error, outcome in (
        (model, CHAT, 404, "model_not_found", "refused"),
        (field, "/v1/completions", 400, "invalid_value", "refused"),
        (bug, CHAT, 500, "ZeroDivisionError", "error"),
    ):
        assert span.name == f"POST {route}" and span.kind is SpanKind.SERVER
        assert span.status.status_code is StatusCode.ERROR and span.start_time < span.end_time
        assert span.attributes["error.type"] == error and span.attributes["http.response.status_code"] == status
        assert span.attributes["chorus.outcome"] == outcome and "zebra" not in span.to_json()
    assert f"{model.context.trace_id:032x}" == TRACE and field.parent is None


TALK: list[dict[str, Any]] = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": [{"type": "text", "text": "hi"}]},
    {
        "role": "assistant",
        "reasoning_content": "look it up",
        "content": None,
        "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"a": 1}'}}],
    },
    {"role": "tool", "tool_call_id": "c1", "content": "found"},
]


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
async def test_texts_are_in_the_span_where_they_are_asked_for(stream: bool) -> None:
    """In the form of OpenTelemetry's conventions for generative AI."""
    collector = Collector()
    async with app_and_client(replace(SETTINGS, trace_content=True, otlp_endpoint="http://127.0.0.1:1")) as (
        app,
        client,
    ):
        tracing = app.state.services.tracing = Tracing(collector)
        body = BODY | {"messages": TALK, "n": 2, "stream": stream}
        answer = await client.post(CHAT, json=body)
        assert answer.status_code == 200, answer.text
        await client.post("/v1/completions", json={"model": "org/m", "prompt": ["a", "b"], "max_tokens": 1})
        await tracing._export()
    chat, completion = (span for span in collector.spans if span.kind is SpanKind.SERVER)
    assert [message["parts"] for message in json.loads(chat.attributes["gen_ai.input.messages"])] == [
        [{"type": "text", "content": "be brief"}],
        [{"type": "text", "content": "hi"}],
        [
            {"type": "reasoning", "content": "look it up"},
            {"type": "tool_call", "id": "c1", "name": "look", "arguments": {"a": 1}},
        ],
        [{"type": "tool_call_response", "id": "c1", "response": "found"}],
    ]
    said = json.loads(chat.attributes["gen_ai.output.messages"])
    assert [(message["role"], message["finish_reason"]) for message in said] == [("assistant", "length")] * 2
    if not stream:
        texts = [choice["message"]["content"] for choice in answer.json()["choices"]]
        assert [message["parts"] for message in said] == [[{"type": "text", "content": text}] for text in texts]
    assert all(len(message["parts"][0]["content"]) == 3 for message in said)
    asked = json.loads(completion.attributes["gen_ai.input.messages"])
    assert [message["parts"][0]["content"] for message in asked] == ["a", "b"]
    assert len(json.loads(completion.attributes["gen_ai.output.messages"])) == 2


def test_reasoning_and_calls_of_an_answer_are_parts_of_their_own_and_long_texts_are_cut() -> None:
    transcript = Transcript(1)
    start, arguments = ToolCallStart(0, "c1", "look"), ToolCallArguments(0, "{}")
    transcript.add([ChoiceEvent(0, "x" * MAX_TEXT, reasoning="hm"), ChoiceEvent(0, "yz", calls=(start, arguments))])
    (message,) = json.loads(output_messages(transcript.choices(), [EndReason.STOP]))
    assert message["finish_reason"] == "tool_call"
    assert message["parts"] == [
        {"type": "reasoning", "content": "hm"},
        {"type": "text", "content": "x" * MAX_TEXT + "..."},
        {"type": "tool_call", "id": "c1", "name": "look", "arguments": "{}"},
    ]


async def test_embeddings_are_one_span_below_the_callers_without_text() -> None:
    collector, before = Collector(), time.time_ns()
    engine = FakeEngine(EngineConfig(embedding_model="any", served_embedding_model_name="e"))
    batch = [EmbedRequest(tuple(b"secret"), dimensions=3), EmbedRequest(tuple(b"x"), dimensions=3)]
    job = EmbeddingJob("e", batch, False, ANYONE, "r", time.monotonic(), 60)
    headers = [(b"traceparent", f"00-{TRACE}-{PARENT}-01".encode())]
    async with traced(engine, collector) as services:
        for refusal in (None, EngineOverloaded("full")):
            client = Client()
            if refusal is not None:
                engine.refuse_next(refusal)
            with suppress(EngineOverloaded):
                await EmbeddingResponse(job, services)({"headers": headers}, client.receive, client.send)  # type: ignore
    answered, refused = collector.spans
    for span in (answered, refused):
        assert (span.name, span.kind) == ("embeddings e", SpanKind.SERVER)
        assert f"{span.parent.trace_id:032x}" == TRACE and f"{span.parent.span_id:016x}" == PARENT
        assert before <= span.start_time <= span.end_time <= time.time_ns()
        assert "secret" not in str(dict(span.attributes))
    attributes = dict(answered.attributes)
    assert attributes["gen_ai.operation.name"] == "embeddings" and attributes["gen_ai.usage.input_tokens"] == 7
    assert attributes["gen_ai.embeddings.dimension.count"] == 3 and attributes["chorus.outcome"] == "ok"
    assert refused.status.status_code is StatusCode.ERROR
    assert refused.attributes["error.type"] == "EngineOverloaded"


def test_texts_without_traces_are_a_mistake() -> None:
    with pytest.raises(SettingsError, match="CHORUS_TRACE_CONTENT needs CHORUS_OTLP_ENDPOINT"):
        create_app(Settings(engine="fake", trace_content=True))


async def test_a_collector_that_takes_nothing_costs_bounded_memory(caplog: pytest.LogCaptureFixture) -> None:
    collector = Collector(SpanExportResult.FAILURE)
    async with traced(FakeEngine(EngineConfig()), collector) as services:
        for _ in range(3):
            await ask(services, make_job(64, stream=False, max_tokens=(1,)))
    assert sum(map(len, collector.batches)) == 3 * 65 < MAX_WAITING
    assert "spans were lost" in caplog.text


async def test_a_collector_that_is_not_there_does_not_hold_the_end() -> None:
    """Its port refuses; the exporter would try again for longer than anybody waits."""
    tracing = tracing_to("http://127.0.0.1:1")
    async with services_of(FakeEngine(EngineConfig())) as services, anyio.create_task_group() as group:
        services.tracing = tracing
        group.start_soon(tracing.run)
        await ask(services, make_job(max_tokens=(1,)))
        group.cancel_scope.cancel()


@pytest.mark.parametrize("raw", ["collector:4318", "http://user:secret@collector", "http://c/?a=b", "ftp://c"])
def test_an_endpoint_is_a_url_without_secrets(raw: str) -> None:
    with pytest.raises(SettingsError, match="CHORUS_OTLP_ENDPOINT"):
        read_settings({"CHORUS_OTLP_ENDPOINT": raw})


def test_without_the_extra_the_start_ends_with_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "service.tracing", None)
    with pytest.raises(SettingsError, match=r"the extra `tracing`"):
        create_app(Settings(engine="fake", otlp_endpoint="http://collector:4318"))


def test_it_is_off_by_default() -> None:
    app = create_app(Settings(engine="fake"))
    assert app.state.services.tracing is None
