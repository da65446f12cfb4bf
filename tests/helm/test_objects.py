"""What the objects say fits together, and is what a platform team would have written."""

from __future__ import annotations

import itertools
import json
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from engine.config import UpstreamConfig, VllmOptions
from service.settings import Settings, read_settings, unknown_variables
from tests.helm.chart import (
    VALUE_SETS,
    Object,
    environment,
    kinds,
    only,
    own_containers,
    pod_specs,
    rendered,
    rendered_text,
    server,
    yaml,
)

every_value_set = pytest.mark.parametrize("value_set", VALUE_SETS)


def deployment(objects: tuple[Object, ...]) -> Object:
    return only(objects, "Deployment")["spec"]


# -- names and selectors


@every_value_set
def test_selectors_match_the_servers_pods_and_no_others(value_set: str) -> None:
    objects = rendered(value_set)
    labels = deployment(objects)["template"]["metadata"]["labels"]
    selectors = [deployment(objects)["selector"]["matchLabels"], only(objects, "Service")["spec"]["selector"]]
    for item in objects:
        if item["kind"] in ("PodDisruptionBudget", "PodMonitor"):
            selectors.append(item["spec"]["selector"]["matchLabels"])
        if item["kind"] == "NetworkPolicy":
            selectors.append(item["spec"]["podSelector"]["matchLabels"])
        if item["kind"] == "ServiceMonitor":
            service_labels = only(objects, "Service")["metadata"]["labels"]
            assert item["spec"]["selector"]["matchLabels"].items() <= service_labels.items()
    for constraint in deployment(objects)["template"]["spec"].get("topologySpreadConstraints", []):
        selectors.append(constraint["labelSelector"]["matchLabels"])
    test_labels = only(objects, "Pod")["metadata"]["labels"]
    for selector in selectors:
        assert selector.items() <= labels.items()
        assert not selector.items() <= test_labels.items(), "the helm test's pod would get requests"


def test_selector_depends_on_names_alone() -> None:
    """It cannot be changed by an upgrade: a value in it would break `helm upgrade`."""
    selectors = {
        json.dumps(deployment(rendered(name))["selector"])
        for name in VALUE_SETS
        if name not in ("everything",)  # that one changes the name
    }
    assert len(selectors) == 1


@every_value_set
def test_ports_resolve(value_set: str) -> None:
    objects = rendered(value_set)
    container_ports = {port["name"]: port["containerPort"] for port in server(objects)["ports"]}
    assert container_ports["http"] == int(environment(objects)["CHORUS_PORT"])
    service_port, *others = only(objects, "Service")["spec"]["ports"]
    assert [port["targetPort"] for port in (service_port, *others)] == list(container_ports)
    metrics_port = "metrics" if others else "http"
    if others:
        assert read_settings(environment(objects)).metrics_bind == ("0.0.0.0", container_ports["metrics"])
    for item in objects:
        spec = item.get("spec", {})
        match item["kind"]:
            case "Ingress":
                backends = [path["backend"] for rule in spec["rules"] for path in rule["http"]["paths"]]
                assert {backend["service"]["port"]["name"] for backend in backends} == {service_port["name"]}
                assert {backend["service"]["name"] for backend in backends} == {
                    only(objects, "Service")["metadata"]["name"]
                }
            case "HTTPRoute":
                for backend in itertools.chain.from_iterable(rule["backendRefs"] for rule in spec["rules"]):
                    assert backend == {
                        "name": only(objects, "Service")["metadata"]["name"],
                        "port": service_port["port"],
                    }
            case "ServiceMonitor":
                assert [endpoint["port"] for endpoint in spec["endpoints"]] == [metrics_port]
            case "PodMonitor":
                assert [endpoint["port"] for endpoint in spec["podMetricsEndpoints"]] == [metrics_port]
            case "NetworkPolicy":
                assert [port["port"] for port in spec["ingress"][0]["ports"]] == list(container_ports)
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert server(objects)[probe]["httpGet"]["port"] in container_ports


def test_long_release_names_stay_within_the_limits_and_apart() -> None:
    """Two releases in one namespace whose names begin alike."""
    names: set[tuple[str, str]] = set()
    for end in "ab":
        objects = [item for item in rendered("everything", release="a" * 52 + end) if item["metadata"].get("labels")]
        assert all(len(item["metadata"]["name"]) <= 63 for item in objects)
        found = {(item["kind"], item["metadata"]["name"]) for item in objects} - {("ServiceAccount", "chorus-server")}
        assert found.isdisjoint(names)
        names |= found


class _StrictLoader(yaml.SafeLoader):
    """Refuses what YAML does not allow and its parsers take: a key that comes twice."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        assert len(keys) == len(set(keys)), f"twice: {[key for key in keys if keys.count(key) > 1]} {node.start_mark}"
        mapping: dict[Any, Any] = super().construct_mapping(node, deep)
        return mapping


@pytest.mark.parametrize("value_set", ["cpu", "podmonitor", "everything"])
def test_labels_and_annotations_of_the_user_never_replace_or_repeat_the_charts(value_set: str) -> None:
    """A pod whose label was overwritten would no longer be selected by its own Deployment."""
    labels = {"app.kubernetes.io/component": "mine", "app.kubernetes.io/name": "mine", "team": "llm"}
    options = {"podLabels": labels, "commonLabels": labels, "podAnnotations": {"checksum/config": "mine", "a": "b"}}
    options |= {f"monitoring.{kind}.labels": labels for kind in ("serviceMonitor", "podMonitor", "prometheusRule")}
    options["monitoring.dashboard.labels"] = labels
    text = rendered_text(value_set, *(f"{key}={json.dumps(value)}" for key, value in options.items()))
    objects = tuple(item for item in yaml.load_all(text, _StrictLoader) if item)
    own = rendered(value_set)
    for item in objects:
        found = item["metadata"].get("labels", {})
        if "helm.sh/chart" not in found:
            continue  # of extraObjects, which are the user's own
        assert found["app.kubernetes.io/name"] != "mine" and found["team"] == "llm"
    for kind, component in (("Service", "server"), ("Pod", "test")):
        assert only(objects, kind)["metadata"]["labels"]["app.kubernetes.io/component"] == component
    template, before = deployment(objects)["template"]["metadata"], deployment(own)["template"]["metadata"]
    assert deployment(objects)["selector"]["matchLabels"].items() <= template["labels"].items()
    assert template["labels"]["team"] == "llm"
    assert template["annotations"] == {"checksum/config": before["annotations"]["checksum/config"], "a": "b"}


# -- settings


@every_value_set
def test_server_takes_its_environment(value_set: str) -> None:
    variables = environment(rendered(value_set))
    read_settings(variables)
    assert unknown_variables(variables) == []


def test_every_value_reaches_the_server_as_it_was_given() -> None:
    # an engine that is elsewhere has no model here, so that no values file can have it all
    objects = rendered("upstream")
    (secret,) = (item["valueFrom"] for item in server(objects)["env"] if item["name"] == "CHORUS_UPSTREAM_API_KEY")
    assert secret == {"secretKeyRef": {"name": "vllm-key", "key": "apiKey"}}
    upstream = environment(objects) | {"CHORUS_UPSTREAM_API_KEY": "k"}
    assert read_settings(upstream).upstream_config() == UpstreamConfig(
        urls=("http://vllm-0.vllm:8000", "https://vllm-1.example.com"),
        model="owner/model",
        api_key="k",
        connect_timeout=2.5,
        idle_timeout=60.0,
        poll_seconds=1.0,
        max_retries=0,
    )
    vllm = environment(rendered("vllm"))
    assert read_settings(vllm).vllm_options() == VllmOptions(
        tensor_parallel_size=4,
        pipeline_parallel_size=1,
        data_parallel_size=1,
        nnodes=1,
        master_addr="127.0.0.1",
        master_port=29501,
        distributed_executor_backend="mp",
        gpu_memory_utilization=0.85,
        quantization="fp8",
        enforce_eager=False,
        kv_transfer_config={"kv_connector": "NixlConnector", "kv_role": "kv_both"},
    )
    kept = environment(rendered("responses"))  # of one pod alone, where everything else is of several
    assert str(read_settings(kept).responses_store) == "/data/responses.sqlite"
    assert read_settings(kept).responses_max_bytes == 5 * 2**30
    variables = environment(rendered("everything"))
    unset = {setting.name for setting in fields(Settings)} - {
        name.removeprefix("CHORUS_").lower() for name in (*variables, *kept, *upstream, *vllm)
    }
    assert not unset, "set them in ci/everything-values.yaml"
    settings = read_settings(variables)
    assert settings.engine_config().max_model_len == 1_000_000, "no float in the way"
    expected: dict[str, Any] = {
        "host": "0.0.0.0",
        "port": 8000,
        "worker": "uvloop",
        "log_level": "warning",
        "log_format": "console",
        "model": "owner/model",
        "served_model_name": "house-model",
        "embedding_model": "owner/embedder",
        "served_embedding_model_name": "house-embedder",
        "device": "cuda",
        "dtype": "bfloat16",
        "runner": "torch",
        "trust_remote_code": False,
        "max_num_seqs": 256,
        "max_num_batched_tokens": 8192,
        "max_queued_seqs": 0,
        "max_queued_tokens": 2**20,
        "kv_cache_bytes": 2**35,
        "enable_prefix_caching": False,
        "num_speculative_tokens": 3,
        "stream_credit": 128,
        "num_threads": 4,
        "release_timeout": 2.5,
        "tool_parser": "hermes",
        "reasoning_parser": "think",
        "trust_request_chat_template": True,
        "template_timeout": 0.5,
        "max_body_bytes": 2**25,
        "body_timeout": 0.5,
        "max_n": 32,
        "request_timeout": 300.0,
        "write_timeout": 30.0,
        "step_timeout": 120.0,
        "cors_origins": ("https://a.example.com", "https://b.example.com:8443"),
        "playground": False,
        "debug": True,
        "api_keys_file": Path("/etc/chorus/api-keys/keys"),
        "metrics_bind": ("0.0.0.0", 9100),
        "metrics_compat": "vllm",
        "otlp_endpoint": "http://collector.tracing:4318",
        "trace_content": True,
        "ping_seconds": 5.0,
        "drain_seconds": 300.0,
        "keep_alive_seconds": 620.0,
        "responses_max_bytes": 2**32,
        "responses_max_age": 3600.0,
        "backlog": 4096,
    }
    assert {name: getattr(settings, name) for name in expected} == expected


def test_values_that_are_null_leave_the_servers_defaults() -> None:
    defaults = read_settings({})
    settings = read_settings(environment(rendered()))
    changed = {name for name in settings.public() if getattr(settings, name) != getattr(defaults, name)}
    assert changed == {"host", "device", "cache_dir", "drain_seconds"}
    assert (settings.keep_alive_seconds, settings.backlog, settings.drain_seconds) == (75, 2048, 110)


def test_kept_responses_have_a_volume_that_can_be_written() -> None:
    objects = rendered("responses")
    store = Path(environment(objects)["CHORUS_RESPONSES_STORE"])
    (mount,) = (one for one in server(objects)["volumeMounts"] if one["mountPath"] == str(store.parent))
    assert not mount.get("readOnly")
    volumes = {one["name"]: one for one in deployment(objects)["template"]["spec"]["volumes"]}
    assert volumes[mount["name"]]["persistentVolumeClaim"] == {"claimName": "chorus-responses"}
    assert deployment(objects)["strategy"]["rollingUpdate"]["maxSurge"] == 0, "two pods never have the file"
    assert "CHORUS_RESPONSES_STORE" not in environment(rendered())


def test_engine_has_as_many_threads_as_the_pod_has_cpus() -> None:
    (threads,) = (item for item in server(rendered())["env"] if item["name"] == "CHORUS_NUM_THREADS")
    assert threads["valueFrom"]["resourceFieldRef"] == {"containerName": "chorus", "resource": "requests.cpu"}
    assert "CHORUS_NUM_THREADS" not in [item["name"] for item in server(rendered("vllm"))["env"]], "it has none"
    for override in ("engine.numThreads=3", 'resources={"requests": null}'):
        names = [item["name"] for item in server(rendered("default", override))["env"]]
        assert "CHORUS_NUM_THREADS" not in names
    assert environment(rendered("default", "engine.numThreads=3"))["CHORUS_NUM_THREADS"] == "3"


def test_change_of_a_setting_rolls_the_pods() -> None:
    def checksum(*overrides: str) -> str:
        return deployment(rendered("default", *overrides))["template"]["metadata"]["annotations"]["checksum/config"]

    assert checksum() != checksum("engine.maxNumSeqs=3")
    assert checksum() == checksum("replicaCount=2")


# -- every pod


@every_value_set
def test_service_links_cannot_reach_any_pod(value_set: str) -> None:
    """A Service named chorus would inject CHORUS_PORT=tcp://..., which is no port."""
    for _, spec in pod_specs(rendered(value_set)):
        assert spec["enableServiceLinks"] is False
        for container in own_containers(spec):
            variables = {item["name"]: item.get("value") for item in container["env"]}
            assert variables["CHORUS_HOST"] and re.fullmatch(r"\d+", variables["CHORUS_PORT"] or "")


@every_value_set
def test_pods_are_restricted(value_set: str) -> None:
    for _, spec in pod_specs(rendered(value_set)):
        assert spec["automountServiceAccountToken"] is False
        context = spec["securityContext"]
        assert (context["runAsUser"], context["runAsGroup"], context["fsGroup"]) == (10001, 10001, 10001)
        assert context["runAsNonRoot"] is True and context["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in own_containers(spec):
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "runAsNonRoot": True,
                "capabilities": {"drop": ["ALL"]},
            }


@every_value_set
def test_mounts_have_volumes_and_only_scratch_and_responses_are_writable(value_set: str) -> None:
    for _, spec in pod_specs(rendered(value_set)):
        volumes = {volume["name"]: volume for volume in spec.get("volumes", [])}
        mounted = set()
        for container in own_containers(spec):
            paths = [mount["mountPath"] for mount in container.get("volumeMounts", [])]
            assert len(paths) == len(set(paths))
            for mount in container.get("volumeMounts", []):
                mounted.add(mount["name"])
                fills = container["name"] == "download" and mount["name"] == "model"
                if not mount.get("readOnly") and not fills and mount["name"] != "responses":
                    assert "emptyDir" in volumes[mount["name"]]
                    assert mount["mountPath"] in ("/tmp", "/var/cache/chorus", "/dev/shm")
        assert mounted == set(volumes)


@every_value_set
def test_caches_point_to_writable_places(value_set: str) -> None:
    variables = environment(rendered(value_set))
    for name in (
        "CHORUS_CACHE_DIR",
        "HOME",
        "XDG_CACHE_HOME",
        "HF_HOME",
        "TORCHINDUCTOR_CACHE_DIR",
        "TRITON_CACHE_DIR",
    ):
        assert variables[name].startswith("/var/cache/chorus")
    assert variables["TMPDIR"] == "/tmp"


@every_value_set
def test_secrets_are_references(value_set: str) -> None:
    assert not [item for item in rendered(value_set) if item["kind"] == "Secret"]
    for _, spec in pod_specs(rendered(value_set)):
        for container in own_containers(spec):
            for item in container["env"]:
                if re.search(r"TOKEN|SECRET|PASSWORD|API_KEY$", item["name"]):
                    assert "value" not in item and "secretKeyRef" in item["valueFrom"]


# -- life of a pod


@every_value_set
def test_probes(value_set: str) -> None:
    container = server(rendered(value_set))
    assert container["startupProbe"]["httpGet"]["path"] == "/health/ready"
    assert container["readinessProbe"]["httpGet"]["path"] == "/health/ready"
    assert container["livenessProbe"]["httpGet"]["path"] == "/health/live"
    startup, liveness = container["startupProbe"], container["livenessProbe"]
    assert (startup["failureThreshold"], startup["periodSeconds"]) == (180, 10)
    assert (liveness["failureThreshold"], liveness["periodSeconds"]) == (6, 10)
    budget = startup["failureThreshold"] * startup["periodSeconds"]
    assert deployment(rendered(value_set))["progressDeadlineSeconds"] > budget, "a rollout would fail while it loads"


@every_value_set
def test_grace_period_holds_the_whole_drain(value_set: str) -> None:
    objects = rendered(value_set)
    pre_stop = server(objects).get("lifecycle", {"preStop": {"sleep": {"seconds": 0}}})["preStop"]["sleep"]["seconds"]
    settings = read_settings(environment(objects))
    grace = deployment(objects)["template"]["spec"]["terminationGracePeriodSeconds"]
    assert grace >= pre_stop + settings.drain_seconds + 10 + 15
    # The server forces its own end after drain, 5 s for last words, the engine's release and 1 s (service/__main__.py).
    assert grace > pre_stop + settings.drain_seconds + 5 + settings.release_timeout + 1


def test_default_grace_period_is_the_sum() -> None:
    assert deployment(rendered())["template"]["spec"]["terminationGracePeriodSeconds"] == 15 + 120 + 15
    assert server(rendered())["lifecycle"] == {"preStop": {"sleep": {"seconds": 15}}}


def test_rollout_surges_on_cpu_and_never_needs_a_spare_gpu() -> None:
    def rolling(value_set: str) -> tuple[int, int]:
        update = deployment(rendered(value_set))["strategy"]["rollingUpdate"]
        return update["maxSurge"], update["maxUnavailable"]

    assert rolling("default") == (1, 0)
    assert rolling("cuda") == (0, 1)
    assert rolling("new-claim-single") == (0, 1), "the new pod could not mount the claim beside the old one"
    assert rolling("new-claim-shared") == (1, 0)


# -- device and model


def test_cuda_asks_for_its_gpus() -> None:
    spec = deployment(rendered("cuda"))["template"]["spec"]
    assert server(rendered("cuda"))["resources"]["limits"] == {"memory": "4Gi", "nvidia.com/gpu": "1"}
    assert spec["runtimeClassName"] == "nvidia"
    assert spec["tolerations"] == [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]
    assert server(rendered("cuda"))["image"] == "chorus:0.1.0-cuda"
    assert server(rendered("everything"))["resources"]["limits"]["nvidia.com/mig-3g.40gb"] == "2"


def test_image_is_the_chart_version_unless_told_otherwise() -> None:
    assert server(rendered())["image"] == "chorus:0.1.0"
    assert server(rendered("airgapped"))["image"].startswith("registry.internal:5000/llm/chorus@sha256:")


MODELS = {
    "default": (None, None),
    "cuda": ("Qwen/Qwen2.5-7B-Instruct", None),
    "download": ("HuggingFaceTB/SmolLM2-1.7B-Instruct", "emptyDir"),
    "new-claim-shared": ("HuggingFaceTB/SmolLM2-1.7B-Instruct", "persistentVolumeClaim"),
    "airgapped": ("/models/SmolLM2-1.7B-Instruct", "persistentVolumeClaim"),
    "hostpath": ("/models/llama.gguf", "hostPath"),
    "image-volume": ("/models", "image"),
}


@pytest.mark.parametrize("value_set", MODELS)
def test_model_is_where_the_server_is_told(value_set: str) -> None:
    model, volume = MODELS[value_set]
    objects = rendered(value_set)
    assert environment(objects).get("CHORUS_MODEL") == model
    mounts = {mount["name"]: mount for mount in server(objects)["volumeMounts"]}
    assert ("model" in mounts) == (volume is not None)
    if volume is not None:
        assert mounts["model"] == {"name": "model", "mountPath": "/models", "readOnly": True}
        (found,) = (v for v in deployment(objects)["template"]["spec"]["volumes"] if v["name"] == "model")
        assert volume in found
    offline = environment(objects).get("HF_HUB_OFFLINE") == "1"
    assert offline == (value_set != "cuda"), "only a server that gets its model itself may ask the hub"


def test_download_and_server_agree_on_the_cache() -> None:
    for value_set in ("download", "new-claim-shared"):
        (download,) = deployment(rendered(value_set))["template"]["spec"]["initContainers"]
        variables = {item["name"]: item.get("value") for item in download["env"]}
        assert variables["HF_HUB_CACHE"] == environment(rendered(value_set))["HF_HUB_CACHE"] == "/models"
        assert "HF_HUB_OFFLINE" not in variables
        assert download["command"][-2] == environment(rendered(value_set))["CHORUS_MODEL"]
        assert download["image"] == server(rendered(value_set))["image"]
    assert [i["name"] for i in server(rendered("download"))["env"] if i["name"] == "HF_TOKEN"] == []


def test_hub_token_and_mirror_reach_the_server() -> None:
    variables = {item["name"]: item for item in server(rendered("hub-mirror"))["env"]}
    assert variables["HF_ENDPOINT"]["value"] == "https://hub.internal"
    assert variables["HF_TOKEN"]["valueFrom"] == {"secretKeyRef": {"name": "hub-token", "key": "token"}}


# -- what is around the pods


def test_default_install_is_small() -> None:
    assert kinds(rendered()) == [
        "ConfigMap",
        "Deployment",
        "NetworkPolicy",
        "Pod",
        "PodDisruptionBudget",
        "Service",
        "ServiceAccount",
    ]


def test_replicas_are_left_to_the_autoscaler() -> None:
    assert deployment(rendered())["replicas"] == 1
    assert deployment(rendered("bare"))["replicas"] == 0
    assert "replicas" not in deployment(rendered("keda")) and "replicas" not in deployment(rendered("hpa"))


def test_scaling_looks_at_choices_and_never_at_cpu() -> None:
    hpa = only(rendered("hpa"), "HorizontalPodAutoscaler")["spec"]
    assert [(metric["type"], metric["pods"]["metric"]["name"]) for metric in hpa["metrics"]] == [
        ("Pods", "chorus_sequences_running"),
        ("Pods", "chorus_sequences_waiting"),
    ]
    keda = only(rendered("keda"), "ScaledObject")["spec"]
    assert {trigger["type"] for trigger in keda["triggers"]} == {"prometheus"}
    assert keda["advanced"]["horizontalPodAutoscalerConfig"]["behavior"] == hpa["behavior"]
    assert hpa["behavior"]["scaleDown"]["stabilizationWindowSeconds"] == 600
    assert hpa["behavior"]["scaleDown"]["policies"] == [{"type": "Pods", "value": 1, "periodSeconds": 120}]
    for target in (hpa["scaleTargetRef"], keda["scaleTargetRef"]):
        assert target["name"] == only(rendered(), "Deployment")["metadata"]["name"]
    assert keda["minReplicaCount"] >= 1, "a queue is only known to a pod that runs"


def test_triggers_count_this_deployments_pods_only() -> None:
    for trigger in only(rendered("keda"), "ScaledObject")["spec"]["triggers"]:
        query = trigger["metadata"]["query"]
        assert 'namespace="llm"' in query
        pattern = re.compile(re.search(r'pod=~"(.*?)"', query)[1])  # type: ignore[index]
        assert pattern.fullmatch("chorus-6d4cf56db6-x2k9p")
        assert not pattern.fullmatch("chorus-two-6d4cf56db6-x2k9p")
        assert not pattern.fullmatch("other-chorus-6d4cf56db6-x2k9p")


def egress(value_set: str, *overrides: str) -> list[tuple[int, ...]]:
    policy = only(rendered(value_set, *overrides), "NetworkPolicy")["spec"]
    assert policy["policyTypes"] == ["Ingress", "Egress"]
    return [tuple(port["port"] for port in rule["ports"]) for rule in policy["egress"]]


def test_egress_is_what_the_model_source_needs() -> None:
    assert egress("default") == [(53, 53)]
    assert egress("airgapped") == []
    assert egress("cuda") == [(53, 53), (443,)]
    assert egress("download") == [(53, 53), (443,)]
    assert egress("everything") == [(53, 53), (443,), (4317, 4318), (9443,)]
    (_, hub) = only(rendered("cuda"), "NetworkPolicy")["spec"]["egress"]
    assert "169.254.0.0/16" in hub["to"][0]["ipBlock"]["except"], "the cloud's metadata address"


def test_egress_has_the_ports_of_the_urls_that_are_given() -> None:
    """A collector or a mirror on another port would be out of reach, and the spans gone without a word."""
    assert egress("default", 'monitoring.otlpEndpoint="http://collector:9999"') == [(53, 53), (4317, 4318, 9999)]
    assert egress("default", 'monitoring.otlpEndpoint="https://collector/x"') == [(53, 53), (4317, 4318, 443)]
    assert egress("hub-mirror", 'model.hubEndpoint="http://hub:8081"') == [(53, 53), (443, 8081)]


def test_a_prefix_is_taken_away_in_front_of_the_server() -> None:
    (rule,) = only(rendered("everything"), "HTTPRoute")["spec"]["rules"]
    assert rule["matches"][0]["path"]["value"] == "/llm"
    rewrite = {"path": {"type": "ReplacePrefixMatch", "replacePrefixMatch": "/"}}
    assert rule["filters"] == [{"type": "URLRewrite", "urlRewrite": rewrite}]
    assert "filters" not in only(rendered("httproute"), "HTTPRoute")["spec"]["rules"][0]
    values = {"enabled": True, "path": "/llm(/|$)(.*)", "pathType": "ImplementationSpecific"}
    (rule,) = only(rendered("default", f"ingress={json.dumps(values)}"), "Ingress")["spec"]["rules"]
    assert rule["http"]["paths"][0]["pathType"] == "ImplementationSpecific"


def test_helm_test_may_always_reach_the_server() -> None:
    (rule,) = only(rendered("airgapped"), "NetworkPolicy")["spec"]["ingress"]
    labels = only(rendered("airgapped"), "Pod")["metadata"]["labels"]
    assert rule["from"][0]["podSelector"]["matchLabels"].items() <= labels.items()
    assert "from" not in only(rendered(), "NetworkPolicy")["spec"]["ingress"][0]


def test_proxies_neither_buffer_nor_cut_streams() -> None:
    annotations = only(rendered("cpu"), "Ingress")["metadata"]["annotations"]
    prefix = "nginx.ingress.kubernetes.io/"
    assert annotations[prefix + "proxy-buffering"] == "off"
    assert annotations[prefix + "proxy-http-version"] == "1.1"
    assert int(annotations[prefix + "proxy-read-timeout"]) >= 3600
    assert annotations[prefix + "proxy-body-size"] == "8m" and read_settings({}).max_body_bytes == 8 * 2**20
    (rule,) = only(rendered("httproute"), "HTTPRoute")["spec"]["rules"]
    assert rule["timeouts"] == {"request": "3600s", "backendRequest": "3600s"}


def test_extra_parts_arrive() -> None:
    objects = rendered("everything")
    spec = deployment(objects)["template"]["spec"]
    assert {"name": "NCCL_DEBUG", "value": "WARN"} in server(objects)["env"]
    assert {"name": "ca", "mountPath": "/etc/ssl/extra", "readOnly": True} in server(objects)["volumeMounts"]
    assert [container["name"] for container in spec["initContainers"]] == ["download", "wait"]
    assert only(objects, "ConfigMap", "ca")["metadata"]["namespace"] == "llm"
    assert only(objects, "ConfigMap", "chorus-voices-extra")
    assert server(rendered("default", 'extraArgs=["--version"]'))["args"] == ["--version"]
    assert spec["priorityClassName"] == "high"
