"""A registered version -> its release on the cluster: the pipeline starts a Job and follows it to its end.

The Job is made of the CronJob `release` of `infra/kserve/release`: the same that CI starts. It holds the
gate, the canary and the move of the alias, and goes on after a crash. This step only waits.
"""

from __future__ import annotations

import copy
import hashlib
import logging
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from components.data.ingest_events import of_forgotten
from components.privacy.erased_files import write_without
from components.release.registry import CHAMPION, Registry
from components.rollout import NAMESPACE
from components.rollout.cluster import IN_POD, Cluster, ClusterUnreachable, Stale, connect
from feature_repo.errors import RecoError
from feature_repo.events import read_dataset
from feature_repo.ids import is_name
from feature_repo.stream.erasure import Forgotten, stamp

log = logging.getLogger(__name__)

TEMPLATE = "release"  # the CronJob of infra/kserve/release, and the beginning of the Jobs' names
POLL_S = 5.0
LONGEST_S = 21_600.0  # the Job ends itself after 21,000 s


class ReleaseFailed(RecoError):
    """The release ended, and the version is not champion; or the release did not end."""


def deploy_endpoint(
    version: str,
    dataset: Path,
    tracking_uri: str,
    model_name: str,
    home: str,
    run_id: str,
    cluster: str = IN_POD,
    now: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> dict[str, str]:
    """Release a version on the cluster by a Job, and wait for its end.

    A run has one Job: a step that is tried again follows it. The alias decides: a Job that fails after the
    seal has made a champion, and the guard completes its release.

    Args:
        version: a version's number.
        dataset: data set of its evaluation. A copy under `home`, without the shoppers who were forgotten
            since, is there for the Job's gate; after a failure it stays, for the next `reco release`.
        tracking_uri: the registry.
        model_name: the registered model's name.
        home: the pipeline's state folder. The Job's claim `release-home` is the same folder.
        run_id: of the pipeline's run; its hash is part of the Job's name.
        cluster: URL of the Kubernetes API, or `pod`.
        now: the time in seconds.
        sleep: waits that many seconds.

    Returns:
        Version, bundle id and the Job's name.

    Raises:
        ReleaseFailed: the gate refused, the canary was aborted or rolled back, or the time ran out.
        ClusterRefused: there is no template, or this account may not start Jobs.
        ClusterUnreachable: the API does not answer, and the Job may not exist.
    """
    registry = Registry(tracking_uri, model_name)
    target = registry.version(version)
    if not is_name(target.bundle_id):  # the registry is not ours alone, and this becomes a folder
        raise ReleaseFailed(f"version {target.version} has the bundle id {target.bundle_id!r:.100}, no name")
    place = Path(home) / "datasets" / target.bundle_id
    part = place.with_name(f".{place.name}.part")
    while not place.exists():
        seen = stamp(Path(home))
        shutil.rmtree(part, ignore_errors=True)
        shutil.copytree(dataset, part)
        if forgotten := Forgotten.load(Path(home)):
            data = read_dataset(part)  # written again without its refused rows: they may be theirs
            write_without(part, data, of_forgotten(data.events, forgotten))
        if stamp(Path(home)) == seen:  # else an erasure was requested meanwhile
            part.rename(place)
    name = f"{TEMPLATE}-training-{target.version}-{hashlib.sha256(run_id.encode()).hexdigest()[:8]}"
    with connect(cluster) as client:
        api = Cluster(client, NAMESPACE)
        try:
            api.create("Job", _job(api.get("CronJob", TEMPLATE), name, target.version, model_name))
        except Stale:
            log.info("job %s is there: following it", name)
        ended = _follow(api, name, now, sleep)
    if ended != "Complete":
        sleep(POLL_S)  # a rollback by hand ends the Job first, then it moves the alias
    champion = registry.alias(CHAMPION)
    if champion != target.version:
        raise ReleaseFailed(
            f"the Job of version {target.version} ended as {ended}, and champion is "
            f"{champion or 'no version'}: `kubectl -n {NAMESPACE} logs job/{name}` says why, and "
            "`reco release --status` which version has the traffic, with the gate's tables"
        )
    if ended != "Complete":
        if reason := registry.version(version).refused:
            raise ReleaseFailed(
                f"version {target.version} was refused ({reason}); without a champion before it, it keeps "
                "the alias: judge the next version, N, by its own figures (`reco promote N --gate "
                "over_champion=0 --dataset DIR --tracking-uri URL`), then release N by a Job of the CronJob "
                f"{TEMPLATE}"
            )
        log.warning("job %s failed after version %s became champion: the guard ends it", name, target.version)
    shutil.rmtree(place)
    return {"version": target.version, "bundle_id": target.bundle_id, "job": name}


def _follow(api: Cluster, name: str, now: Callable[[], float], sleep: Callable[[float], None]) -> str:
    """Return the condition that ended a Job; an API that is away is asked again."""
    until = now() + LONGEST_S
    while now() < until:
        try:
            if ended := _ended(api.get("Job", name)):
                return ended
        except ClusterUnreachable as error:
            log.warning("job %s: %s", name, error)
        sleep(POLL_S)
    raise ReleaseFailed(
        f"no end of job {name} was seen in {LONGEST_S:,.0f} s: `kubectl -n {NAMESPACE} get job {name}` shows "
        "it, and the step follows it again when the run is retried"
    )


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
