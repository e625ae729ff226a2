"""Pods, metrics and golden requests of a slot, as the release sees them."""

from dataclasses import replace
from typing import Any

import httpx
import pytest

from components.rollout.cluster import Cluster
from components.rollout.observe import CallerRefused, Observer
from components.rollout.plan import Observed, Pace
from tests.components.rollout.toy_cluster import RECORD, ToyCluster

SERVED = replace(RECORD, canary="blue", stable="green", bundle_id="b1")  # the toy cluster serves b1 in blue


def observer(cluster: ToyCluster, gateway: Any = None) -> Observer:
    def answer(request: httpx.Request) -> httpx.Response:
        if gateway is not None and request.url.host == "gateway":
            return gateway(request)
        return cluster._answer(request)

    client = httpx.Client(base_url="http://api", transport=httpx.MockTransport(answer))
    return Observer(
        Cluster(client, "checkout"), client, "http://gateway", "token-of-a-till", Pace(), lambda: cluster.now
    )


def golden(cluster: ToyCluster, gateway: Any = None) -> Observed:
    """Ask the slot its golden requests, of a gateway that answers like this."""
    return observer(cluster, gateway).slot(SERVED, cluster.catalogue.bundle(SERVED), golden=True)


def test_a_slot_is_proven_when_its_pods_and_its_golden_answers_are_right(cluster: ToyCluster) -> None:
    bundle = cluster.catalogue.bundle(SERVED)
    assert observer(cluster).slot(SERVED, bundle, golden=True).done
    other = observer(cluster).slot(replace(SERVED, bundle_id="b2"), bundle, golden=True)
    assert other.fault == "a pod of blue answers with bundle b1"


def test_without_a_gateway_golden_requests_are_a_fault_at_once(cluster: ToyCluster) -> None:
    watch = observer(cluster)
    watch._gateway = ""
    found = watch.slot(SERVED, cluster.catalogue.bundle(SERVED), golden=True)
    assert "the route names no host, give --gateway" in found.fault
    assert watch.slot(SERVED, cluster.catalogue.bundle(SERVED), golden=False).done


def test_a_bundle_without_a_golden_request_of_a_stranger_proves_nothing(cluster: ToyCluster) -> None:
    file = cluster.catalogue.bundle(SERVED) / "golden.jsonl"
    file.write_text(file.read_text().splitlines()[1] + "\n")
    assert "holds no golden request without a shopper" in golden(cluster).fault


STRANGERS: tuple[Any, ...] = ({"items": []}, [1], None)
WRONG_SCORE = {"bundle_id": "b1", "items": [{"item_id": "9", "score": 0.6}], "rung": "full"}


BELOW_FULL = "golden request golden-0: answered on the rung popular"


@pytest.mark.parametrize(
    ("status", "body", "fault", "missing"),
    [
        (200, {"json": {"bundle_id": "b0", "items": []}}, "answered by bundle b0, not b1", ""),
        (200, {"json": WRONG_SCORE}, "the score of item 9 is 0.6", ""),
        (200, {"text": "<html>"}, "no answer of an endpoint", ""),
        *((200, {"json": other}, "no answer of an endpoint", "") for other in STRANGERS),
        (400, {}, "status 400", ""),
        # These are asked again: below full, and a gateway that does not know the pods yet.
        (200, {"json": WRONG_SCORE | {"rung": "popular"}}, "", BELOW_FULL),
        *((status, {}, "", f"status {status}") for status in (429, 502, 503, 504)),
    ],
)
def test_a_wrong_golden_answer_is_a_fault_and_a_passing_one_is_asked_again(
    cluster: ToyCluster, status: int, body: Any, fault: str, missing: str
) -> None:
    def gateway(request: httpx.Request) -> httpx.Response:
        assert request.headers["x-reco-slot"] == "blue"
        assert request.headers["authorization"] == "Bearer token-of-a-till"
        return httpx.Response(status, **body)

    found = golden(cluster, gateway)
    assert (found.done, bool(found.fault), bool(found.missing)) == (False, bool(fault), bool(missing))
    assert fault in found.fault
    assert missing in found.missing


@pytest.mark.parametrize("status", [401, 403])
def test_a_refused_caller_is_no_fault_of_the_version(cluster: ToyCluster, status: int) -> None:
    with pytest.raises(CallerRefused, match=f"status {status} .*RECO_CALLER_TOKENS"):
        golden(cluster, lambda request: httpx.Response(status))


@pytest.mark.parametrize("fault", ["its page did not load", "it was not ready"])
def test_a_pod_that_did_not_answer_at_the_first_look_counts_from_its_second(
    cluster: ToyCluster, fault: str
) -> None:
    green = cluster.slot("green")
    green["metadata"]["annotations"]["serving.kserve.io/stop"] = "false"
    green["spec"]["predictor"]["containers"][0]["env"][0]["value"] = "s3://bundles/b2"
    cluster._put("inferenceservices", green)
    step = replace(RECORD, state="step", weight=5)
    cluster._counts = {"blue": [500.0, 0.0, 0.0, 0.0], "green": [500.0, 400.0, 0.0, 0.0]}
    watch = observer(cluster)
    watch.slot(step, cluster.catalogue.bundle(step), golden=False)  # the pods are made
    [pod] = [one for one in cluster.objects.list("pods") if "green" in one["metadata"]["name"]]
    key = ("pods", "checkout", pod["metadata"]["name"])
    ready = {"status": {"conditions": [{"type": "Ready", "status": "True"}]}}
    if fault == "it was not ready":
        cluster.objects.merge(key, {"status": {"conditions": []}})
    else:
        cluster.no_metrics.add("green")
    assert "slot green" in watch.comparison(step).missing
    cluster.no_metrics.clear()
    cluster.objects.merge(key, ready)
    verdicts = [watch.comparison(step).verdict]
    for slot in ("blue", "green"):
        cluster._counts[slot][0] += 20.0
    verdicts.append(watch.comparison(step).verdict)
    assert [verdict and verdict.rows[0]["canary"] for verdict in verdicts] == ["0 of 0", "0 of 20"]
