"""A cluster in this process: the API that `reco up` brings, slots that start at once, and a clock.

A slot counts answers as a gateway would send them: by the route's weights and its mirror, at RATE a second.
"""

import copy
import json
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import yaml

from components.home import Busy, Conflict
from components.release.registry import RegistryRefused
from components.rollout.cluster import Cluster
from components.rollout.manifests import SLOTS, backend, service, source_of, weights
from components.rollout.observe import Observer
from components.rollout.plan import Pace, Release
from components.rollout.release import Rollout
from feature_repo.errors import UNREACHABLE, RecoError
from pipelines.live.cluster_api import Objects, answer, merged

KSERVE = Path(__file__).parents[3] / "infra" / "kserve"
RATE = 50.0
HOLD_S = 120.0
BOUNDS = (0.005, 0.01, 0.02, 0.05, 0.1, float("inf"))
GOLDEN = {"request_id": "golden-0", "basket": ["1"], "k": 1}
OWN_FLOOR = {"blue": 3, "green": 2}
RECORD = Release("r", "release", "2", "b2", "s3://bundles/b2", "blue", "green", compared=True, since=100.0)
HOSTS = {slot: f"10.0.0.{number}" for number, slot in enumerate(SLOTS, 1)}


class Killed(BaseException):
    """The deployer was killed."""


class RegistryAway(RecoError):
    exit_code = UNREACHABLE


class Direct(httpx.Client):
    """Calls a function with each request: half of a release's time would be a client's own work."""

    def __init__(self, answer: Callable[[httpx.Request], httpx.Response]) -> None:
        super().__init__(transport=httpx.MockTransport(answer))
        self._answer = answer

    def request(self, method: str, url: Any, **options: Any) -> httpx.Response:
        for name in ("auth", "follow_redirects", "timeout"):
            options.pop(name, None)
        whole = parsed(url, *(options.pop("params", None) or {}).items())
        return self._answer(httpx.Request(method, whole, **options))


@cache
def parsed(url: str, *params: tuple[str, str]) -> httpx.URL:
    return httpx.URL(f"http://api{url}" if url[0] == "/" else url, **({"params": params} if params else {}))


class ToyCatalogue:
    """Versions in memory: the number n is the bundle `b<n>`."""

    def __init__(self, bundle: Path, wrote: Callable[[], None]) -> None:
        self.champions, self.published, self._bundle, self._wrote = ["1"], set[str](), bundle, wrote
        self.away_at: set[str] = set()
        self.conflict_at = ""
        self.busy = Counter[str]()  # act -> how often another gate is at work yet
        self.refused: list[str] = []
        self.fetched: list[str] = []
        self.challenger: str | None = None

    def _ask(self, act: str) -> None:
        if act in self.away_at:
            raise RegistryAway("no registry")
        if act == self.conflict_at:
            raise Conflict("the alias was moved by hand")
        if self.busy[act]:
            self.busy[act] -= 1
            raise Busy("process 7 is judging version 5")

    def place(self, bundle_id: str) -> str:
        return f"s3://bundles/{bundle_id}"

    def find(self, version: str) -> tuple[str, str]:
        if version == "challenger":
            if self.challenger is None:
                raise RegistryRefused("no version 'challenger'")
            version = self.challenger
        return version, f"b{version}"

    def previous(self) -> tuple[str, str]:
        return self.find(self.champions[-2])

    def bundle(self, record: Release) -> Path:
        self._ask("bundle")
        self.fetched.append(record.version)
        return self._bundle

    def check(self, record: Release) -> None:
        self._ask("verify")

    def publish(self, record: Release) -> None:
        self._ask("publish")
        if record.bundle_id not in self.published:
            self.published.add(record.bundle_id)
            self._wrote()

    def seal(self, record: Release) -> None:
        self._ask("seal")
        if self.champions[-1] != record.version:
            if record.kind == "rollback":
                self.champions.pop()
            else:
                self.champions.append(record.version)
            self._wrote()

    def undo(self, record: Release) -> None:
        self._ask("undo")
        if record.kind == "release" and not record.again and self.champions[-1] == record.version:
            self.champions.pop()
            self._wrote()
        if record.version not in self.refused:
            self.refused.append(record.version)
            self._wrote()


class ToyCluster:
    """All of it. `faults` of the canary: share of errors, of degraded and of slow answers."""

    def __init__(self, folder: Path) -> None:
        self.now, self.objects = 1_000.0, Objects()
        self.writes, self.kill_after = 0, 0
        self.wrote: Callable[[], None] = lambda: None  # called after each write
        self.errors = self.less = self.slow = 0.0
        self.no_metrics: set[str] = set()
        self.refuses_callers = False  # the gateway's 401
        self.stuck = False  # pods of the canary do not start
        self._played: list[str] = []  # versions of the slots that KServe has seen
        self._looked = ""  # the last write when it looked
        self.stops: Callable[[], None] = lambda: None  # called at each look
        self.said: list[str] = []  # lines of all deployers
        self._counts = {slot: [0.0, 0.0, 0.0, 0.0] for slot in SLOTS}  # answers, errors, less, slow
        bundle = folder / "bundle"
        bundle.mkdir()
        golden = {"request": GOLDEN, "history": None, "expected": [["9", 0.5]]}
        known = {"request": GOLDEN | {"user_id": "ann"}, "history": "", "expected": [["9", 0.7]]}
        (bundle / "golden.jsonl").write_text(json.dumps(golden) + "\n" + json.dumps(known) + "\n")
        self.catalogue = ToyCatalogue(bundle, self._wrote)
        route = yaml.safe_load((KSERVE / "base" / "route.yaml").read_text())
        self._put("httproutes", route)
        slot = yaml.safe_load((KSERVE / "slot" / "inferenceservice.yaml").read_text())
        scaled = yaml.safe_load((KSERVE / "slot" / "autoscaling.yaml").read_text())
        for name, least in OWN_FLOOR.items():
            own = copy.deepcopy(slot)
            own["metadata"]["name"] = service(name)
            self._put("inferenceservices", own)
            scaled["metadata"]["name"], scaled["spec"]["minReplicaCount"] = service(name), least
            self._put("scaledobjects", scaled)
        served = self.slot("blue")
        served["metadata"]["annotations"]["serving.kserve.io/stop"] = "false"
        served["spec"]["predictor"]["containers"][0]["env"][0]["value"] = "s3://bundles/b1"
        self._put("inferenceservices", served)

    def _put(self, plural: str, document: dict[str, Any]) -> None:
        self.objects.write((plural, "checkout", document["metadata"]["name"]), document)

    def slot(self, name: str) -> dict[str, Any]:
        return self.objects.get(("inferenceservices", "checkout", service(name)))

    def scaled(self, name: str) -> dict[str, Any]:
        return self.objects.get(("scaledobjects", "checkout", service(name)))

    def autoscale(self, **least: int) -> None:
        """Set slots' lower bounds, as their owner does."""
        for name, pods in least.items():
            self._put("scaledobjects", merged(self.scaled(name), {"spec": {"minReplicaCount": pods}}))

    def floors(self) -> dict[str, int]:
        """Return the lower bounds of the slots, which have no note of a release."""
        assert not any(self.scaled(name)["metadata"].get("annotations") for name in SLOTS)
        return {name: self.scaled(name)["spec"]["minReplicaCount"] for name in SLOTS}

    def pods(self, name: str) -> int:
        """How many pods a slot has."""
        found = self.objects.list("deployments")
        return sum(one["spec"]["replicas"] for one in found if one["metadata"]["name"] == backend(name))

    def route(self) -> dict[str, Any]:
        return self.objects.get(("httproutes", "checkout", "checkout"))

    def state(self) -> dict[str, Any]:
        """All that a release leaves behind, without times and names of deployers."""
        record = json.loads(self.route()["metadata"]["annotations"]["reco.dev/release"])
        for name in ("id", "beat", "since", "holder", "started_by", "earlier", "gate"):
            record.pop(name)
        return {
            "record": record,
            "rules": self.route()["spec"]["rules"],
            "slots": {name: [self.slot(name)["spec"], source_of(self.slot(name))] for name in SLOTS},
            "scaled": {name: self.scaled(name)["spec"] for name in SLOTS},
            "champions": self.catalogue.champions,
            "published": self.catalogue.published,
            "refused": self.catalogue.refused,
        }

    def rollout(self, holder: str = "job-1") -> Rollout:
        """A deployer."""
        pace = Pace(hold_s=HOLD_S)
        client = Direct(self._answer)
        cluster = Cluster(client, "checkout")
        observer = Observer(cluster, client, "http://gateway", "", pace, lambda: self.now)
        return Rollout(
            cluster, observer, self.catalogue, pace, holder, lambda: self.now, self._sleep, self.said.append
        )

    def release(self, version: str = "2", holder: str = "job-1") -> Release:
        return self.rollout(holder).start(version)

    # ------------------------------------------------------------------------------------------- inside

    def _sleep(self, seconds: float) -> None:
        self.stops()
        self.now += seconds
        split = weights(self.route())
        filters = [one for rule in self.route()["spec"]["rules"] for one in rule.get("filters", ())]
        mirrored = sum(one["requestMirror"]["percent"] for one in filters)
        for slot in SLOTS:
            if not source_of(self.slot(slot)):
                continue
            is_new = not source_of(self.slot(slot)).endswith("b1")
            answers = RATE * seconds * (split[slot] + (mirrored if is_new else 0)) / 100
            faults = (self.errors, self.less, self.slow) if is_new else (0.0, 0.002, 0.005)
            added = [answers, *(answers * share for share in faults)]
            self._counts[slot] = [a + b for a, b in zip(self._counts[slot], added, strict=True)]

    def _wrote(self) -> None:
        self.writes += 1
        self.wrote()
        if self.writes == self.kill_after:
            raise Killed

    def _answer(self, request: httpx.Request) -> httpx.Response:
        if request.url.host in HOSTS.values():
            return self._metrics(next(slot for slot, host in HOSTS.items() if host == request.url.host))
        if request.url.host == "gateway":
            if self.refuses_callers:
                return httpx.Response(401)
            slot = request.headers["x-reco-slot"]
            bundle = source_of(self.slot(slot)).rpartition("/")[2]
            document = {"bundle_id": bundle, "items": [{"item_id": "9", "score": 0.5}], "rung": "full"}
            return httpx.Response(200, json=document)
        self._play_kserve()
        status, document = answer(self.objects, request.method, str(request.url), request.content)
        if request.method != "GET" and status == 200:
            self._wrote()
        return httpx.Response(status, json=document)

    def _play_kserve(self) -> None:
        if self.objects.version == self._looked:
            return
        self._looked = self.objects.version
        both = [found for slot in SLOTS for found in (self.slot(slot), self.scaled(slot))]
        now = [found["metadata"]["resourceVersion"] for found in both]
        if now == self._played:
            return
        self._played = now
        for slot in SLOTS:
            name, found = backend(slot), self.slot(slot)
            for plural in ("deployments", "pods"):
                if not source_of(found) and self._exists(plural, name):
                    self.objects.delete((plural, "checkout", name))
            if not source_of(found) or (self.stuck and slot == "green"):
                continue
            container = found["spec"]["predictor"]["containers"][0]
            pods = self.scaled(slot)["spec"]["minReplicaCount"]
            spec = {"replicas": pods, "template": {"spec": {"containers": [container]}}}
            done = dict.fromkeys(("replicas", "updatedReplicas", "availableReplicas"), pods)
            deployment = self.objects.merge if self._exists("deployments", name) else self.objects.write
            made = deployment(("deployments", "checkout", name), {"spec": spec})
            seen = {"observedGeneration": made["metadata"]["generation"], **done}
            self.objects.write(("deployments", "checkout", name), merged(made, {"status": seen}))
            labels = {"serving.kserve.io/inferenceservice": service(slot)}
            status = {"podIP": HOSTS[slot], "conditions": [{"type": "Ready", "status": "True"}]}
            pod = {"metadata": {"labels": labels}, "spec": {"containers": [container]}, "status": status}
            self.objects.write(("pods", "checkout", name), pod)

    def _exists(self, plural: str, name: str) -> bool:
        return any(one["metadata"]["name"] == name for one in self.objects.list(plural))

    def _metrics(self, slot: str) -> httpx.Response:
        if slot in self.no_metrics:
            return httpx.Response(503)
        answers, errors, less, slow = self._counts[slot]
        lines = [
            f'reco_bundle_info{{bundle_id="{source_of(self.slot(slot)).rpartition("/")[2]}"}} 1',
            f'reco_responses_total{{rung="full",degraded_reason="none"}} {answers - less}',
            f'reco_responses_total{{rung="popular",degraded_reason="x"}} {less}',
            f'reco_rejected_total{{reason="internal"}} {errors}',
        ]
        for bound in BOUNDS:
            text, below = (
                ("+Inf" if bound == BOUNDS[-1] else bound),
                answers - (slow if bound < 0.05 else 0.0),
            )
            lines.append(f'reco_answer_seconds_bucket{{le="{text}"}} {below}')
        return httpx.Response(200, text="\n".join(lines) + "\n")
