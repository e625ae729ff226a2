"""Rules that hold over all documents of one overlay together: documents in, findings out."""

import ast
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
from prometheus_client import REGISTRY

from monitoring.alerting import read_slo
from serving.metrics import RESPONSES  # its module registers the metrics that a query may name
from serving.settings import Settings, variable
from tests.infra.schemas import as_deployment, schema_of, wrong_values

NAMESPACE = "checkout"
TERRAFORM = Path(__file__).parents[2] / "infra" / "terraform"
WORKLOADS = TERRAFORM / "workloads.tf"
[KUBERNETES] = re.findall(
    r'"kubernetes_version" {[^}]+ default += "(.+)"', (TERRAFORM / "variables.tf").read_text(encoding="utf-8")
)
AGENT = ("169.254.170.23/32", 80)  # of EKS Pod Identity
NAMES = {"172.20.0.10/32", "10.100.0.10/32"}  # of EKS: the tenth address of its two default ranges
Document = dict[str, Any]
Documents = list[Document]


def findings(documents: Documents) -> list[str]:
    """What is wrong with these documents, each with the name of the document."""
    return list(schemas(documents)) or [found for rule in RULES for found in rule(documents)]


def of_kind(documents: Documents, kind: str) -> Documents:
    return [document for document in documents if document["kind"] == kind]


def named(documents: Documents, kind: str, name: str) -> Document:
    """The one document of this kind and name."""
    [found] = [one for one in of_kind(documents, kind) if one["metadata"]["name"] == name]
    return found


def name_of(document: Document) -> str:
    metadata = document["metadata"]
    return f"{document['kind']} {metadata.get('name') or metadata.get('generateName')}"


def predictor(slot: Document) -> dict[str, Any]:
    return dict(slot["spec"]["predictor"])


def container(slot: Document) -> dict[str, Any]:
    return dict(slot["spec"]["predictor"]["containers"][0])


def pod_labels(slot: Document) -> dict[str, str]:
    """The labels of a slot's pods: ours, and those that KServe adds."""
    name = slot["metadata"]["name"]
    added = {
        "serving.kserve.io/inferenceservice": name,
        "app": f"isvc.{name}-predictor",
        "component": "predictor",
    }
    return {**added, **predictor(slot).get("labels", {})}


def matching(documents: Documents, labels: Mapping[str, str]) -> list[str]:
    slots = of_kind(documents, "InferenceService")
    return [slot["metadata"]["name"] for slot in slots if labels.items() <= pod_labels(slot).items()]


def service_ports(slot: Document) -> set[int]:
    """The ports of the Service that KServe makes: the first one becomes 80, others keep their number."""
    numbers = [port["containerPort"] for port in container(slot)["ports"]]
    return {80, *numbers[1:]}


# ------------------------------------------------------------------------------------------------- rules
def schemas(documents: Documents) -> Iterator[str]:
    for document in documents:
        yield from _faults(repr(document))


@cache  # most documents are alike in all tests
def _faults(text: str) -> list[str]:
    document = ast.literal_eval(text)
    name, schema = name_of(document), schema_of(f"{document['apiVersion']} {document['kind']}")
    found = []
    if schema is not None:
        errors = jsonschema.Draft202012Validator(schema).iter_errors(document)
        found = [f"{name}: {error.json_path}: {error.message[:200]}" for error in errors]
    found += [f"{name}: {error}" for error in wrong_values(document)]
    if schema is not None and document["kind"] != "InferenceService":
        return found
    built_in = document if schema is None else as_deployment(document)
    try:
        kubernetes_validate.validate(built_in, KUBERNETES, strict=True)
    except (kubernetes_validate.ValidationError, kubernetes_validate.SchemaNotFoundError) as error:
        found.append(f"{name}: {str(error)[:300]}")
    return found


def slots(documents: Documents) -> Iterator[str]:
    found = sorted(slot["metadata"]["name"] for slot in of_kind(documents, "InferenceService"))
    if found != ["checkout-blue", "checkout-green"]:
        yield f"the slots are {found}"
    for slot in of_kind(documents, "InferenceService"):
        annotations = slot["metadata"].get("annotations", {})
        for key, value in {"deploymentMode": "Standard", "autoscalerClass": "external"}.items():
            if annotations.get(f"serving.kserve.io/{key}") != value:
                yield f"{name_of(slot)}: {key} is not {value}"
        if slot["metadata"].get("labels", {}).get("networking.kserve.io/visibility") != "cluster-local":
            yield f"{name_of(slot)}: KServe would make a route of its own"
        if container(slot)["name"] != "kserve-container" or "STORAGE_URI" not in plain_values(slot):
            yield f"{name_of(slot)}: KServe loads no bundle without kserve-container and its STORAGE_URI"
        names = [port["name"] for port in container(slot)["ports"]]
        if names[:2] != ["http1", "grpc"]:
            yield f"{name_of(slot)}: the ports are {names}: the protocol follows from the name"


def images(documents: Documents) -> Iterator[str]:
    for name, _, pod in pods(documents):
        for one in pod["containers"]:
            if not re.fullmatch(r"[\w.:/-]+@sha256:[0-9a-f]{64}", one["image"]):
                yield f"{name}: image {one['image']} is not pinned by its digest"


def least_privilege(documents: Documents) -> Iterator[str]:
    for name, _, spec in pods(documents):
        pod, inner = spec.get("securityContext", {}), spec["containers"][0].get("securityContext", {})
        needs_token = spec["serviceAccountName"] == "release"  # a release asks the Kubernetes API
        wanted = {
            "runAsNonRoot": pod.get("runAsNonRoot") is True and pod.get("runAsUser", 0) > 0,
            "seccompProfile": pod.get("seccompProfile") == {"type": "RuntimeDefault"},
            "readOnlyRootFilesystem": inner.get("readOnlyRootFilesystem") is True,
            "allowPrivilegeEscalation": inner.get("allowPrivilegeEscalation") is False,
            "capabilities": inner.get("capabilities") == {"drop": ["ALL"]},
            "token": needs_token or spec.get("automountServiceAccountToken") is False,
        }
        for what, holds in wanted.items():
            if not holds:
                yield f"{name}: {what} is not restricted"


def resources(documents: Documents) -> Iterator[str]:
    for slot in of_kind(documents, "InferenceService"):
        given = container(slot).get("resources", {})
        requests, limits = given.get("requests", {}), given.get("limits", {})
        if "cpu" not in requests or not requests.get("memory") or requests["memory"] != limits.get("memory"):
            yield f"{name_of(slot)}: a processor is requested, and as much memory as is allowed: {given}"


def probes(documents: Documents) -> Iterator[str]:
    for slot in of_kind(documents, "InferenceService"):
        ports = {key for port in container(slot)["ports"] for key in (port["name"], port["containerPort"])}
        for probe, path in (("startup", "live"), ("readiness", "ready"), ("liveness", "live")):
            asked = container(slot).get(f"{probe}Probe", {}).get("httpGet", {})
            if asked.get("path") != f"/v2/health/{path}" or asked.get("port") not in ports:
                yield f"{name_of(slot)}: the {probe} probe asks {asked}"
        sleep_s = container(slot).get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
        needed = sleep_s + Settings().drain_s + Settings().grace_s
        if sleep_s < 2 or predictor(slot).get("terminationGracePeriodSeconds", 30) < needed:
            yield f"{name_of(slot)}: a pod needs a pause before its end, and {needed:g} s in all"


def settings(documents: Documents) -> Iterator[str]:
    known = {variable(field.name): field for field in fields(Settings)}
    shared = {key: value for one in of_kind(documents, "ConfigMap") for key, value in one["data"].items()}
    for slot in of_kind(documents, "InferenceService"):
        given = {entry["name"]: entry.get("value") for entry in container(slot)["env"]} | shared
        ours = {name: value for name, value in given.items() if name.startswith("RECO_")}
        for name in ours.keys() - known.keys():
            yield f"{name_of(slot)}: {name} names no setting"
        try:
            Settings.from_env(
                {**{name: value for name, value in ours.items() if value is not None}, "RECO_CONFIG": "off"}
            )
        except ValueError as error:
            yield f"{name_of(slot)}: {error}"
        for name, value in given.items():
            if value is not None and re.search("PASSWORD|TOKEN|SECRET|_KEY$", name):
                yield f"{name_of(slot)}: {name} is written down: take it from a Secret"


def files(documents: Documents) -> Iterator[str]:
    claims = {one["metadata"]["name"] for one in of_kind(documents, "PersistentVolumeClaim")}
    maps = {one["metadata"]["name"] for one in of_kind(documents, "ConfigMap")}
    accounts = {one["metadata"]["name"] for one in of_kind(documents, "ServiceAccount")}
    for slot in of_kind(documents, "InferenceService"):
        volumes = {one["name"]: one for one in predictor(slot)["volumes"]}
        mounts = {one["mountPath"]: one["name"] for one in container(slot)["volumeMounts"]}
        for path in {*mounts.values()} - volumes.keys():
            yield f"{name_of(slot)}: no volume {path}"
        for one in of_kind(documents, "PersistentVolumeClaim"):
            classes = [other["metadata"]["name"] for other in of_kind(documents, "StorageClass")]
            if one["spec"].get("storageClassName") not in classes:
                yield f"{name_of(one)}: no StorageClass {one['spec'].get('storageClassName')}"
        for volume in volumes.values():
            claim = volume.get("persistentVolumeClaim", {}).get("claimName")
            if claim is not None and claim not in claims:
                yield f"{name_of(slot)}: no claim {claim}"
        for name in ("RECO_HOME", "RECO_LOG_DIR"):
            if plain_values(slot).get(name) not in mounts:
                yield f"{name_of(slot)}: {name} is on the root file system, which is read-only"
        if "/tmp" not in mounts:
            yield f"{name_of(slot)}: /tmp is read-only"
        for source in container(slot).get("envFrom", []):
            if source["configMapRef"]["name"] not in maps:
                yield f"{name_of(slot)}: no ConfigMap {source['configMapRef']['name']}"
        if predictor(slot).get("serviceAccountName") not in accounts:
            yield f"{name_of(slot)}: no ServiceAccount {predictor(slot).get('serviceAccountName')}"


def plain_values(slot: Document) -> dict[str, str]:
    return {entry["name"]: entry["value"] for entry in container(slot)["env"] if "value" in entry}


def selectors(documents: Documents) -> Iterator[str]:
    every = matching(documents, {})
    for document in documents:
        spec = document.get("spec", {})
        match document["kind"]:
            case "NetworkPolicy":
                labels = spec["podSelector"].get("matchLabels", {})
            case "AuthorizationPolicy" | "PodMonitor":
                labels = spec.get("selector", {}).get("matchLabels", {})
            case _:
                continue
        if matching(documents, labels) != every:
            yield f"{name_of(document)}: {labels} selects {matching(documents, labels)}, not both slots"
    for slot in of_kind(documents, "InferenceService"):
        name = slot["metadata"]["name"]
        spread = predictor(slot).get("topologySpreadConstraints", [])
        if {one["topologyKey"] for one in spread} != {
            "topology.kubernetes.io/zone",
            "kubernetes.io/hostname",
        }:
            yield f"{name_of(slot)}: its pods are not spread over zones and nodes"
        for one in spread:
            if matching(documents, one["labelSelector"]["matchLabels"]) != [name]:
                yield f"{name_of(slot)}: {one['topologyKey']} counts pods of the other slot, or none"
        budgets = [
            budget
            for budget in of_kind(documents, "PodDisruptionBudget")
            if matching(documents, budget["spec"]["selector"]["matchLabels"]) == [name]
        ]
        if len(budgets) != 1:
            yield f"{name_of(slot)}: {len(budgets)} disruption budgets select its pods alone"


def autoscaling(documents: Documents) -> Iterator[str]:
    scaled = {one["spec"]["scaleTargetRef"]["name"]: one for one in of_kind(documents, "ScaledObject")}
    labels = {
        rule["targetLabel"]
        for monitor in of_kind(documents, "PodMonitor")
        for endpoint in monitor["spec"]["podMetricsEndpoints"]
        for rule in endpoint.get("relabelings", [])
    }
    assert RESPONSES
    samples = {name for metric in REGISTRY.collect() for name in (metric.name, f"{metric.name}_total")}
    for slot in of_kind(documents, "InferenceService"):
        target = f"{slot['metadata']['name']}-predictor"
        if target not in scaled:
            yield f"{name_of(slot)}: nothing scales {target}"
            continue
        spec = scaled[target]["spec"]
        queries = [one["metadata"]["query"] for one in spec["triggers"] if one["type"] == "prometheus"]
        colour = slot["metadata"]["labels"].get("reco.dev/slot")
        slots = {*re.findall(r'slot="(\w+)"', " ".join(queries))}
        if slots != {colour} or "slot" not in labels:
            yield f"{target}: scales by requests of other pods than its own: {queries}"
        for metric in re.findall(r"\breco_\w+", " ".join(queries)):
            if metric not in samples:
                yield f"{target}: {metric} is no metric of the endpoint"
        if (
            not spec["minReplicaCount"]
            <= spec.get("fallback", {}).get("replicas", 0)
            <= spec["maxReplicaCount"]
        ):
            yield f"{target}: without metrics it would have too few pods or too many"


@cache
def job_of_the_alerts() -> str:
    selector = re.fullmatch(r'job="(.+)"', read_slo()["selector"])
    assert selector
    return selector[1]


def alerts(documents: Documents) -> Iterator[str]:
    for monitor in of_kind(documents, "PodMonitor"):
        for endpoint in monitor["spec"]["podMetricsEndpoints"]:
            jobs = [one.get("replacement") for one in endpoint["relabelings"] if one["targetLabel"] == "job"]
            if jobs != [job_of_the_alerts()]:
                yield f"{name_of(monitor)}: the job is {jobs}, and the alerts select {job_of_the_alerts()}"
    named = [group["name"] for one in of_kind(documents, "PrometheusRule") for group in one["spec"]["groups"]]
    if not named:
        yield "no PrometheusRule: no alert fires on the cluster"


def route(documents: Documents) -> Iterator[str]:
    services = {
        f"{one['metadata']['name']}-predictor": service_ports(one)
        for one in of_kind(documents, "InferenceService")
    }
    monitors = [
        one["port"] for doc in of_kind(documents, "PodMonitor") for one in doc["spec"]["podMetricsEndpoints"]
    ]
    for slot in of_kind(documents, "InferenceService"):
        for port in {*monitors} - {one["name"] for one in container(slot)["ports"]}:
            yield f"{name_of(slot)}: Prometheus scrapes port {port}, which it lacks"
    routes = of_kind(documents, "HTTPRoute")
    if len(routes) != 1:
        yield f"{len(routes)} routes; expected one"
    for rule in (rule for one in routes for rule in one["spec"]["rules"]):
        paths = [match["path"]["value"] for match in rule["matches"]]
        for backend in rule["backendRefs"]:
            if backend["port"] not in services.get(backend["name"], ()):
                where = f"{backend['name']}:{backend['port']}"
                yield f"the route of {paths} leads to {where}, which does not exist"
            if (backend["port"] == 8081) != any("." in path for path in paths):
                yield f"the route of {paths} sends gRPC to the port of REST, or the other way round"
        if len(rule["backendRefs"]) > 1 and sum(one["weight"] for one in rule["backendRefs"]) != 100:
            yield f"the weights of {paths} are not percent"
        if "timeouts" not in rule:
            yield f"the route of {paths} has no timeout"
        if "filters" in rule:
            yield f"the route of {paths} mirrors requests: a release alone may do that"
    text = json.dumps(routes)
    for colour in ("blue", "green"):
        if f'"name": "x-reco-slot", "type": "Exact", "value": "{colour}"' not in text:
            yield f"no header leads to {colour}"


def outliers(documents: Documents) -> Iterator[str]:
    hosts = sorted(one["spec"]["host"] for one in of_kind(documents, "DestinationRule"))
    wanted = sorted(
        f"{one['metadata']['name']}-predictor.{NAMESPACE}.svc.cluster.local"
        for one in of_kind(documents, "InferenceService")
    )
    if hosts != wanted:
        yield f"pods are ejected of {hosts}, expected {wanted}"


def access(documents: Documents) -> Iterator[str]:
    policies = of_kind(documents, "NetworkPolicy")
    if not any(
        one["spec"]["podSelector"] == {}
        and sorted(one["spec"]["policyTypes"]) == ["Egress", "Ingress"]
        and not one["spec"].keys() & {"ingress", "egress"}
        for one in policies
    ):
        yield "no NetworkPolicy denies everything by default"
    for policy in policies:
        for direction, peers in (("ingress", "from"), ("egress", "to")):
            for rule in policy["spec"].get(direction, []):
                if not rule.get(peers) or not rule.get("ports") or {} in rule[peers]:
                    yield f"{name_of(policy)}: an {direction} rule is open: {rule}"
    if [one["spec"]["mtls"]["mode"] for one in of_kind(documents, "PeerAuthentication")] != ["STRICT"]:
        yield "the mesh accepts plain text"
    ports = {
        port: principal
        for policy in of_kind(documents, "AuthorizationPolicy")
        for rule in policy["spec"]["rules"]
        for source in rule["from"]
        for principal in source["source"]["principals"]
        for target in rule["to"]
        for port in target["operation"]["ports"]
    }
    for slot in of_kind(documents, "InferenceService"):
        for port in container(slot)["ports"]:
            wanted = "/ns/monitoring/" if port["name"] == "metrics" else "/ns/gateways/"
            if wanted not in ports.get(str(port["containerPort"]), ""):
                yield f"{name_of(slot)}: port {port['name']} is not for {wanted} alone: {ports}"


def credentials(documents: Documents) -> Iterator[str]:
    """Pods that have a role in Terraform and cannot ask EKS Pod Identity for its credentials."""
    roles = re.findall(rf'namespace += "{NAMESPACE}"\s+service_account += "(.+)"', WORKLOADS.read_text())
    assert roles
    for name, labels, pod in pods(documents):
        targets = [
            (peer.get("ipBlock", {}).get("cidr"), port["port"])
            for policy in of_kind(documents, "NetworkPolicy")
            if policy["spec"]["podSelector"].get("matchLabels", {}).items() <= labels.items()
            for rule in policy["spec"].get("egress", [])
            for peer in rule.get("to", [])
            for port in rule.get("ports", [])
        ]
        if (account := pod["serviceAccountName"]) in roles and AGENT not in targets:
            yield f"{name}: has a role of {account}, and may not ask {AGENT[0]} for its credentials"


def names(documents: Documents) -> Iterator[str]:
    """Policies by which pods learn names from kube-dns's pods alone: EKS Auto Mode has only the address."""
    for policy in of_kind(documents, "NetworkPolicy"):
        for rule in policy["spec"].get("egress", []):
            addresses = {peer.get("ipBlock", {}).get("cidr") for peer in rule.get("to", [])}
            if "kube-dns" in str(rule) and not addresses >= NAMES:
                yield f"{name_of(policy)}: with EKS Auto Mode its pods learn no names: {addresses}"


def pods(documents: Documents) -> Iterator[tuple[str, dict[str, str], dict[str, Any]]]:
    """The name of what makes a pod, the pod's labels, and its specification."""
    for slot in of_kind(documents, "InferenceService"):
        yield name_of(slot), pod_labels(slot), predictor(slot)
    for one in (*of_kind(documents, "CronJob"), *of_kind(documents, "Deployment")):
        spec = one["spec"]["jobTemplate"]["spec"] if one["kind"] == "CronJob" else one["spec"]
        yield name_of(one), spec["template"]["metadata"]["labels"], spec["template"]["spec"]


def places(documents: Documents) -> Iterator[str]:
    for document in documents:
        if (
            document["kind"] not in ("Namespace", "StorageClass")
            and document["metadata"].get("namespace") != NAMESPACE
        ):
            yield f"{name_of(document)}: not in the namespace {NAMESPACE}"
    for namespace in of_kind(documents, "Namespace"):
        if namespace["metadata"]["labels"].get("pod-security.kubernetes.io/enforce") != "restricted":
            yield f"{name_of(namespace)}: pods are not restricted"


RULES: tuple[Callable[[Documents], Iterator[str]], ...] = (
    slots,
    images,
    least_privilege,
    resources,
    probes,
    settings,
    files,
    selectors,
    autoscaling,
    alerts,
    route,
    outliers,
    access,
    credentials,
    names,
    places,
)
