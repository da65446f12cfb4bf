"""What would surprise somebody later is refused when the chart is rendered, with the reason."""

from __future__ import annotations

import json

import pytest

from engine.config import EngineConfig
from service.backends import build_engine
from service.settings import read_settings
from tests.helm.chart import RenderError, default_values, environment, rendered, schema

REFUSALS = [
    ('image.tag="latest"', "/image/tag"),
    ('image.digest="sha256:12"', "/image/digest"),
    ("replicas=3", "additional properties 'replicas'"),
    ("engine.maxNumSeq=3", "additional properties 'maxNumSeq'"),
    ("engine.maxNumSeqs=0", "/engine/maxNumSeqs"),
    ('engine.maxNumSeqs="many"', "/engine/maxNumSeqs"),
    ('engine.dtype="int3"', "/engine/dtype"),
    ('engine.kvCacheBytes="2 gigabytes"', "/engine/kvCacheBytes"),
    ("engine.releaseTimeout=60", "/engine/releaseTimeout"),
    ('engine.type="upstream"', "/engine/upstream/urls"),
    ('engine.upstream.urls=["http://vllm:8000"]', "/engine/upstream/urls"),
    (
        'engine={"type": "upstream", "upstream": {"urls": ["http://vllm"], "maxRetries": -1}}',
        "/engine/upstream/maxRetries",
    ),
    (
        'engine={"type": "upstream", "upstream": {"urls": ["http://vllm"]}};model={"source": "hub", "id": "a/b"}',
        "no model here",
    ),
    ('device="tpu"', "/device"),
    ("server.port=80", "/server/port"),
    ('model.source="hub"', "/model/id"),
    ('model={"source": "existingClaim", "existingClaim": "a"}', "/model/servedName"),
    ('model={"source": "existingClaim", "servedName": "a"}', "/model/existingClaim"),
    ('model={"source": "hostPath", "hostPath": "models", "servedName": "a"}', "/model/hostPath"),
    ('model={"source": "hostPath", "hostPath": "/m", "path": "../etc", "servedName": "a"}', "/model/path"),
    ('model={"source": "image", "image": {"reference": "models:latest"}, "servedName": "a"}', "/model/image/reference"),
    ('model.newClaim.accessMode="ReadOnlyMany"', "/model/newClaim/accessMode"),
    ('extraEnv=[{"name": "CHORUS_MAX_N", "value": "3"}]', "/extraEnv/0/name"),
    ('extraEnv=[{"name": "HF_TOKEN", "value": "hf_x"}]', "valueFrom.secretKeyRef"),
    ('extraEnv=[{"name": "proxy_password", "value": "x"}]', "valueFrom.secretKeyRef"),
    ('extraEnv=[{"name": "OTEL_EXPORTER_OTLP_HEADERS", "value": "api-key=x"}]', "valueFrom.secretKeyRef"),
    ('autoscaling.type="cpu"', "/autoscaling/type"),
    ("autoscaling.minReplicas=0", "/autoscaling/minReplicas"),
    ("autoscaling.minReplicas=5", "minReplicas is greater"),
    ("pdb.maxUnavailable=0", "/pdb/maxUnavailable"),
    ("terminationGracePeriodSeconds=149", "requests would be cut"),
    ("server.drainSeconds=-1", "/server/drainSeconds"),
    ('monitoring={"serviceMonitor": {"enabled": true}, "podMonitor": {"enabled": true}}', "count everything twice"),
    ('model={"source": "newClaim", "id": "a/b"};replicaCount=2', "one pod only"),
    ('model={"source": "newClaim", "id": "a/b"};autoscaling.type="hpa"', "one pod only"),
    ('responses.existingClaim="a";replicaCount=2', "one pod only"),
    ('responses.existingClaim="a";autoscaling.type="hpa"', "one pod only"),
    ('responses.mountPath="data"', "/responses/mountPath"),
    ("monitoring.traceContent=true", "needs monitoring.otlpEndpoint"),
    ('ingress.annotations={"a": true}', "/ingress/annotations/a"),
    ('httpRoute.timeout="1 hour"', "/httpRoute/timeout"),
    ('ingress={"enabled": true, "hosts": ["https://a.example.com/"]}', "/ingress/hosts/0"),
    ('image.repository="registry.example.com/chorus:1.0"', "/image/repository"),
    ('fullnameOverride="My_LLM"', "/fullnameOverride"),
    ('nameOverride="Voices"', "/nameOverride"),
    ('replicaCount="3"', "/replicaCount"),
    ('server.port="8000"', "/server/port"),
    ("server.drainSeconds=null", "missing property 'drainSeconds'"),
    ("image=null", "missing property 'image'"),
    ("probes.liveness=null", "missing property 'liveness'"),
    ('commonLabels={"team": "a b"}', "/commonLabels/team"),
    (f'podLabels={{"team": "{"x" * 64}"}}', "/podLabels/team"),
    ('nodeSelector={"gpu": true}', "/nodeSelector/gpu"),
    ('extraEnv=[{"name": "A", "value": "1"}, {"name": "A", "value": "2"}]', "A comes twice"),
    ('extraEnv=[{"name": "HOME", "value": "/x"}]', "HOME comes twice"),
    (
        'extraEnv=[{"name": "A", "value": "1", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}}]',
        "/extraEnv/0",
    ),
    ('extraVolumes=[{"name": "tmp", "emptyDir": {}}]', "tmp comes twice"),
    ('extraVolumeMounts=[{"name": "shm", "mountPath": "/tmp/"}]', "/tmp comes twice"),
    ('extraVolumeMounts=[{"name": "none", "mountPath": "/x"}]', "no volume of the pod"),
    ('extraInitContainers=[{"name": "chorus", "image": "a:1"}]', "chorus comes twice"),
    ('cache.mountPath="/tmp"', "/tmp comes twice"),
    ('model={"source": "download", "id": "a/b", "mountPath": "/app"}', "/model/mountPath"),
    ("monitoring.port=8000", "server.port or service.port"),
    ("monitoring.port=8080;service.port=8080", "server.port or service.port"),
]


@pytest.mark.parametrize(("override", "reason"), REFUSALS)
def test_refused(override: str, reason: str) -> None:
    with pytest.raises(RenderError) as refusal:
        rendered("default", *override.split(";"))
    assert reason in str(refusal.value)


@pytest.mark.parametrize("release", ["1chorus", "my.chorus"])
def test_release_that_no_service_can_be_named_after_is_refused(release: str) -> None:
    with pytest.raises(RenderError, match="set fullnameOverride"):
        rendered(release=release)
    rendered("default", 'fullnameOverride="llm"', release=release)


@pytest.mark.parametrize(
    "override",
    [
        "commonLabels=null",
        "podLabels=null",
        "podAnnotations=null",
        "extraEnv=null",
        "extraVolumes=null",
        "extraVolumeMounts=null",
        "resources=null",
        "resources.requests.cpu=0.5",
        "tolerations=null",
        "image.tag=null",
        "ingress.annotations=null",
        'image.repository="registry.example.com:5000/team/chorus_cpu"',
        'ingress={"enabled": true, "hosts": ["*.example.com"]}',
    ],
)
def test_taken(override: str) -> None:
    rendered("default", override)


def test_names_that_only_contain_a_word_of_secrets_are_taken() -> None:
    env = [{"name": "TOKENIZERS_PARALLELISM", "value": "true"}, {"name": "KEYCLOAK_URL", "value": "http://k"}]
    secret = {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hub", "key": "token"}}}
    rendered("default", f"extraEnv={json.dumps([*env, secret])}")


def test_grace_period_that_suffices_is_taken() -> None:
    rendered("default", "terminationGracePeriodSeconds=150")


@pytest.mark.parametrize("engine", schema()["properties"]["engine"]["properties"]["type"]["enum"])
def test_every_engine_of_the_schema_is_one_of_the_servers(engine: str) -> None:
    values = {"type": engine, "upstream": {"urls": ["http://vllm:8000"] if engine == "upstream" else []}}
    build_engine(read_settings(environment(rendered("default", f"engine={json.dumps(values)}"))))


@pytest.mark.parametrize(
    ("engine", "values", "reason"),
    [
        ("torch", {"vllm": {"tensorParallelSize": 2}}, "engine.vllm.tensorParallelSize needs"),
        ("torch", {"vllm": {"enforceEager": False}}, "engine.vllm.enforceEager needs"),
        ("torch", {"upstream": {"model": "m"}}, "engine.upstream.model needs"),
        ("vllm", {"runner": "native"}, "engine.runner means nothing"),
        ("vllm", {"numThreads": 2}, "engine.numThreads means nothing"),
        (
            "upstream",
            {"embeddingModel": "e", "upstream": {"urls": ["http://a"]}},
            "engine.embeddingModel means nothing",
        ),
    ],
)
def test_what_an_engine_has_no_use_for_is_refused_as_the_server_would(
    engine: str, values: dict[str, object], reason: str
) -> None:
    with pytest.raises(RenderError, match=reason):
        rendered("default", f"engine={json.dumps({'type': engine} | values)}")


def test_default_of_max_num_seqs_is_above_what_autoscaling_aims_at() -> None:
    """Or a pod would be full before there is a second one."""
    assert default_values()["autoscaling"]["targetRunning"] < EngineConfig().max_num_seqs
