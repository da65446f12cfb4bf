"""What /metrics counts of requests and of the engine, under our names and under vLLM's."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import anyio
import pytest
from prometheus_client.parser import text_string_to_metric_families

from engine.api import EngineDead, EngineNotReady, EngineOverloaded, RequestTooLarge
from engine.config import EngineConfig
from engine.fake import FakeEngine
from service import __version__
from service.auth import Caller, Limits
from service.errors import ApiError, body_too_large, invalid, model_not_found
from service.finished import REFUSAL_REASONS, refusal_reason
from service.gate import UNAUTHORIZED
from service.job import GenerationJob
from service.limits import Quotas
from service.metrics import Metrics
from service.running import deadline_passed

from .apps import SETTINGS, serving
from .asgi import Kind, answer, make_job, services_of, until

pytestmark = pytest.mark.anyio

CHAT = "/v1/chat/completions"
BODY = {"model": "org/m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, "seed": 1}


def samples(metrics: Metrics | str) -> dict[str, float]:
    """Name and labels -> value."""
    text = metrics if isinstance(metrics, str) else metrics.render().decode()
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = ",".join(f"{name}={value}" for name, value in sorted(sample.labels.items()))
            found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return found


def now(job: GenerationJob) -> GenerationJob:
    return replace(job, received_at=time.monotonic())


@pytest.mark.parametrize(("kind", "operation"), [("chat", "chat"), ("completion", "text_completion")])
@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
async def test_times_of_a_request_are_in_opentelemetrys_histograms(kind: Kind, operation: str, stream: bool) -> None:
    """n choices are one request with one first token, but each has a time per token of its own."""
    async with services_of(FakeEngine(EngineConfig(), step_seconds=0.002)) as services:
        started = time.monotonic()
        await answer(services, now(make_job(3, kind=kind, stream=stream, max_tokens=(1, 5, 5))))
        passed = time.monotonic() - started
        found = samples(services.metrics)
    labels = f"gen_ai_operation_name={operation},gen_ai_provider_name=chorus,gen_ai_request_model="
    labels += services.engine.info.model
    assert found[f"gen_ai_server_request_duration_seconds_count{{error_type=,{labels}}}"] == 1
    duration = found[f"gen_ai_server_request_duration_seconds_sum{{error_type=,{labels}}}"]
    first = found[f"gen_ai_server_time_to_first_token_seconds_sum{{{labels}}}"]
    assert 0 < found["chorus_queue_seconds_sum"] <= first < duration <= passed
    assert found[f"gen_ai_server_time_to_first_token_seconds_count{{{labels}}}"] == 1
    assert found[f"gen_ai_server_time_per_output_token_seconds_count{{{labels}}}"] == 2
    assert found[f"gen_ai_server_time_per_output_token_seconds_sum{{{labels}}}"] <= 2 * (duration - first) / 4 + 1e-9
    assert (found["chorus_choices_per_request_count"], found["chorus_choices_per_request_sum"]) == (1, 3)
    assert found["chorus_request_prompt_tokens_sum"] == 3
    assert found["chorus_request_generation_tokens_sum"] == 11


async def test_what_was_made_for_nothing_is_counted_and_lasts_to_the_cancel() -> None:
    async with services_of(FakeEngine(EngineConfig())) as services:
        async with anyio.create_task_group() as group:
            group.start_soon(answer, services, now(make_job(2, max_tokens=(2, 4000))))
            await until(lambda: services.engine.health().generation_tokens > 20)
            (running,) = services.running
            running.cancel()
        found = samples(services.metrics)
        assert found["chorus_aborted_tokens_total"] == found["chorus_generation_tokens_total"] - 2
    cancelled = [key for key in found if "duration_seconds_count{error_type=cancelled" in key and found[key]]
    assert len(cancelled) == 1


async def test_the_engines_steps_are_histograms() -> None:
    async with services_of(FakeEngine(EngineConfig())) as services:
        await answer(services, make_job(4, max_tokens=(5,)))
        found, steps = samples(services.metrics), services.engine.health().num_steps
    assert found["chorus_step_seconds_count"] == found["chorus_step_seconds_bucket{le=+Inf}"] == steps
    assert found["chorus_batch_size_sum"] == 20
    assert found["chorus_batch_size_bucket{le=4.0}"] == found["chorus_batch_size_count"]
    assert found["chorus_inter_token_seconds_count"] == 4 * 4
    assert found["chorus_looked_up_prompt_tokens_total"] == 3
    assert found["chorus_preemptions_total"] == 0


def key_limit() -> Exception:
    quotas, caller = Quotas(), Caller("a", limits=Limits(requests_per_minute=1))
    quotas.take_request(caller)
    with pytest.raises(ApiError) as caught:
        quotas.take_request(caller)
    return caught.value


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (EngineOverloaded("full"), "queue_full"),
        (key_limit(), "key_limit"),
        (EngineNotReady("loading"), "not_ready"),
        (EngineDead("dead"), "not_ready"),
        (deadline_passed(), "deadline"),
        (RequestTooLarge("long", "max_tokens"), "too_large"),
        (body_too_large(3), "too_large"),
        (model_not_found("m2"), "unknown_model"),
        (invalid("no"), "invalid"),
        (ApiError(UNAUTHORIZED), "unauthorized"),
        (RequestTooLarge("many", "n"), "invalid"),
    ],
)
def test_a_refusal_has_one_of_a_few_reasons(error: Exception, reason: str) -> None:
    assert refusal_reason(error) == reason
    assert reason in REFUSAL_REASONS


def test_refusals_are_counted_by_reason_wherever_they_happen() -> None:
    """In the controller, before there is a job, and at the engine's door."""
    engine = FakeEngine(SETTINGS.engine_config())
    with serving(engine=engine) as client:
        client.post(CHAT, json=BODY | {"n": 0})
        client.post(CHAT, json=BODY | {"model": "m2"})
        engine.refuse_next(EngineOverloaded("full", 3))
        client.post(CHAT, json=BODY)
        client.post(CHAT, json=BODY | {"max_tokens": 10**6})
        found = samples(client.get("/metrics").text)
    counts = {reason: found[f"chorus_refusals_total{{reason={reason}}}"] for reason in REFUSAL_REASONS}
    assert {reason for reason, count in counts.items() if count} == {
        "invalid",
        "unknown_model",
        "queue_full",
        "too_large",
    }
    assert found["chorus_requests_total{outcome=refused}"] == sum(counts.values()) == 4
    assert not any(found[key] for key in found if "duration_seconds_count" in key), "they would look like fast ones"


def test_what_ends_before_there_is_a_job_has_its_line_and_its_place_in_the_counts(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a key, with a bad field, and by a bug of ours, which is no refusal."""
    caplog.set_level("INFO")
    (tmp_path / "keys").write_text("sk-known team-a\n")
    known, unknown = ({"Authorization": f"Bearer sk-{name}", "X-Request-Id": name} for name in ("known", "unknown"))
    with serving(replace(SETTINGS, api_keys_file=tmp_path / "keys")) as client:
        client.post(CHAT, json=BODY, headers=unknown)
        client.get("/metrics", headers=unknown)
        client.post(CHAT, json=BODY | {"n": 0}, headers=known)
        monkeypatch.setattr(type(client.app.state.services.tokenizer), "render_chat", lambda *_: 1 / 0)
        client.post(CHAT, json=BODY, headers=known)
        found = samples(client.get("/metrics", headers=known).text)
    assert found["chorus_refusals_total{reason=unauthorized}"] == found["chorus_refusals_total{reason=invalid}"] == 1
    assert found["chorus_requests_total{outcome=refused}"] == 2, "a scrape without a key is no request for an answer"
    assert found["chorus_requests_total{outcome=error}"] == 1
    lines = [vars(record)["fields"] for record in caplog.records if record.getMessage() == "request"]
    assert [line.get("route") for line in lines] == [None, CHAT, CHAT]
    told = [(line["request_id"], line.get("key"), line["outcome"], line["status"], line["error"]) for line in lines]
    assert told == [
        ("unknown", None, "refused", 401, "invalid_api_key"),
        ("known", "team-a", "refused", 400, "invalid_value"),
        ("known", "team-a", "error", 500, "ZeroDivisionError"),
    ]


def test_the_runner_that_serves_is_a_label() -> None:
    with serving() as client:
        found = samples(client.get("/metrics").text)
    assert found[f"chorus_build_info{{model=org/m,runner=fake,version={__version__}}}"] == 1


VLLM_NAMES = {
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "vllm:num_preemptions_total",
    "vllm:prompt_tokens_total",
    "vllm:generation_tokens_total",
    "vllm:prefix_cache_queries_total",
    "vllm:prefix_cache_hits_total",
    "vllm:request_success_total",
    "vllm:e2e_request_latency_seconds_bucket",
    "vllm:time_to_first_token_seconds_bucket",
    "vllm:inter_token_latency_seconds_bucket",
    "vllm:request_time_per_output_token_seconds_bucket",
    "vllm:request_queue_time_seconds_bucket",
    "vllm:request_prompt_tokens_bucket",
    "vllm:request_generation_tokens_bucket",
    "vllm:request_params_n_bucket",
    "vllm:iteration_tokens_total_bucket",
}


def test_vllms_names_are_there_when_asked_for() -> None:
    with serving(replace(SETTINGS, metrics_compat="vllm")) as client:
        assert client.post(CHAT, json=BODY | {"n": 2}).status_code == 200
        text = client.get("/metrics").text
    found = samples(text)
    labels = "{engine=0,model_name=org/m}"
    assert {key.split("{")[0] for key in found} >= VLLM_NAMES
    assert all("model_name=org/m" in key for key in found if key.startswith("vllm:"))
    assert found["vllm:request_success_total{engine=0,finished_reason=length,model_name=org/m}"] == 2
    assert found[f"vllm:generation_tokens_total{labels}"] == found["chorus_generation_tokens_total"] == 6
    assert found[f"vllm:e2e_request_latency_seconds_count{labels}"] == 1
    assert found[f"vllm:request_params_n_sum{labels}"] == 2
    assert found[f"vllm:kv_cache_usage_perc{labels}"] == 0


def test_vllms_names_are_absent_otherwise() -> None:
    with serving() as client:
        assert "vllm" not in client.get("/metrics").text


async def test_usage_of_pages_is_a_share(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = FakeEngine(EngineConfig())
    health = replace(engine.health(), pages_free=1, pages_cached=2, pages_held=1)
    monkeypatch.setattr(engine, "health", lambda: health)
    found = samples(Metrics(engine, "vllm"))
    assert [value for key, value in found.items() if key.startswith("vllm:kv_cache_usage_perc")] == [0.25]
