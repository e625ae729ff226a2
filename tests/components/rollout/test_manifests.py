"""Weights, mirror and slots that follow from a record."""

import copy
from dataclasses import replace
from typing import Any

from components.rollout.manifests import (
    FLOOR,
    floor_changes,
    is_ready,
    log_of,
    metrics_url,
    rolled_out,
    slot_changes,
    source_of,
    weights,
    with_traffic,
)
from pipelines.live.cluster_api import merged
from tests.components.rollout.toy_cluster import RECORD, ToyCluster


def test_the_floor_of_a_slot_is_raised_once_and_put_back(cluster: ToyCluster) -> None:
    scaled, begun = cluster.scaled("green"), replace(RECORD, state="stage")
    assert floor_changes(scaled, begun, 2) == {}, "it has as many"
    raised = floor_changes(scaled, begun, 400)
    assert raised == {"metadata": {"annotations": {FLOOR: "2/10"}}, "spec": {"minReplicaCount": 10}}, (
        "at most"
    )
    scaled = merged(scaled, raised)
    assert floor_changes(scaled, begun, 1) == {}, "never lowered meanwhile"
    for state in ("settle", "abort", "verify"):
        back = merged(scaled, floor_changes(scaled, replace(RECORD, state=state), 400))
        assert (back["spec"]["minReplicaCount"], back["metadata"]["annotations"]) == (2, {})
    for own in (6, 2):  # on-call adds replicas, or the manifests are applied again
        scaled["spec"]["minReplicaCount"] = own
        back = merged(scaled, floor_changes(scaled, replace(RECORD, state="settle"), 400))
        assert (back["spec"]["minReplicaCount"], back["metadata"]["annotations"]) == (own, {})


def test_both_protocols_get_the_weights_and_http_alone_the_mirror(cluster: ToyCluster) -> None:
    route = cluster.route()
    rules = with_traffic(route, replace(RECORD, state="step", weight=25), 50)
    split = [[one["weight"] for one in rule["backendRefs"]] for rule in rules[2:]]
    assert split == [[75, 25], [75, 25]]
    assert rules[:2] == route["spec"]["rules"][:2], "the slots' headers stay"
    shadow = with_traffic(route, replace(RECORD, state="shadow"), 50)
    assert [len(rule.get("filters", ())) for rule in shadow] == [0, 0, 0, 1]
    route["spec"]["rules"] = shadow
    assert with_traffic(route, RECORD, 50) == cluster.route()["spec"]["rules"]
    assert weights(route) == {"blue": 100, "green": 0}


def test_a_slot_is_filled_with_a_log_of_its_own_and_then_the_ordinary_one(cluster: ToyCluster) -> None:
    found = cluster.slot("green")
    changes = slot_changes(found, replace(RECORD, state="stage"), "green")
    staged = copy.deepcopy(found)
    staged["spec"]["predictor"] |= changes["spec"]["predictor"]
    staged["metadata"]["annotations"] |= changes["metadata"]["annotations"]
    assert (source_of(staged), log_of(staged)) == ("s3://bundles/b2", "/var/log/reco/shadow")
    assert slot_changes(staged, replace(RECORD, state="shadow"), "green") == {}
    again = slot_changes(staged, replace(RECORD, state="restage"), "green")
    [container] = again["spec"]["predictor"]["containers"]
    assert {"name": "RECO_LOG_DIR", "value": "/var/log/reco"} in container["env"]
    assert len(container["env"]) == len(found["spec"]["predictor"]["containers"][0]["env"])


def deployment(found: dict[str, Any], **status: Any) -> dict[str, Any]:
    template = {"spec": {"containers": copy.deepcopy(found["spec"]["predictor"]["containers"])}}
    whole = {"observedGeneration": 3, "replicas": 2, "updatedReplicas": 2, "availableReplicas": 2}
    return {
        "metadata": {"generation": 3},
        "spec": {"replicas": 2, "template": template},
        "status": {**whole, **status},
    }


def test_a_deployment_is_rolled_out_when_every_pod_is_new_and_available(cluster: ToyCluster) -> None:
    found = cluster.slot("blue")
    assert rolled_out(deployment(found), found) == (True, "")
    assert rolled_out(None, found) == (False, "")
    for late in (
        {"updatedReplicas": 1},
        {"availableReplicas": 1},
        {"observedGeneration": 2},
        {"replicas": 3},
    ):
        assert rolled_out(deployment(found, **late), found) == (False, ""), late
    older = deployment(found)
    older["spec"]["template"]["spec"]["containers"][0]["env"][0]["value"] = "s3://bundles/b0"
    assert rolled_out(older, found) == (False, "")


def test_a_deployment_that_gave_up_says_why(cluster: ToyCluster) -> None:
    found = cluster.slot("blue")
    gave_up = {"type": "Progressing", "status": "False", "message": "deadline exceeded"}
    assert rolled_out(deployment(found, conditions=[gave_up]), found)[1].endswith("deadline exceeded")
    failed = {"transitionStatus": "BlockedByFailedLoad", "lastFailureInfo": {"message": "golden request 3"}}
    found["status"] = {"modelStatus": failed}
    assert rolled_out(None, found) == (False, "the pods do not start: golden request 3")


def test_the_metrics_of_a_ready_pod_are_at_its_named_port() -> None:
    ports = [{"name": "http1", "containerPort": 8080}, {"name": "metrics", "containerPort": 9090}]
    ready = {"podIP": "fd00::1", "conditions": [{"type": "Ready", "status": "True"}]}
    pod = {"metadata": {}, "spec": {"containers": [{"ports": ports}]}, "status": ready}
    assert (is_ready(pod), metrics_url(pod)) == (True, "http://[fd00::1]:9090/metrics")
    assert not is_ready({**pod, "metadata": {"deletionTimestamp": "now"}})
