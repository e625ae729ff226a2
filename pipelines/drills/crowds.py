"""A running system -> the same under too many, too slow or too many identical requests, or unreachable.

The faults of the callers' side, as `pipelines.drills.faults` has those of store, rows, processes and bundles.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import resource
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np

from pipelines.bench.load.arms import PREDICT
from pipelines.bench.load.generator import LoadPlan, bodies_of, response_of, sending
from pipelines.bench.report import percentiles
from pipelines.drills.faults import Break, Notes, between
from pipelines.drills.system import WARM_UP, System, client_plan
from serving.schemas import MAX_BASKET

CUT_S = 6.0  # how long the slow callers wait to be cut off
OVERLOAD, CONNECTIONS = 3.0, 512
SATURATING, CAPACITY_S = 6, 2.0  # connections and seconds that measure the capacity of the endpoint
LONGEST_S = 120.0  # of a load that is stopped earlier
PATIENCE_S = 0.5
COMPUTED = "reco_cache_computed_total"


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
    return bodies_of(cold)


def _herd(system: System, bodies: Sequence[bytes]) -> dict[str, Any]:
    """Send the bodies at once, repeated to the size of the crowd; return the figures."""
    before, crowd = system.sample(COMPUTED), system.effort.herd
    plan = replace(_plan(system, bodies), connections=crowd, requests=crowd, keep=True)
    load = system.flood.run(plan)
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


def was_computed(answer: bytes) -> bool:
    """Say whether the list in an answer of V1 was computed for it: others have no ranking among their stages.

    A list without the shopper's row is another list.
    """
    found = response_of(answer or b"{}")
    return "ranking" in found.get("stage_ms", ()) and not found["degraded"]


def note_capacity(system: System, notes: Notes) -> None:
    """Note how many whole answers a second the endpoint gives at most, without other load."""
    full = system.flood.run(replace(_flood(system), seconds=CAPACITY_S, connections=SATURATING))
    notes["capacity"] = float((full.answered & ~full.degraded).sum() / CAPACITY_S)


@contextlib.contextmanager
def overload(system: System, notes: Notes) -> Iterator[None]:
    """Send prefetches at three times the capacity of the endpoint, beside the checkouts."""
    flood = replace(_flood(system), rate=OVERLOAD * max(notes["capacity"], 1.0), prefetch=True)
    with sending((system.flood, flood)) as loads:
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
        plan = replace(_flood(system), rate=max(notes["rate"] - streams, 1.0))
        with sending((system.flood, plan)) as loads, break_it(system, notes):
            yield
        [load] = loads
        notes |= {"beside": len(load.status), "beside_lost": int((~load.answered).sum())}

    return loaded


def _flood(system: System) -> LoadPlan:
    patience_s = PATIENCE_S + system.testbed.deadline_ms / 1e3
    plan = _plan(system, bodies_of(system.testbed.raw))
    return replace(plan, connections=CONNECTIONS, patience_s=patience_s)


def _plan(system: System, bodies: Sequence[bytes]) -> LoadPlan:
    url = f"{system.server.ready['http']}{PREDICT}"
    return LoadPlan(url, bodies, LONGEST_S, warm_up=0)


@contextlib.contextmanager
def one_asks_for_all(system: System, notes: Notes) -> Iterator[None]:
    """Send requests of one shopper at the rate of all others together."""
    greedy = {**system.testbed.raw[0], "user_id": "greedy"}
    rate = system.effort.client_rate + system.effort.raw_rate
    plan = replace(_plan(system, bodies_of([greedy])), rate=rate)
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


def slow_callers(said: Callable[[System], bytes], name: str) -> Break:
    """Return a fault that opens a crowd of connections, which send something, or nothing, and then wait.

    Args:
        said: returns the bytes that each of them sends.
        name: of the note with the number of cut connections and the wait of the last of them.
    """

    @contextlib.contextmanager
    def slow(system: System, notes: Notes) -> Iterator[None]:
        _, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most_files, most_files))  # of this process, from now on
        crowd = _cut_off(system.address, said(system), system.effort.crowd)
        with ThreadPoolExecutor(1) as thread:
            cutting = thread.submit(asyncio.run, crowd)
            yield
            notes[name] = cutting.result()

    return slow


async def _cut_off(
    address: tuple[str, int], said: bytes, count: int, wait_s: float = CUT_S
) -> dict[str, Any]:
    """Open connections; return how many the endpoint leaves open, and after how long it closed the last."""
    began = time.monotonic()

    async def closed_s() -> float:
        reader, writer = await asyncio.open_connection(*address)
        with contextlib.closing(writer), contextlib.suppress(ConnectionError):
            writer.write(said)
            await reader.read()  # a refusal may come before the end
        return time.monotonic() - began

    closed, left = await asyncio.wait(
        [asyncio.ensure_future(closed_s()) for _ in range(count)], timeout=wait_s
    )
    last_s = max((one.result() for one in closed), default=0.0)
    return {"crowd": count, "left": len(left), "last_s": last_s}


def _refuse(system: System) -> None:
    system.front.refuse()
    system.front.reset_peer()


service_refuses = between(_refuse, lambda system: system.front.listen())
# Connections stay, and new ones are accepted, while nothing passes.
service_silent = between(lambda system: system.front.freeze(), lambda system: system.front.heal())


@contextlib.contextmanager
def name_gone(system: System, notes: Notes) -> Iterator[None]:
    """Let a second client call an endpoint whose name this machine's name service does not know."""
    plan = client_plan(system.testbed, "http://recommender.invalid:8080", system.effort.client_rate)
    plan = replace(plan, warm_up=0, patience_s=PATIENCE_S)
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
