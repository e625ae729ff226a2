"""A registered version -> its release on the cluster: the pipeline starts a Job and follows it to its end.

The Job is made of the CronJob `release` of `infra/kserve/release`: the same that CI starts. It holds the
gate, the canary and the move of the alias, and goes on after a crash. This step only waits.
"""

from __future__ import annotations

import copy
import logging
import shutil
import time
from pathlib import Path
from typing import Any

from components.release.registry import Registry
from components.rollout.cluster import IN_POD, Cluster, Stale, connect
from feature_repo.errors import RecoError

log = logging.getLogger(__name__)

NAMESPACE, TEMPLATE = "checkout", "release"
POLL_S = 5.0


class ReleaseFailed(RecoError):
    """The Job of a release failed."""


def deploy_endpoint(
    version: str,
    dataset: Path,
    tracking_uri: str,
    model_name: str,
    home: str,
    cluster: str = IN_POD,
    poll_s: float = POLL_S,
) -> dict[str, str]:
    """Release a version on the cluster by a Job, and wait for its end.

    A version has one Job, as long as the cluster keeps it: a step that is tried again follows it.

    Args:
        version: a version's number.
        dataset: data set of its evaluation. A copy under `home` is there for the Job's gate; after a failure
            it stays, for the next `reco release`.
        tracking_uri: the registry.
        model_name: the registered model's name.
        home: the pipeline's state folder. The Job's claim `release-home` is the same folder.
        cluster: URL of the Kubernetes API, or `pod`.
        poll_s: time between two looks at the Job.

    Returns:
        Version, bundle id and the Job's name.

    Raises:
        ReleaseFailed: the gate refused, the canary was aborted, or the time ran out.
        ClusterRefused: there is no template, or this account may not start Jobs.
        ClusterUnreachable: the API does not answer.
    """
    target = Registry(tracking_uri, model_name).version(version)
    place = Path(home) / "datasets" / target.bundle_id
    if not place.exists():
        part = place.with_name(f".{place.name}.part")
        shutil.rmtree(part, ignore_errors=True)
        shutil.copytree(dataset, part).rename(place)
    name = f"{TEMPLATE}-training-{target.version}"
    with connect(cluster) as client:
        api = Cluster(client, NAMESPACE)
        try:
            api.create("Job", _job(api.get("CronJob", TEMPLATE), name, target.version, model_name))
        except Stale:
            log.info("job %s is there: following it", name)
        while not (ended := _ended(api.get("Job", name))):
            time.sleep(poll_s)
    if ended != "Complete":
        raise ReleaseFailed(
            f"the Job of version {target.version} failed: `kubectl -n {NAMESPACE} logs job/{name}` says why, "
            "and `reco release --status` which version has the traffic, with the gate's tables"
        )
    shutil.rmtree(place)
    return {"version": target.version, "bundle_id": target.bundle_id, "job": name}


def _job(template: dict[str, Any], name: str, version: str, model_name: str) -> dict[str, Any]:
    spec = copy.deepcopy(template["spec"]["jobTemplate"]["spec"])
    [container] = spec["template"]["spec"]["containers"]
    container["args"] += ["--model-name", model_name]
    for variable in container["env"]:
        if variable["name"] == "VERSION":
            variable["value"] = version
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": name}, "spec": spec}


def _ended(job: dict[str, Any]) -> str:
    """Return the condition that ended a Job, Complete or Failed; empty: it runs."""
    conditions = job.get("status", {}).get("conditions", ())
    reached = [one["type"] for one in conditions if one["status"] == "True"]
    return next((one for one in ("Complete", "Failed") if one in reached), "")
