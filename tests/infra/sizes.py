"""Pods of an overlay against the nodes of a Terraform profile."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from tests.infra.policies import Documents, container, of_kind

# Processors and GiB of AWS's instance types.
NODES = {"t3.large": (2, 8), "m7i.xlarge": (4, 16), "m7i.2xlarge": (8, 32)}
# What a node does not give to our pods, assumed: EKS' own share, the mesh, the network and the drivers.
NODE_CPU, NODE_GIB = 0.6, 1.9
# Processors and GiB once in a cluster, assumed: istiod, gateway, KServe, KEDA, DNS, metrics, Prometheus.
SHARED = (1.5, 3.0)
KSERVE = Path(__file__).parents[2] / "infra" / "kserve"


def quantity(text: str) -> float:
    """The number of processors or GiB that a Kubernetes quantity names."""
    match = re.fullmatch(r"([\d.]+)(m|Mi|Gi|)", text)
    assert match, text
    return float(match[1]) * {"m": 1 / 1_000, "Mi": 1 / 1_024, "Gi": 1, "": 1}[match[2]]


def unplaced(documents: Documents, profile: str) -> list[str]:
    """What of an overlay does not fit the nodes of a profile, the text of a tfvars file."""
    return list(_unplaced(documents, profile))


def _unplaced(documents: Documents, profile: str) -> Iterator[str]:
    nodes = re.search(r'^nodes += \{ type = "(.+)", min = (\d+), max = (\d+) \}', profile, re.MULTILINE)
    assert nodes
    cpu, gib = NODES[nodes[1]]
    asked = container(of_kind(documents, "InferenceService")[0])["resources"]["requests"]
    request = quantity(asked["cpu"]), quantity(asked["memory"])
    node = cpu - NODE_CPU, gib - NODE_GIB
    each = min(int(has / wants) for has, wants in zip(node, request, strict=True))
    if not each:
        yield f"a pod fits no node: it requests {asked} of {nodes[1]}"
        return
    spec = of_kind(documents, "ScaledObject")[0]["spec"]
    # Either slot may get all traffic at once. The release's Job and its guard run beside them.
    live, jobs = _of_live(), _of_jobs()
    for count, pods, others, when in (
        (int(nodes[2]), spec["minReplicaCount"], [SHARED, live], "at the least size"),
        (
            int(nodes[3]),
            2 * spec["maxReplicaCount"],
            [SHARED, live, jobs],
            "at the largest size, with both slots during a release",
        ),
    ):
        left = [count * has - sum(taken) for has, *taken in zip(node, *others, strict=True)]
        room = min(each * count, *(int(has / wants) for has, wants in zip(left, request, strict=True)))
        if pods > room:
            yield f"{pods} pods, room for {room} on {count} x {nodes[1]}, {when}"


def _of_jobs() -> tuple[float, float]:
    """Processors and GiB that the Job of a release and the guard request."""
    jobs = [one for one in _of_file("release/jobs.yaml", "CronJob") if one["metadata"]["name"] != "rollback"]
    return _requested([(1, one["spec"]["jobTemplate"]["spec"]["template"]) for one in jobs])


def _of_live() -> tuple[float, float]:
    """Processors and GiB that stream, feedback and watch request."""
    parts = [one["spec"] for one in _of_file("live/parts.yaml", "Deployment")]
    return _requested([(part["replicas"], part["template"]) for part in parts])


def _requested(templates: list[tuple[int, dict[str, Any]]]) -> tuple[float, float]:
    asked = [(count, one["spec"]["containers"][0]["resources"]["requests"]) for count, one in templates]
    cpu, gib = (sum(count * quantity(one[name]) for count, one in asked) for name in ("cpu", "memory"))
    return cpu, gib


def _of_file(name: str, kind: str) -> Documents:
    return of_kind(list(yaml.safe_load_all((KSERVE / name).read_text(encoding="utf-8"))), kind)
