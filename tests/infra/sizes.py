"""Pods of an overlay against the nodes of a Terraform profile."""

import re
from collections.abc import Iterator
from pathlib import Path

import yaml

from tests.infra.policies import Documents, container, of_kind

# Processors and GiB of AWS's instance types.
NODES = {"t3.large": (2, 8), "m7i.xlarge": (4, 16), "m7i.2xlarge": (8, 32)}
# What a node does not give to our pods, assumed: EKS' own share, the mesh, the network and the drivers.
NODE_CPU, NODE_GIB = 0.6, 1.9
# Once in a cluster, assumed: istiod, gateway, KServe, KEDA, CoreDNS, metrics-server, Prometheus.
SHARED_CPU = 1.5
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
    request = quantity(asked["cpu"])
    each = min(int((cpu - NODE_CPU) / request), int((gib - NODE_GIB) / quantity(asked["memory"])))
    if not each:
        yield f"a pod fits no node: it requests {asked} of {nodes[1]}"
        return
    spec = of_kind(documents, "ScaledObject")[0]["spec"]
    # Either slot may get all traffic at once. The release's Job and its guard run beside them.
    both, live = 2 * spec["maxReplicaCount"], _cpu_of_live()
    for count, pods, others, when in (
        (int(nodes[2]), spec["minReplicaCount"], live, "at the least size"),
        (int(nodes[3]), both, live + _cpu_of_jobs(), "at the largest size, with both slots during a release"),
    ):
        room = min(each * count, int((count * (cpu - NODE_CPU) - SHARED_CPU - others) / request))
        if pods > room:
            yield f"{pods} pods, room for {room} on {count} x {nodes[1]}, {when}"


def _cpu_of_jobs() -> float:
    """The processors that the Job of a release and the guard request."""
    pods = [
        one["spec"]["jobTemplate"]["spec"]["template"]["spec"]
        for one in _of_file("release/jobs.yaml", "CronJob")
        if one["metadata"]["name"] != "rollback"
    ]
    return sum(quantity(pod["containers"][0]["resources"]["requests"]["cpu"]) for pod in pods)


def _cpu_of_live() -> float:
    """The processors that stream, feedback and watch request."""
    parts = [one["spec"] for one in _of_file("live/parts.yaml", "Deployment")]
    return sum(
        part["replicas"] * quantity(part["template"]["spec"]["containers"][0]["resources"]["requests"]["cpu"])
        for part in parts
    )


def _of_file(name: str, kind: str) -> Documents:
    return of_kind(list(yaml.safe_load_all((KSERVE / name).read_text(encoding="utf-8"))), kind)
