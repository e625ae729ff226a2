"""A running system -> the same under too many, too slow or too many identical requests, or unreachable.

The faults of the callers' side, as `pipelines.drills.faults` has those of store, rows, processes and bundles.
"""

from __future__ import annotations

import contextlib
import itertools
import resource
import select
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import orjson

from pipelines.bench.load.arms import PREDICT
from pipelines.bench.load.generator import Load, LoadPlan, sending
from pipelines.bench.report import percentiles
from pipelines.drills.faults import Break, Notes
from pipelines.drills.system import WARM_UP, System, bodies_of
from serving.schemas import MAX_BASKET

CUT_S = 6.0  # how long the slow callers wait to be cut off
OVERLOAD, CONNECTIONS = 3.0, 512
SATURATING, CAPACITY_S = 6, 2.0  # connections and seconds that measure the capacity of the endpoint
LONGEST_S = 120.0  # of a load that is stopped earlier
PATIENCE_S = 0.5
COMPUTED = "reco_cache_computed_total"


def note_refusals(system: System, notes: Notes) -> None:
    """Note how long a crowd waits for the cheapest answer, a refusal of invalid JSON, without other load."""
    notes["refusals_p99_ms"] = percentiles(_at_once(system, [b"{"]).client_ms)["p99"]


@contextlib.contextmanager
def herd_for_one(system: System, notes: Notes) -> Iterator[None]:
    """Send a crowd of requests at once for one list that is not cached."""
    notes["one_list"] = _herd(system, _cold(system, 1))
    yield


@contextlib.contextmanager
def herd_for_many(system: System, notes: Notes) -> Iterator[None]:
    """Send a crowd of requests at once for many lists that are not cached, two for each."""
    notes["many_lists"] = _herd(system, _cold(system, 1 + system.effort.herd // 2)[1:])
    yield


def _cold(system: System, count: int) -> list[bytes]:
    """Return questions whose lists are not cached."""
    asked = itertools.cycle(system.testbed.asked)
    cold = []
    for number in range(count):
        one = dict(next(asked))
        one.pop("user_id", None)  # a known shopper's list is personal: no crowd shares it
        # The number of unknown items in a basket is part of the question.
        one["basket"] = [*one["basket"], *(f"unheard-of-{line}" for line in range(number + 1))][-MAX_BASKET:]
        cold.append(one)
    return bodies_of(cold, wrapped=True)


def _herd(system: System, bodies: Sequence[bytes]) -> dict[str, Any]:
    """Send the bodies at once, repeated to the size of the crowd; return the figures."""
    before = system.sample(COMPUTED)
    load = _at_once(system, bodies)
    answered = Counter(number % len(bodies) for number, one in enumerate(load.answers) if was_computed(one))
    return {
        "lists": len(bodies),
        "asked": len(load.status),
        "failed": int((~load.answered).sum()),
        "whole": int((load.answered & ~load.degraded).sum()),
        "computed_most": max(answered.values(), default=0),  # of one list
        "computed": system.sample(COMPUTED) - before,  # also for lower rungs, and for the other streams
        "p99_ms": percentiles(load.client_ms)["p99"],
    }


def _at_once(system: System, bodies: Sequence[bytes]) -> Load:
    herd = system.effort.herd
    plan = LoadPlan(
        f"{system.server.ready['http']}{PREDICT}",
        bodies,
        LONGEST_S,
        connections=herd,
        requests=herd,
        warm_up=0,
        keep=True,
    )
    return system.flood.run(plan)


def was_computed(answer: bytes) -> bool:
    """Say whether the list in an answer of V1 was computed for it: others have no ranking among their stages.

    A list without the shopper's row is another list.
    """
    [found] = orjson.loads(answer or b"{}").get("predictions", [{"stage_ms": (), "degraded": False}])
    return "ranking" in found["stage_ms"] and not found["degraded"]


def note_capacity(system: System, notes: Notes) -> None:
    """Note how many whole answers a second the endpoint gives at most, without other load."""
    full = system.flood.run(replace(_flood(system), connections=SATURATING))
    notes["capacity"] = float((full.answered & ~full.degraded).sum() / CAPACITY_S)


@contextlib.contextmanager
def overload(system: System, notes: Notes) -> Iterator[None]:
    """Send prefetches at three times the capacity of the endpoint, beside the checkouts."""
    flood = replace(_flood(system), rate=OVERLOAD * max(notes["capacity"], 1.0), prefetch=True)
    with sending((system.flood, replace(flood, seconds=LONGEST_S))) as loads:
        yield
    [load] = loads
    refused = load.status == 429
    refused_ms = (load.client_ms - load.late_ms)[refused]  # from the call: the generator sends late, too
    notes |= {
        "prefetches": len(load.status),
        "refused": int(refused.sum()),
        "refused_p50_ms": float(np.median(refused_ms)) if len(refused_ms) else None,
        "not_refused_but_failed": int((~load.answered & ~refused).sum()),
        "good_per_s": load.summary(system.testbed.deadline_ms)["good_per_s"],
    }


def at_share_of_capacity(share: float, break_it: Break) -> Break:
    """Return a fault in an endpoint under load: a share of its capacity, the two streams included."""

    @contextlib.contextmanager
    def loaded(system: System, notes: Notes) -> Iterator[None]:
        streams = system.effort.client_rate + system.effort.raw_rate
        notes["rate"] = max(share * notes["capacity"], streams)
        plan = replace(_flood(system), rate=max(notes["rate"] - streams, 1.0), seconds=LONGEST_S)
        with sending((system.flood, plan)) as loads, break_it(system, notes):
            yield
        [load] = loads
        notes |= {"beside": len(load.status), "beside_lost": int((~load.answered).sum())}

    return loaded


def _flood(system: System) -> LoadPlan:
    bodies = bodies_of(system.testbed.raw, wrapped=True)
    patience_s = PATIENCE_S + system.testbed.deadline_ms / 1e3
    plan = LoadPlan(f"{system.server.ready['http']}{PREDICT}", bodies, CAPACITY_S, warm_up=0)
    return replace(plan, connections=CONNECTIONS, patience_s=patience_s)


@contextlib.contextmanager
def one_asks_for_all(system: System, notes: Notes) -> Iterator[None]:
    """Send requests of one shopper at the rate of all others together."""
    greedy = {**system.testbed.raw[0], "user_id": "greedy"}
    rate = system.effort.client_rate + system.effort.raw_rate
    bodies = bodies_of([greedy], wrapped=True)
    plan = LoadPlan(f"{system.server.ready['http']}{PREDICT}", bodies, LONGEST_S, rate, warm_up=0, keep=True)
    with sending((system.flood, plan)) as loads:
        yield
    [load] = loads
    whole = int((load.answered & ~load.degraded).sum())
    notes |= {"asked": len(load.status), "failed": int((~load.answered).sum()), "whole": whole}


def half_a_body(system: System) -> bytes:
    """Return the beginning of a request whose rest is never sent."""
    [body] = bodies_of(system.testbed.raw[:1], wrapped=False)
    head = f"POST /v1/recommendations HTTP/1.1\r\nHost: drill\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body[: len(body) // 2]


@contextlib.contextmanager
def long_bodies(system: System, notes: Notes) -> Iterator[None]:
    """Let a process send bodies of 80 MB, one after the other."""
    host, port = system.address
    command = [sys.executable, "-P", "-m", "pipelines.drills.callers", host, str(port), PREDICT]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as sender:
        yield
        said, _ = sender.communicate(b"")
    answers = orjson.loads(said)
    notes["long"] = {"refused": answers.pop("413", 0), "otherwise": sum(answers.values())}


def slow_callers(said: Callable[[System], bytes], name: str) -> Break:
    """Return a fault that opens a crowd of connections, which send something, or nothing, and then wait.

    Args:
        said: returns the bytes that each of them sends.
        name: of the note with the number of cut connections and the wait of the last of them.
    """

    @contextlib.contextmanager
    def slow(system: System, notes: Notes) -> Iterator[None]:
        began, crowd = time.monotonic(), []
        with ThreadPoolExecutor(1) as thread, _many_files():
            try:
                for _ in range(system.effort.crowd):
                    crowd.append(socket.create_connection(system.address, timeout=CUT_S))
                    crowd[-1].sendall(said(system))
                cutting = thread.submit(_cut_off, list(crowd), began)
                yield
                notes[name] = cutting.result()
            finally:
                for one in crowd:
                    one.close()

    return slow


@contextlib.contextmanager
def _many_files() -> Iterator[None]:
    """Raise the limit of open files of this process; processes started before keep their limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def _cut_off(crowd: Sequence[socket.socket], began: float, wait_s: float = CUT_S) -> dict[str, Any]:
    """Return how many connections of a crowd the endpoint closes in time, and when it closed the last."""
    left, last = set(crowd), 0.0
    poller = select.poll()
    by_number = {one.fileno(): one for one in crowd}
    for number in by_number:
        poller.register(number, select.POLLIN)
    while left and time.monotonic() - began < wait_s:
        for number, _ in poller.poll(100):
            one = by_number[number]
            with contextlib.suppress(OSError):
                if one.recv(65_536):
                    continue  # a refusal; the end follows
            left.discard(one)
            poller.unregister(number)
            last = time.monotonic() - began
    return {"crowd": len(crowd), "cut": len(crowd) - len(left), "last_s": last}


@contextlib.contextmanager
def service_refuses(system: System, notes: Notes) -> Iterator[None]:
    """Refuse connections at the endpoint's address, and reset the existing ones."""
    system.front.refuse()
    system.front.reset_peer()
    try:
        yield
    finally:
        system.front.listen()


@contextlib.contextmanager
def service_silent(system: System, notes: Notes) -> Iterator[None]:
    """Keep connections to the endpoint and accept new ones, while nothing passes."""
    system.front.frozen = True
    try:
        yield
    finally:
        system.front.heal()


@contextlib.contextmanager
def name_gone(system: System, notes: Notes) -> Iterator[None]:
    """Let a second client call an endpoint whose name this machine's name service does not know."""
    testbed = system.testbed
    plan = LoadPlan(
        *("client+http://recommender.invalid:8080", bodies_of(testbed.asked, False)),
        *(LONGEST_S, system.effort.client_rate),
        warm_up=0,
        patience_s=PATIENCE_S,
        keep=True,
        best_sellers=str(testbed.best_sellers),
        deadline_ms=testbed.deadline_ms,
    )
    # Before: the first call of a process loads the client's code.
    system.flood.run(replace(plan, rate=0.0, connections=1, requests=WARM_UP))
    with sending((system.flood, plan)) as loads:
        yield
    [load] = loads
    took_ms = (load.client_ms - load.late_ms).tolist()
    notes |= {
        "nameless": {
            "asked": len(load.status),
            "failed": int((~load.answered).sum()),
            "degraded": int(load.degraded.sum()),
            "max_ms": max(took_ms, default=None),
        }
    }
