"""A champion -> the running system that drills break: store, proxy before it, endpoint, and its load.

Each part is a process of its own on this machine. All drills share the `Testbed`: the bundle, a Valkey with
the home's users, and the questions. A `System` runs on it, made as a `Setup` says.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from google.protobuf.timestamp_pb2 import Timestamp
from google.protobuf.wrappers_pb2 import BytesValue

from feature_repo.snapshots import HEARTBEAT
from pipelines.bench.load.arms import PREDICT, fill_store
from pipelines.bench.load.generator import LoadGenerator, LoadPlan, bodies_of, load_generator, sending
from pipelines.bench.load.local_store import Store
from pipelines.bench.load.measured_server import MeasuredServer, private, started
from pipelines.bench.load.waiting import NotReached, repeating
from pipelines.drills.clock import Clock
from pipelines.drills.fault_proxy import Proxy
from pipelines.drills.outcome import CLIENT, RAW, Answer, answers_of
from pipelines.live.ports import free_port
from pipelines.live.slots import SERVER
from serving.release.best_sellers import write_best_sellers
from serving.release.bundle import load_bundle, seal_bundle
from serving.release.champion import Champion, write_champion
from serving.release.manifest import read_manifest
from serving.settings import Settings
from serving.stores.online_features import HISTORY_FIELD, WRITTEN_FIELD

BEAT_S = 0.25
STALE_AFTER_S = 3.0  # in a system with a heartbeat; the default of a minute makes a long drill
LONGEST_S = 1_800.0  # of the streams: they are stopped earlier
ESTABLISHED, LISTENING = "01", "0A"  # states of a socket in /proc/net
WARM_UP = 3  # requests before those that count: so few that the client's breaker stays closed
SWITCH_S = 0.0005
SCRAPE_S = 0.25  # between two looks at the metrics: each takes 10 ms of this process
LOG_SEGMENT_S = 1.0  # so that a drill sees the records soon
FLOOD = "flood"


@dataclass(frozen=True)
class DrillEffort:
    """The length of each phase, and the rates of the requests."""

    before_s: float = 8.0
    during_s: float = 10.0  # of each fault
    late_s: float = 60.0  # of one that shows late, at most
    after_s: float = 6.0
    client_rate: float = 40.0  # requests a second through the project's client
    raw_rate: float = 20.0  # and without it, straight to the endpoint
    questions: int = 40  # different ones of each of the two streams, sent in turn
    crowd: int = 1_000  # connections of callers that are slow
    herd: int = 500  # requests for the same list at once
    # With alerts. Healthy time before the first fault fills windows of two minutes: else pages come too soon.
    history_s: float = 130.0
    watched_s: float = 75.0  # of each fault
    over_s: float = 330.0  # at most, until its page is resolved


SHORT = DrillEffort(
    before_s=1.2,
    during_s=2.0,
    late_s=12.0,
    after_s=3.2,
    client_rate=24.0,
    raw_rate=12.0,
    questions=12,
    crowd=100,
    herd=100,
)


@dataclass(frozen=True)
class Setup:
    """The differences of a system from the shipped defaults."""

    settings: Mapping[str, Any] = field(default_factory=dict)  # fields of `Settings`
    remote_ranker: bool = False  # the ranker is another endpoint
    clock: bool = False  # its clock can be set, and the stream's heartbeat is there


STANDARD = Setup()
TWO_PROCESSES = Setup({"processes": 2})
REMOTE_RANKER = Setup(remote_ranker=True)
KEEPS_ANSWERS = Setup({"answer_cache": "memory:"})
LIMITED = Setup({"user_limit_per_s": 5.0})  # so that a short drill comes to it
CLOCKED = Setup({"stale_after_s": STALE_AFTER_S, "answer_cache": "memory:"}, clock=True)


@dataclass(frozen=True)
class Testbed:
    """The parts that all systems of a run share."""

    bundle: Path
    store: Store
    proxy: Proxy  # between every endpoint and the store
    folder: Path  # for all files
    asked: Sequence[Mapping[str, Any]]  # request lines of the client
    raw: Sequence[Mapping[str, Any]]  # request lines sent without it, of other shoppers
    best_sellers: Path
    deadline_ms: float  # of a call of the client, and of the endpoint
    effort: DrillEffort
    generators: Mapping[str, LoadGenerator]  # CLIENT and RAW send the constant streams
    launch: Sequence[str] = SERVER  # what starts an endpoint; options follow


@dataclass
class System:
    """An endpoint that runs on the testbed, with all parts that a fault may touch."""

    testbed: Testbed
    home: Path  # that the endpoint follows
    server: MeasuredServer
    champions: Sequence[Champion]  # of that home: two bundles of the same files
    front: Proxy  # before the endpoint
    silent: threading.Event  # while it is set, the stream's heartbeat is not written
    clock: Clock | None = None
    start_ranker: Callable[[], MeasuredServer] | None = None  # that ranks for the endpoint
    ranker: MeasuredServer | None = None

    @property
    def address(self) -> tuple[str, int]:
        """Where the endpoint takes HTTP: host and port."""
        return address_of(str(self.server.ready["http"]))

    @property
    def effort(self) -> DrillEffort:
        """How long, and how much."""
        return self.testbed.effort

    @property
    def flood(self) -> LoadGenerator:
        """The generator beside the two constant streams."""
        return self.testbed.generators[FLOOD]

    @property
    def store(self) -> Store:
        """The store itself."""
        return self.testbed.store

    @property
    def proxy(self) -> Proxy:
        """The proxy before the store."""
        return self.testbed.proxy

    def sample(self, metric: str, *labels: str) -> float:
        """Return the value of a metric now, 0 if it was never counted."""
        return self.server.samples(metric).get(labels, 0.0)


@contextlib.contextmanager
def open_testbed(
    bundle: Path,
    offline_store: Path,
    requests: Sequence[Mapping[str, Any]],
    effort: DrillEffort,
    deadline_ms: float,
    launch: Sequence[str] = SERVER,
) -> Iterator[Testbed]:
    """Start the parts of a `Testbed`, which end with the block; the arguments are those of `run_drills`.

    Raises:
        FileNotFoundError: there is no store to start, or no offline store.
        ValueError: the requests are of too few shoppers.
    """
    asked, raw = two_crowds(requests, effort.questions)
    with contextlib.ExitStack() as stack:
        # The proxies are threads of this process: a reply must not wait for one that computes.
        stack.callback(sys.setswitchinterval, sys.getswitchinterval())
        sys.setswitchinterval(SWITCH_S)
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="reco-drill-")))
        best_sellers = folder / "best_sellers.json"
        write_best_sellers(load_bundle(bundle), best_sellers)
        store = stack.enter_context(contextlib.closing(Store(folder / "store")))
        fill_store(offline_store, folder / "feast", store.url)
        store.client.save()
        proxy = stack.enter_context(Proxy(("127.0.0.1", store.port)))
        generators = {name: stack.enter_context(load_generator()) for name in (CLIENT, RAW, FLOOD)}
        yield Testbed(
            *(bundle, store, proxy, folder, asked, raw, best_sellers, deadline_ms, effort, generators, launch)
        )


def released(bundle: Path, home: Path, made_for: str) -> Champion:
    """Copy a bundle under a home, as a promotion does; with a purpose it gets another id."""
    part = home / "bundles" / ".part"
    shutil.copytree(bundle, part)
    manifest = read_manifest(part)
    if made_for:
        settings = load_bundle(part).settings
        made_from = {**manifest["made_from"], "made_for": made_for}
        bundle_id = seal_bundle(part, cut=manifest["cut"], settings=settings, made_from=made_from)
    else:
        bundle_id = manifest["bundle_id"]
    part.rename(home / "bundles" / bundle_id)
    return Champion(bundle_id, "1", "checkout", f"bundles/{bundle_id}", manifest["cut"], "")


def two_crowds(
    requests: Sequence[Mapping[str, Any]], questions: int
) -> tuple[list[Mapping[str, Any]], list[Mapping[str, Any]]]:
    """Return questions of some shoppers, and as many of others: a basket each.

    Raises:
        ValueError: there are too few.
    """
    distinct = {(one["user_id"], *one["basket"]): one for one in requests if one.get("user_id") is not None}
    users = list(dict.fromkeys(user for user, *_ in distinct))
    if len(users) < 2:
        raise ValueError("the requests are of one shopper: drills need those of two or more")
    first = set(users[::2])
    return (
        [one for one in distinct.values() if one["user_id"] in first][:questions],
        [one for one in distinct.values() if one["user_id"] not in first][:questions],
    )


@contextlib.contextmanager
def running_system(testbed: Testbed, setup: Setup, name: str) -> Iterator[System]:
    """Start an endpoint on the testbed, in a folder of this name; it ends with the block.

    Raises:
        NotReached: it did not become ready.
    """
    home = testbed.folder / name
    champions = [released(testbed.bundle, home, made_for) for made_for in ("", "a drill")]
    write_champion(home, champions[0])
    store_url = f"redis://{testbed.proxy.address}/0"
    standard = Settings(home, store_url=store_url, deadline_ms=testbed.deadline_ms)
    settings = private(standard, log_segment_s=LOG_SEGMENT_S, **setup.settings)
    with contextlib.ExitStack() as stack:
        try:
            clock = start_ranker = ranker = None
            silent = threading.Event()

            def beat() -> None:
                if not silent.is_set():
                    fields = {HISTORY_FIELD: bytes_proto(b"drill"), WRITTEN_FIELD: time_proto(time.time())}
                    testbed.store.write(HEARTBEAT, fields)

            if setup.clock:  # the next system has no stream, and must not see the end of this one
                stack.callback(testbed.store.delete, HEARTBEAT)
                beat()
                stack.enter_context(repeating(beat, BEAT_S))
                clock = Clock(home / "clock")
            if setup.remote_ranker:
                own = replace(standard, home=home / "ranker", store_url="memory:", log=False)
                own = replace(own, http_port=free_port(), grpc_port=free_port())
                ranks = [*SERVER, "--bundle", str(home / champions[0].path)]

                def start() -> MeasuredServer:
                    return stack.enter_context(started(ranks, own.to_env(), home / "ranker.log"))

                start_ranker, ranker = start, start()
                settings = replace(settings, ranker_address=f"127.0.0.1:{own.grpc_port}")
            launch = testbed.launch if clock is None else clock.command()
            command = [*launch, "--home", str(home)]
            server = stack.enter_context(started(command, settings.to_env(), home / "server.log"))
        except RuntimeError as error:
            raise NotReached(str(error)) from error
        front = stack.enter_context(Proxy(address_of(str(server.ready["http"]))))
        yield System(testbed, home, server, champions, front, silent, clock, start_ranker, ranker)


def stream_plans(
    testbed: Testbed, client_at: str, raw_at: str, client_rate: float, raw_rate: float, connections: int = 64
) -> dict[str, LoadPlan]:
    """Return the plans of the two constant streams, through the client and straight."""
    client = client_plan(testbed, client_at, client_rate)
    bodies = bodies_of(testbed.raw)
    raw = LoadPlan(f"{raw_at}{PREDICT}", bodies, LONGEST_S, raw_rate, warm_up=WARM_UP, keep=True, seed=1)
    return {CLIENT: replace(client, connections=connections), RAW: replace(raw, connections=connections)}


def client_plan(testbed: Testbed, at: str, rate: float) -> LoadPlan:
    """Return the plan of a constant stream through the client."""
    return LoadPlan(
        f"client+{at}",
        bodies_of(testbed.asked, wrapped=False),
        LONGEST_S,
        rate,
        warm_up=WARM_UP,
        keep=True,
        best_sellers=str(testbed.best_sellers),
        deadline_ms=testbed.deadline_ms,
    )


@contextlib.contextmanager
def sent_streams(testbed: Testbed, plans: Mapping[str, LoadPlan]) -> Iterator[dict[str, list[Answer]]]:
    """Send both streams until the block ends; their answers are there after the block."""
    questions = {CLIENT: len(testbed.asked), RAW: len(testbed.raw)}
    streams: dict[str, list[Answer]] = {}
    with sending(*((testbed.generators[name], plan) for name, plan in plans.items())) as loads:
        yield streams
    streams |= {name: answers_of(load, questions[name]) for name, load in zip(plans, loads, strict=True)}


def address_of(url: str) -> tuple[str, int]:
    """Return host and port of an endpoint's address."""
    host, _, port = url.rpartition("/")[2].rpartition(":")
    return host, int(port)


def sockets_of(port: int, state: str) -> int:
    """Return how many sockets of this machine have this port and state.

    The look itself must not load the machine: psutil would read the same long tables for each process.
    """
    socket = re.compile(rf"^ *\d+: [0-9A-F]+:{port:04X} [0-9A-F]+:[0-9A-F]{{4}} {state} ", re.MULTILINE)
    tables = [table for name in ("tcp", "tcp6") if (table := Path("/proc/net", name)).exists()]
    return sum(len(socket.findall(table.read_text())) for table in tables)


def bytes_proto(value: bytes) -> bytes:
    """Return a Feast ValueProto that holds bytes, serialised: on the wire it is a BytesValue."""
    return bytes(BytesValue(value=value).SerializeToString())


def time_proto(seconds: float) -> bytes:
    """Return a protobuf Timestamp, serialised."""
    return bytes(Timestamp(seconds=int(seconds), nanos=int(seconds % 1 * 1e9)).SerializeToString())
