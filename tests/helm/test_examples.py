"""The examples: values render to valid objects, and the plain manifests fit them and Kubernetes."""

from __future__ import annotations

import re

import kubernetes_validate
import pytest

from tests.helm.chart import CHART, ROOT, Object, RenderError, environment, helm, only, server, yaml
from tests.helm.test_kubernetes import CRDS, VERSIONS

EXAMPLES = CHART / "examples"
VALUES = sorted(path.name for path in EXAMPLES.glob("*-values.yaml"))
MANIFEST = EXAMPLES / "vllm-multi-node.yaml"


def rendered_example(name: str) -> tuple[Object, ...]:
    text = helm("template", "chorus", str(CHART), "-n", "llm", "-f", str(EXAMPLES / name))
    return tuple(document for document in yaml.safe_load_all(text) if document)


def manifest(kind: str) -> Object:
    found: Object = only(tuple(yaml.safe_load_all(MANIFEST.read_text())), kind)
    return found


def pods() -> dict[str, Object]:
    """Of the group, by role."""
    template = manifest("LeaderWorkerSet")["spec"]["leaderWorkerTemplate"]
    return {"leader": template["leaderTemplate"], "worker": template["workerTemplate"]}


def options(pod: Object) -> dict[str, str]:
    (container,) = pod["spec"]["containers"]
    pairs = (word.partition("=") for word in container["command"] if word.startswith("--"))
    return {name: value for name, _, value in pairs}


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", VALUES)
def test_values_render_to_valid_objects(name: str, version: str) -> None:
    for item in rendered_example(name):
        if item["kind"] not in CRDS:
            kubernetes_validate.validate(item, version, strict=True)


def test_one_node_has_a_gpu_for_each_part_of_the_model() -> None:
    objects = rendered_example("vllm-one-node-values.yaml")
    limits = server(objects)["resources"]["limits"]
    assert limits["nvidia.com/gpu"] == environment(objects)["CHORUS_TENSOR_PARALLEL_SIZE"]
    assert environment(objects)["CHORUS_ENGINE"] == "vllm"
    shm = next(mount for mount in server(objects)["volumeMounts"] if mount["mountPath"] == "/dev/shm")
    volumes = only(objects, "Deployment")["spec"]["template"]["spec"]["volumes"]
    assert next(volume for volume in volumes if volume["name"] == shm["name"])["emptyDir"]["medium"] == "Memory"


@pytest.mark.parametrize("version", VERSIONS)
def test_pods_and_service_of_the_manifest_are_valid(version: str) -> None:
    for role, pod in pods().items():
        whole = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": role, **pod["metadata"]}, "spec": pod["spec"]}
        kubernetes_validate.validate(whole, version, strict=True)
    kubernetes_validate.validate(manifest("Service"), version, strict=True)


def test_group_has_the_keys_of_a_leader_worker_set() -> None:
    group = manifest("LeaderWorkerSet")
    assert group["apiVersion"] == "leaderworkerset.x-k8s.io/v1"
    template = group["spec"]["leaderWorkerTemplate"]
    assert set(template) == {"size", "restartPolicy", "leaderTemplate", "workerTemplate"}
    assert template["restartPolicy"] == "RecreateGroupOnPodRestart"


def test_leader_and_worker_are_parts_of_one_engine() -> None:
    leader, worker = options(pods()["leader"]), options(pods()["worker"])
    shared = leader.keys() & worker.keys() - {"--node-rank"}
    assert {name: leader[name] for name in shared} == {name: worker[name] for name in shared}
    assert (leader["--node-rank"], worker["--node-rank"]) == ("0", "$(LWS_WORKER_INDEX)")
    assert "--headless" in worker and "--headless" not in leader
    size = manifest("LeaderWorkerSet")["spec"]["leaderWorkerTemplate"]["size"]
    gpus = int(pods()["leader"]["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"])
    assert int(leader["--tensor-parallel-size"]) * int(leader["--pipeline-parallel-size"]) == size * gpus


def test_chorus_asks_for_the_leaders_service_and_model() -> None:
    objects = rendered_example("upstream-of-multi-node-values.yaml")
    service = manifest("Service")
    assert service["spec"]["selector"].items() <= pods()["leader"]["metadata"]["labels"].items()
    assert not service["spec"]["selector"].items() <= pods()["worker"]["metadata"]["labels"].items()
    port = service["spec"]["ports"][0]["port"]
    assert environment(objects)["CHORUS_UPSTREAM_URLS"] == f"http://{service['metadata']['name']}:{port}"
    assert environment(objects)["CHORUS_SERVED_MODEL_NAME"] == options(pods()["leader"])["--served-model-name"]


def test_each_example_is_told_of() -> None:
    told = set(re.findall(r"helm/chorus/examples/([\w.-]+\.yaml)", (ROOT / "deploy/engines.md").read_text()))
    assert told == {path.name for path in EXAMPLES.iterdir()}


def test_a_model_over_more_gpus_than_there_are_is_refused() -> None:
    values = str(EXAMPLES / "vllm-one-node-values.yaml")
    arguments = ["template", "chorus", str(CHART), "-f", values, "--set-json"]
    with pytest.raises(RenderError, match="over 8 GPUs, and there are 4"):
        helm(*arguments, "engine.vllm.pipelineParallelSize=2")
    helm(*arguments, 'engine.vllm={"tensorParallelSize": 4, "pipelineParallelSize": 2, "nnodes": 2}')
