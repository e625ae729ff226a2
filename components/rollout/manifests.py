"""A release's record -> the route's rules and the slots' manifests; a Deployment -> the state of its pods.

Everything follows from the record and from the object as it is now: writing it twice changes nothing.
"""

from __future__ import annotations

import copy
from typing import Any

from components.rollout.plan import FULL, Release
from serving.redis.address import host_port

Document = dict[str, Any]
ROUTE, SLOTS = "checkout", ("blue", "green")
ANNOTATION = "reco.dev/release"
STOP = "serving.kserve.io/stop"
FLOOR = "reco.dev/floor"  # OWN/RAISED: minReplicaCount of a ScaledObject, its owner's and the release's
SCALED = ("stage", "shadow", "restage", "step", "seal", "hold")  # either slot may get all traffic at once
SLOT_HEADER = "x-reco-slot"
BUNDLE_VARIABLE, LOG_VARIABLE = "STORAGE_URI", "RECO_LOG_DIR"
SHADOW = "shadow"  # folder of the log of mirrored requests, inside the ordinary one


def service(slot: str) -> str:
    """Return the name of a slot's InferenceService."""
    return f"{ROUTE}-{slot}"


def backend(slot: str) -> str:
    """Return the name of the Service and of the Deployment that KServe makes of a slot."""
    return f"{service(slot)}-predictor"


def other(slot: str) -> str:
    """Return the other slot."""
    return SLOTS[1 - SLOTS.index(slot)]


def weights(route: Document) -> dict[str, int]:
    """Return the weight of each slot."""
    for rule in route["spec"]["rules"]:
        names = {one["name"]: one.get("weight", 1) for one in rule["backendRefs"]}
        if len(names) == len(SLOTS):
            return {slot: names[backend(slot)] for slot in SLOTS}
    return dict.fromkeys(SLOTS, 0)


def with_traffic(route: Document, record: Release, mirror_percent: int) -> list[Document]:
    """Return the rules of a route with the weights and the mirror of a record."""
    rules: list[Document] = copy.deepcopy(route["spec"]["rules"])
    split = {backend(record.stable): FULL - record.weight, backend(record.canary): record.weight}
    for rule in rules:
        if len(rule["backendRefs"]) != len(SLOTS):
            continue
        for one in rule["backendRefs"]:
            one["weight"] = split[one["name"]]
        filters = [one for one in rule.get("filters", ()) if one["type"] != "RequestMirror"]
        port = rule["backendRefs"][0]["port"]
        if record.state == SHADOW and port == 80:  # gRPC is not mirrored
            to = {"name": backend(record.canary), "port": port}
            mirror = {"backendRef": to, "percent": mirror_percent}
            filters.append({"type": "RequestMirror", "requestMirror": mirror})
        rule.pop("filters", None)
        if filters:
            rule["filters"] = filters
    return rules


def slot_changes(found: Document, record: Release, slot: str) -> Document:
    """Return the changes of a slot's InferenceService for a record; empty: it is as it should be."""
    if slot == record.stable:
        parked = record.state in ("settle", "done")
        return _parked(found) if parked else {}
    if record.state in ("abort", "aborted"):
        return _parked(found)
    if record.state in ("verify", "publish"):
        return {}
    containers = copy.deepcopy(found["spec"]["predictor"]["containers"])
    environment: list[Document] = containers[0]["env"]
    _set(environment, BUNDLE_VARIABLE, record.source)
    folder = _value(environment, LOG_VARIABLE).removesuffix(f"/{SHADOW}")
    in_shadow = record.state in ("stage", "shadow") and record.compared
    _set(environment, LOG_VARIABLE, f"{folder}/{SHADOW}" if in_shadow else folder)
    changes: Document = {}
    if containers != found["spec"]["predictor"]["containers"]:
        changes["spec"] = {"predictor": {"containers": containers}}
    if found["metadata"].get("annotations", {}).get(STOP) == "true":
        changes["metadata"] = {"annotations": {STOP: "false"}}
    return changes


def floor_changes(scaled: Document, record: Release, pods: int) -> Document:
    """Return the changes of a slot's ScaledObject: in a release it has at least as many pods as the other."""
    least = scaled["spec"]["minReplicaCount"]
    noted = scaled["metadata"].get("annotations", {}).get(FLOOR, "")
    before, _, raised = noted.partition("/")
    own = int(before) if raised == str(least) else least  # else its owner has set it since
    wanted = min(max(least, pods), scaled["spec"]["maxReplicaCount"]) if record.state in SCALED else own
    note = f"{own}/{wanted}" if wanted != own else None
    if wanted == least and (note or not noted):
        return {}
    return {"metadata": {"annotations": {FLOOR: note}}, "spec": {"minReplicaCount": wanted}}


def source_of(found: Document) -> str:
    """Return where the bundle of a slot lies, without a slash at its end; empty: the slot is parked."""
    if found["metadata"].get("annotations", {}).get(STOP) == "true":
        return ""
    return _value(found["spec"]["predictor"]["containers"][0]["env"], BUNDLE_VARIABLE).rstrip("/")


def place_of_bundles(found: Document) -> str:
    """Return the store of bundles: the place of a slot's bundle without its last part."""
    environment = found["spec"]["predictor"]["containers"][0]["env"]
    return _value(environment, BUNDLE_VARIABLE).rstrip("/").rpartition("/")[0]


def log_of(found: Document) -> str:
    """Return the folder of a slot's prediction log."""
    return _value(found["spec"]["predictor"]["containers"][0]["env"], LOG_VARIABLE)


def rolled_out(deployment: Document | None, found: Document) -> tuple[bool, str]:
    """Say whether a slot's Deployment runs its InferenceService's newest environment, and its fault.

    KServe's own conditions stay true while pods are replaced (kserve#4626): the Deployment's numbers do not.
    """
    status = found.get("status", {}).get("modelStatus", {})
    if status.get("transitionStatus") in ("BlockedByFailedLoad", "InvalidSpec"):
        failure = status.get("lastFailureInfo", {})
        return False, f"the pods do not start: {failure.get('message') or failure.get('reason') or status}"
    if deployment is None:
        return False, ""
    state, wanted = deployment.get("status", {}), deployment["spec"].get("replicas", 1)
    for condition in state.get("conditions", ()):
        if condition["type"] == "Progressing" and condition["status"] == "False":
            return False, f"the pods do not start: {condition.get('message') or condition.get('reason')}"
    environment = deployment["spec"]["template"]["spec"]["containers"][0]["env"]
    ours = found["spec"]["predictor"]["containers"][0]["env"]
    is_newest = all(
        _value(environment, name) == _value(ours, name) for name in (BUNDLE_VARIABLE, LOG_VARIABLE)
    )
    is_seen = state.get("observedGeneration") == deployment["metadata"]["generation"]
    counts = [state.get(name, 0) for name in ("replicas", "updatedReplicas", "availableReplicas")]
    return is_newest and is_seen and wanted > 0 and counts == [wanted] * 3, ""


def is_ready(pod: Document) -> bool:
    """Say whether a pod takes requests."""
    conditions = {one["type"]: one["status"] for one in pod.get("status", {}).get("conditions", ())}
    return conditions.get("Ready") == "True" and "deletionTimestamp" not in pod["metadata"]


def restarts(pod: Document) -> int:
    """Return how often a pod's containers died."""
    return sum(one.get("restartCount", 0) for one in pod.get("status", {}).get("containerStatuses", ()))


def metrics_url(pod: Document) -> str:
    """Return the address of a pod's metrics."""
    ports = {port["name"]: port["containerPort"] for port in pod["spec"]["containers"][0]["ports"]}
    return f"http://{host_port(pod['status']['podIP'], ports['metrics'])}/metrics"


def _parked(found: Document) -> Document:
    if found["metadata"].get("annotations", {}).get(STOP) == "true":
        return {}
    return {"metadata": {"annotations": {STOP: "true"}}}


def _value(environment: list[Document], name: str) -> str:
    return next((str(one.get("value", "")) for one in environment if one["name"] == name), "")


def _set(environment: list[Document], name: str, value: str) -> None:
    entry = next((one for one in environment if one["name"] == name), None)
    if entry is None:
        environment.append({"name": name, "value": value})
    else:
        entry["value"] = value
