"""The manifests in dockerfiles/kubernetes are valid for Kubernetes and agree with each other and with the server."""

import os
import re
import subprocess

import jsonschema
import kubernetes_validate
import pytest
import yaml

from engine.settings.config import Config
from tests.server import ROOT

FOLDER = ROOT / "dockerfiles/kubernetes"
VERSION = "1.30"
FILES = sorted(path for path in FOLDER.glob("*/*.yaml") if path.name != "kustomization.yaml")
PATCHES = [FOLDER / "gpu/deployment.yaml"]
OF_OTHERS = ("ServiceMonitor", "LeaderWorkerSet")  # kinds that Kubernetes itself does not know
# The fields of leaderworkerset.x-k8s.io/v1 that are used here; pods have the schema of Kubernetes.
LEADER_WORKER_SET = {
    "type": "object",
    "additionalProperties": False,
    "required": ["leaderWorkerTemplate"],
    "properties": {
        "replicas": {"type": "integer", "minimum": 0},
        "startupPolicy": {"enum": ["LeaderCreated", "LeaderReady"]},
        "leaderWorkerTemplate": {
            "type": "object",
            "additionalProperties": False,
            "required": ["workerTemplate"],
            "properties": {
                "size": {"type": "integer", "minimum": 1},
                "restartPolicy": {"enum": ["RecreateGroupOnPodRestart", "RecreateGroupAfterStart", "None"]},
                "workerTemplate": {"type": "object"},
            },
        },
    },
}
PROBES = ("startupProbe", "livenessProbe", "readinessProbe")


def documents(path):
    return list(yaml.safe_load_all(path.read_text()))


def the(kind, name="llm-server"):
    """Return the object of this kind and name."""
    found = [each for path in FILES if path not in PATCHES for each in documents(path)]
    [one] = [each for each in found if (each["kind"], each["metadata"]["name"]) == (kind, name)]
    return one


def merged(whole, patch):
    """Return an object after a strategic merge patch, for patches whose lists have one named entry."""
    if isinstance(whole, dict) and isinstance(patch, dict):
        return {**whole, **{name: merged(whole.get(name), value) for name, value in patch.items()}}
    if isinstance(whole, list) and isinstance(patch, list):
        return [merged(each, other) for each, other in zip(whole, patch, strict=True)]
    return patch


def settings(folder="base"):
    [generated] = documents(FOLDER / folder / "kustomization.yaml")[0]["configMapGenerator"]
    return dict(each.split("=", 1) for each in generated["literals"])


def container():
    [one] = the("Deployment")["spec"]["template"]["spec"]["containers"]
    return one


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_each_manifest_is_valid(path):
    for each in documents(path):
        if path in PATCHES:
            each = merged(the(each["kind"]), each)
        if each["kind"] not in OF_OTHERS:
            kubernetes_validate.validate(each, VERSION, strict=True)


def test_each_file_belongs_to_a_kustomization():
    listed = set()
    for path in FOLDER.glob("*/kustomization.yaml"):
        [one] = documents(path)
        entries = [*one["resources"], *(patch["path"] for patch in one.get("patches", ()))]
        listed |= {(path.parent / each).resolve() for each in entries}
    assert listed - {FOLDER / "base"} == set(FILES)


def test_the_settings_are_valid_and_leave_time_for_requests_to_end():
    config = Config.from_env(settings())
    pod = the("Deployment")["spec"]["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] == config.drain_delay_s + config.drain_timeout_s + 40
    assert settings()["MODEL_DIR"] in [each["mountPath"] for each in container()["volumeMounts"]]
    assert {each["name"] for each in container()["volumeMounts"]} == {each["name"] for each in pod["volumes"]}


def test_ports_and_probes_are_those_of_the_server():
    config, ports = Config(), {each["name"]: each["containerPort"] for each in container()["ports"]}
    assert ports == {
        "http": config.service_http_port,
        "grpc": config.service_grpc_port,
        "health": config.health_http_port,
        "metrics": config.metrics_http_port,
    }
    for service in ("llm-server", "llm-server-replicas"):
        for port in the("Service", service)["spec"]["ports"]:
            assert port["port"] == ports[port["targetPort"]]
    paths = re.findall(r"^\| `(\S+)` \|", (ROOT / "docs/operation.md").read_text(), re.M)
    for name in PROBES:
        assert container()[name]["httpGet"]["port"] == "health" and container()[name]["httpGet"]["path"] in paths


def test_replicas_are_found_by_the_service_that_has_all_pods():
    [(host, port)] = Config.from_env(settings()).replica_addresses
    service = the("Service", host)["spec"]
    assert (service["clusterIP"], service["ports"][0]["port"]) == ("None", port)


def test_what_selects_pods_or_services_selects_these():
    labels = the("Deployment")["spec"]["template"]["metadata"]["labels"]
    assert the("Deployment")["spec"]["selector"]["matchLabels"] == labels
    assert [the("Service", name)["spec"]["selector"] for name in ("llm-server", "llm-server-replicas")] == [labels] * 2
    assert the("PodDisruptionBudget")["spec"]["selector"]["matchLabels"] == labels
    monitor, service = the("ServiceMonitor")["spec"], the("Service")
    assert monitor["selector"]["matchLabels"] == service["metadata"]["labels"]
    assert monitor["endpoints"][0]["port"] in [each["name"] for each in service["spec"]["ports"]]


def test_the_number_of_pods_follows_a_metric_of_the_server():
    scaler = the("HorizontalPodAutoscaler")["spec"]
    assert scaler["scaleTargetRef"]["name"] == the("Deployment")["metadata"]["name"]
    [metric] = scaler["metrics"]
    assert f"| `{metric['pods']['metric']['name']}` | gauge |" in (ROOT / "docs/metrics.md").read_text()


# --- a model on several machines --------------------------------------------------------------------------------------


def group():
    """Return the template of the pods of a group."""
    return the("LeaderWorkerSet", "llm-machines")["spec"]["leaderWorkerTemplate"]


def test_the_leader_worker_set_is_valid():
    jsonschema.validate(the("LeaderWorkerSet", "llm-machines")["spec"], LEADER_WORKER_SET)
    template = group()["workerTemplate"]
    metadata = {**template["metadata"], "name": "pod"}
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]}
    kubernetes_validate.validate(pod, VERSION, strict=True)


def test_the_pods_of_a_group_differ_from_replicas_in_how_they_find_each_other():
    template, config = group()["workerTemplate"]["spec"], Config()
    replica = the("Deployment")["spec"]["template"]["spec"]
    [own], [other] = template["containers"], replica["containers"]
    ports = {each["name"]: each["containerPort"] for each in own["ports"]}
    assert ports.pop("ranks") == config.inter_node_port
    assert ports == {each["name"]: each["containerPort"] for each in other["ports"]}
    changed = {"args", "env", "envFrom", "ports"}
    assert {name: own[name] for name in own.keys() - changed} == {name: other[name] for name in other.keys() - changed}
    assert template.keys() - {"affinity"} == replica.keys() - {"topologySpreadConstraints"}
    for name in ("terminationGracePeriodSeconds", "volumes", "securityContext"):
        assert template[name] == replica[name]
    assert settings("machines").keys() - {"MP_NUM"} == settings().keys() - {"REPLICAS"}


def test_only_the_first_pod_of_a_group_gets_requests_and_the_budget_is_for_all_of_them():
    labels = group()["workerTemplate"]["metadata"]["labels"]
    serving = the("Service", "llm-machines-serving")["spec"]
    assert serving["selector"] == {**labels, "leaderworkerset.sigs.k8s.io/worker-index": "0"}
    assert the("PodDisruptionBudget", "llm-machines")["spec"]["selector"]["matchLabels"] == labels
    [own] = group()["workerTemplate"]["spec"]["containers"]
    ports = {each["name"]: each["containerPort"] for each in own["ports"]}
    assert all(port["port"] == ports[port["targetPort"]] for port in serving["ports"])


@pytest.mark.parametrize("index", [0, 1, 2])
def test_each_pod_of_a_group_starts_with_the_addresses_of_all(index, tmp_path):
    """The command runs with a name server that knows the last name only when it is asked again."""
    [own] = group()["workerTemplate"]["spec"]["containers"]
    programs = {
        "start_server": f"env > {tmp_path}/started",
        "sleep": f"touch {tmp_path}/known",
        "getent": f"""case $2 in
            llm-0.svc.ns) echo "10.0.0.7 STREAM llm-0"; echo "10.0.0.7 DGRAM" ;;
            llm-0-1.svc.ns) echo "10.0.0.5 STREAM" ;;
            llm-0-2.svc.ns) [ -e {tmp_path}/known ] && echo "10.0.0.6 STREAM" ;;
        esac""",
    }
    for name, program in programs.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{program}\n")
        (tmp_path / name).chmod(0o755)
    own_ip = ("10.0.0.7", "10.0.0.5", "10.0.0.6")[index]
    env = {**settings("machines"), "LWS_LEADER_ADDRESS": "llm-0.svc.ns", "LWS_GROUP_SIZE": "3", "HOST_IP": own_ip}
    assert [each["name"] for each in own["env"]] == ["HOST_IP"]
    subprocess.run(own["args"], env={**env, "MP_NUM": "3", "PATH": f"{tmp_path}:{os.environ['PATH']}"}, check=True)
    started = dict(line.split("=", 1) for line in (tmp_path / "started").read_text().splitlines() if "=" in line)
    machines = Config.from_env(started).machines
    assert (machines.ips, machines.host) == (("10.0.0.7", "10.0.0.5", "10.0.0.6"), index)
