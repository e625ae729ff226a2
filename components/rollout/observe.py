"""Pods, metrics and golden requests -> the observation that ends a state of the release."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import httpx

from components.rollout.cluster import Cluster, Document
from components.rollout.comparison import SeriesMissing, SlotCounts, compare, read_metrics, total
from components.rollout.manifests import (
    SHADOW,
    SLOT_HEADER,
    backend,
    is_ready,
    metrics_url,
    restarts,
    rolled_out,
    service,
)
from components.rollout.plan import Observed, Pace, Release
from feature_repo.errors import UNREACHABLE, RecoError
from serving.release.golden import TOLERANCE, GoldenRequest, read_golden

ANSWER_S = 5.0  # of a golden request: the slot has just started
SCRAPE_S = 2.0
RECOMMENDATIONS = "/v1/recommendations"
NOT_YET = (429, 502, 503, 504)  # the gateway learns of new pods a moment after they are ready
NOT_FOR_US = (401, 403)  # of endpoint, gateway or mesh: says nothing of the version


class CallerRefused(RecoError):
    """Golden requests were not let in: nothing was judged, and the release goes on when they are."""

    exit_code = UNREACHABLE


class Observer:
    """Looks at the slots of one release; remembers the counters of the state's first look."""

    def __init__(
        self,
        cluster: Cluster,
        http: httpx.Client,
        gateway: str,
        token: str,
        pace: Pace,
        now: Callable[[], float],
    ) -> None:
        self._cluster, self._http, self._gateway, self._token = cluster, http, gateway, token
        self._pace, self._now = pace, now
        self._state: tuple[str, str, int] = ("", "", 0)  # release, its state and weight
        self._first: dict[str, SlotCounts] = {}  # by pod
        self._last: dict[str, SlotCounts] = {}
        self._slot: dict[str, str] = {}  # pod -> slot
        self._there: set[str] = set()  # pods at the first look, ready or not
        self._died: dict[str, int] = {}  # pod -> restarts at the first look
        self._seen_at = 0.0  # when all series were there

    def slot(self, record: Release, bundle: Path, golden: bool) -> Observed:
        """Say whether the canary's pods run the record's bundle, and answer golden requests."""
        found = self._cluster.get("InferenceService", service(record.canary))
        deployment = self._cluster.find("Deployment", backend(record.canary))
        is_out, fault = rolled_out(deployment, found)
        if deployment is None or fault or not is_out:
            return Observed(fault=fault)
        scaled = self._cluster.find("ScaledObject", service(record.canary))
        if scaled and (has := deployment["spec"]["replicas"]) < (least := scaled["spec"]["minReplicaCount"]):
            return Observed(missing=f"{has} of {least} pods")
        pods = self._pods(record.canary)
        if not pods:
            return Observed()
        for pod in pods:
            try:
                _, bundle_id = self._scrape(pod)
            except SeriesMissing:
                return Observed(missing="a pod shows no metrics")
            if bundle_id != record.bundle_id:
                return Observed(fault=f"a pod of {record.canary} answers with bundle {bundle_id}")
        if golden:
            return self._golden(record, bundle)
        return Observed(done=True)

    def comparison(self, record: Release) -> Observed:
        """Compare the slots since the state's first look."""
        now, missing, fault = self._now(), "", ""
        self._begin(record, now)
        for slot in (record.stable, record.canary):
            pods = self._pods(slot)
            if not pods:
                missing = f"slot {slot} has no ready pod"
            for pod in pods:
                uid = pod["metadata"]["uid"]
                try:
                    counts, _ = self._scrape(pod)
                except SeriesMissing as error:
                    missing = f"slot {slot}: {error}"
                    continue
                # A pod that came later counts from its start; one that did not answer at first, from now on.
                self._first.setdefault(uid, counts if uid in self._there else SlotCounts())
                self._last[uid], self._slot[uid] = counts, slot
                if restarts(pod) > self._died.setdefault(uid, restarts(pod)) and slot == record.canary:
                    fault = f"a pod of slot {slot} died"
        if missing:
            return Observed(fault=fault, missing=missing, missing_s=now - self._seen_at)
        self._seen_at, pace = now, self._pace
        enough = pace.shadow_answers if record.state == SHADOW else pace.weights[record.weight]
        reveals = 1.0 if record.weight == min(pace.weights) else pace.reveals
        verdict = compare(self._since(record.stable), self._since(record.canary), enough, reveals)
        return Observed(fault=fault, verdict=verdict)

    def _begin(self, record: Release, now: float) -> None:
        """At a state's first look, drop the counts before it, and note which pods are there."""
        if self._state != (state := (record.id, record.state, record.weight)):
            self._state, self._seen_at = state, now
            self._first, self._last, self._slot, self._died = {}, {}, {}, {}
            pods = [pod for slot in (record.stable, record.canary) for pod in self._all_pods(slot)]
            self._there = {pod["metadata"]["uid"] for pod in pods}

    def _since(self, slot: str) -> SlotCounts:
        uids = [uid for uid, its in self._slot.items() if its == slot]
        return total(self._last[uid].minus(self._first[uid]) for uid in uids)

    def _pods(self, slot: str) -> list[Document]:
        return [pod for pod in self._all_pods(slot) if is_ready(pod)]

    def _all_pods(self, slot: str) -> list[Document]:
        return self._cluster.list("Pod", f"serving.kserve.io/inferenceservice={service(slot)}")

    def _scrape(self, pod: Document) -> tuple[SlotCounts, str]:
        try:
            answer = self._http.get(metrics_url(pod), timeout=SCRAPE_S)
        except httpx.TransportError as error:
            raise SeriesMissing(f"no metrics ({type(error).__name__})") from error
        if not answer.is_success:
            raise SeriesMissing(f"no metrics (status {answer.status_code})")
        return read_metrics(answer.text)

    def _golden(self, record: Release, bundle: Path) -> Observed:
        """Ask the canary's golden requests without a shopper through the gateway, by the slot's header.

        The shop's stock may have changed since they were recorded. So the answer must be of this bundle, and
        give its items their recorded scores. An answer below the rung `full`, as a busy machine gives, has
        other scores: the request is asked again at the next look.
        """
        if not self._gateway:
            return Observed(fault="golden requests need a gateway: the route names no host, give --gateway")
        headers = {SLOT_HEADER: record.canary, "content-type": "application/json"}
        if self._token:
            headers["authorization"] = f"Bearer {self._token}"
        # The endpoint logs its requests, and a shopper may have been forgotten since.
        strangers = [golden for golden in read_golden(bundle) if golden.request.get("user_id") is None]
        if not strangers:
            return Observed(fault=f"{bundle} holds no golden request without a shopper")
        for golden in strangers:
            body = json.dumps({name: value for name, value in golden.request.items() if value is not None})
            try:
                answer = self._http.post(
                    f"{self._gateway}{RECOMMENDATIONS}", content=body, headers=headers, timeout=ANSWER_S
                )
            except httpx.TransportError as error:
                return Observed(missing=f"{_named(golden)}: {type(error).__name__}")
            seen = _judged(record, golden, answer)
            if not seen.done:
                return seen
        return Observed(done=True)


def _named(golden: GoldenRequest) -> str:
    return f"golden request {golden.request['request_id']}"


def _judged(record: Release, golden: GoldenRequest, answer: httpx.Response) -> Observed:
    if answer.status_code in NOT_FOR_US:
        raise CallerRefused(
            f"{_named(golden)}: status {answer.status_code} {answer.text[:120]}: expected to be let in; 401: "
            "correct the first token of RECO_CALLER_TOKENS, on a cluster in the Secret reco-callers; 403: "
            "let the gateway or the mesh admit the deployer"
        )
    if answer.status_code in NOT_YET:
        return Observed(missing=f"{_named(golden)}: status {answer.status_code} {answer.text[:120]}")
    if answer.status_code != httpx.codes.OK:
        return Observed(fault=f"{_named(golden)}: status {answer.status_code} {answer.text[:120]}")
    try:
        document = answer.json()
        bundle_id = document["bundle_id"]
        scores = {item["item_id"]: float(item["score"]) for item in document["items"]}
    except (ValueError, KeyError, TypeError) as error:
        what = f"no answer of an endpoint ({type(error).__name__}): {answer.text[:120]}"
        return Observed(fault=f"{_named(golden)}: {what}")
    if bundle_id != record.bundle_id:
        return Observed(fault=f"{_named(golden)}: answered by bundle {bundle_id}, not {record.bundle_id}")
    if (rung := document.get("rung")) != "full":
        return Observed(missing=f"{_named(golden)}: answered on the rung {rung}")
    for item, score in golden.expected:
        if item in scores and abs(scores[item] - score) > TOLERANCE:
            what = f"the score of item {item} is {scores[item]}, not the recorded one"
            return Observed(fault=f"{_named(golden)}: {what}")
    return Observed(done=True)
