"""The manifests in dockerfiles/kubernetes are valid for Kubernetes and agree with each other and with the server."""

import re

import kubernetes_validate
import pytest
import yaml

from engine.settings.config import Config
from tests.server import ROOT

FOLDER = ROOT / "dockerfiles/kubernetes"
VERSION = "1.30"
FILES = sorted(path for path in FOLDER.glob("*/*.yaml") if path.name != "kustomization.yaml")
PATCHES = [FOLDER / "gpu/deployment.yaml"]
OF_OTHERS = ("ServiceMonitor",)  # Kubernetes does not know this kind; the Prometheus operator does
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


def settings():
    [generated] = documents(FOLDER / "base/kustomization.yaml")[0]["configMapGenerator"]
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
