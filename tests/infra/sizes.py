"""Pods of an overlay against the nodes of a Terraform profile."""

import re
from collections.abc import Iterator

from tests.infra.policies import Documents, container, of_kind

# Processors and GiB of AWS's instance types.
NODES = {"t3.large": (2, 8), "m7i.xlarge": (4, 16), "m7i.2xlarge": (8, 32)}
# What a node does not give to our pods, assumed: EKS' own share, the mesh, the network and the drivers.
NODE_CPU, NODE_GIB = 0.6, 1.9
# Once in a cluster, assumed: istiod, gateway, KServe, KEDA, CoreDNS, metrics-server, Prometheus.
SHARED_CPU = 1.5


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
    least, most = spec["minReplicaCount"], spec["maxReplicaCount"]
    for count, pods, when in (
        (int(nodes[2]), least, "at the least size"),
        (int(nodes[3]), least + most, "at the largest size, with the other slot during a release"),
    ):
        room = min(each * count, int((count * (cpu - NODE_CPU) - SHARED_CPU) / request))
        if pods > room:
            yield f"{pods} pods, room for {room} on {count} x {nodes[1]}, {when}"
