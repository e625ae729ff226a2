"""A running system -> the same with one thing broken, until a block ends; each fault is one function.

A fault notes what only it can see (`Notes`): how long a worker was away, what was refused. It is over when
its block has ended: when what it killed is ready again, what it froze runs on, what it wrote is as before.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import resource
import select
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from feature_repo.aggregates import DAY_S, pack, unpack
from feature_repo.snapshots import USER_TTL_DAYS
from pipelines.bench.load.arms import PREDICT
from pipelines.bench.load.generator import Load, Plan
from pipelines.bench.load.measured_server import processes_of
from pipelines.bench.report import percentiles
from pipelines.drills.system import (
    ESTABLISHED,
    LISTENS,
    System,
    address_of,
    bodies_of,
    bytes_proto,
    files_of,
    sockets_at,
    time_proto,
    wait_for,
)
from serving.schemas import MAX_BASKET
from serving.stores.feast_layout import HISTORY_FIELD, WRITTEN_FIELD, bytes_value

Notes = dict[str, Any]  # what a fault saw; plain JSON types
Break = Callable[[System, Notes], contextlib.AbstractContextManager[None]]

REFUSED = "reco_bundle_updates_total"
RESPONSES = "reco_responses_total"
RANKER_CALLS = "reco_ranker_calls_total"
FAILED_CALLS = (("failed",), ("late",), ("mismatch",))  # others were not made at all
RECORDS = "reco_log_records_total"
SLOW_S, MIDDLING_S, LATE_S = 5.0, 0.2, 0.02  # of the store's answers
ONE_IN = 50  # answers of the store that is slow now and then
HALF_A_REPLY = 7  # bytes
DRIP = (1, 0.01)  # a byte each 10 ms
RESET_EVERY_S = 0.2
CUT_S = 6.0  # how long slow callers watch whether they are cut off
SPINS_PER_CORE = 2  # processes that take the processors away
OVERLOAD, CONNECTIONS = 3.0, 512
SATURATING, CAPACITY_S = 6, 2.0  # connections, and seconds, that find out how much the endpoint can
LONGEST_S = 120.0  # of what is told to stop
PATIENCE_S = 0.5
WARM_UP = 3  # requests at once before those that count: so few that the client's breaker stays closed


# --------------------------------------------------------------------------------------------- store


@contextlib.contextmanager
def store_killed(system: System, notes: Notes) -> Iterator[None]:
    """Kill the store, and start it again with what it had saved."""
    system.store.kill()
    try:
        yield
    finally:
        system.store.start()


@contextlib.contextmanager
def store_frozen(system: System, notes: Notes) -> Iterator[None]:
    """Stop the store where it is (SIGSTOP): connections stand, new ones are taken, nothing is answered."""
    system.store.freeze()
    try:
        yield
    finally:
        system.store.thaw()


def store_late(latency_s: float) -> Break:
    """Return what delays each piece of the store's answers."""
    return _spoiled(latency_s=lambda: latency_s)


def store_late_now_and_then(one_in: int, latency_s: float) -> Break:
    """Return what delays one in so many answers of the store."""
    numbers = itertools.count(1)
    return _spoiled(latency_s=lambda: 0.0 if next(numbers) % one_in else latency_s)


def answers_cut(after_bytes: int) -> Break:
    """Return what closes each connection to the store after so many bytes of its first answer."""
    return _spoiled(limit_bytes=after_bytes)


def answers_drip(size: int, pause_s: float) -> Break:
    """Return what lets the store's answers come in pieces."""
    return _spoiled(drip=(size, pause_s))


def _spoiled(**toxics: Any) -> Break:
    @contextlib.contextmanager
    def spoiled(system: System, notes: Notes) -> Iterator[None]:
        for name, value in toxics.items():
            setattr(system.proxy, name, value)
        try:
            yield
        finally:
            system.proxy.heal()

    return spoiled


@contextlib.contextmanager
def connections_reset(system: System, notes: Notes) -> Iterator[None]:
    """Reset all connections to the store, again and again."""
    with _repeating(system.proxy.reset_peer, RESET_EVERY_S):
        yield


@contextlib.contextmanager
def _repeating(act: Callable[[], None], every_s: float) -> Iterator[None]:
    over = threading.Event()

    def run() -> None:
        while not over.wait(every_s):
            act()

    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(run)
        try:
            yield
        finally:
            over.set()
        running.result()


def note_files(system: System, notes: Notes) -> None:
    """Note how many files the endpoint has open, connections of its callers not counted."""
    callers = sockets_at(system.address[1], ESTABLISHED)
    notes.setdefault("files", []).append(files_of(system.server.process.pid) - callers)


# --------------------------------------------------------------------------------------------- rows


@contextlib.contextmanager
def stream_silent(system: System, notes: Notes) -> Iterator[None]:
    """Let the stream's heartbeat stand still."""
    assert system.pulse is not None
    system.pulse.silent = True
    try:
        yield
    finally:
        system.pulse.silent = False


@contextlib.contextmanager
def rows_of_long_ago(system: System, notes: Notes) -> Iterator[None]:
    """Let the rows of the client's shoppers say that they are older than a row may be."""

    def aged(row: Mapping[bytes, bytes], number: int) -> dict[bytes, bytes]:
        return {WRITTEN_FIELD: time_proto(time.time() - 20 * USER_TTL_DAYS * DAY_S)}

    with _rewritten(system, system.ground.asked, aged):
        yield


@contextlib.contextmanager
def rows_poisoned(system: System, notes: Notes) -> Iterator[None]:
    """Write rows that no stream would write for those who ask without the client, each kind in turn."""
    with _rewritten(system, system.ground.raw, poisoned):
        yield


def poisoned(row: Mapping[bytes, bytes], number: int) -> dict[bytes, bytes]:
    """Return what stands in a user's row instead, the kinds of poison taking turns."""
    packed = bytes_value(row[HISTORY_FIELD])
    kinds: Sequence[Callable[[], bytes]] = (
        lambda: bytes_proto(packed[: len(packed) // 2]),
        lambda: b"\xff" * 40,  # no value of Feast's
        lambda: bytes_proto(b"\x63\x00" + packed[2:]),  # of a format that nobody knows
        lambda: bytes_proto(_with_money(packed, np.nan)),
        lambda: bytes_proto(_with_money(packed, np.inf)),
        lambda: bytes_proto(_with_money(packed, 1e30)),
    )
    return {HISTORY_FIELD: kinds[number % len(kinds)]()}


def _with_money(packed: bytes, amount: float) -> bytes:
    events = unpack(packed)
    money = np.full(len(events), amount, np.float32)
    return pack(replace(events, paid=money, discount=money))


@contextlib.contextmanager
def _rewritten(
    system: System,
    requests: Sequence[Mapping[str, Any]],
    write: Callable[[Mapping[bytes, bytes], int], dict[bytes, bytes]],
) -> Iterator[None]:
    """Write other fields into the rows of those who ask; they get their own again."""
    users = dict.fromkeys(str(request["user_id"]) for request in requests)
    rows = {user: row for user in users if (row := system.store.row(user))}
    for number, (user, row) in enumerate(rows.items()):
        system.store.write(user, write(row, number))
    try:
        yield
    finally:
        for user, row in rows.items():
            system.store.write(user, row)


# --------------------------------------------------------------------------------------- processes


@contextlib.contextmanager
def ranker_killed(system: System, notes: Notes) -> Iterator[None]:
    """Kill the ranker that the endpoint asks, and start it again; it is over when that one is ready."""
    assert system.ranker is not None
    before = system.server.samples(RANKER_CALLS)
    system.ranker.kill()
    try:
        yield
        after = system.server.samples(RANKER_CALLS)
        notes["failed_calls"] = sum(after.get(one, 0.0) - before.get(one, 0.0) for one in FAILED_CALLS)
    finally:
        system.ranker.start()


@contextlib.contextmanager
def worker_killed(system: System, notes: Notes) -> Iterator[None]:
    """Kill one of the endpoint's processes; it is over when all of them answer again."""
    _, port = address_of(str(system.server.ready["grpc"]))

    def ready() -> int:
        return sockets_at(port, LISTENS)  # each process opens gRPC's port for itself when it is ready

    all_of_them = ready()
    processes_of(system.server.process.pid)[1].kill()
    gone_s = wait_for(lambda: ready() < all_of_them, "a killed process is gone")
    with ThreadPoolExecutor(1) as thread:
        coming = thread.submit(wait_for, lambda: ready() == all_of_them, "a killed process is back")
        yield
        notes.setdefault("back_s", []).append(gone_s + coming.result())


def note_answers(system: System, notes: Notes) -> None:
    """Note how many answers the endpoint has given."""
    notes.setdefault("answers", []).append(sum(system.server.samples(RESPONSES).values()))


@contextlib.contextmanager
def processors_taken(system: System, notes: Notes) -> Iterator[None]:
    """Let others compute without end, more of them than there are processors."""
    count = SPINS_PER_CORE * (os.cpu_count() or 1)
    spins = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for spin in spins:
            spin.kill()
            spin.wait()


@contextlib.contextmanager
def disk_full(system: System, notes: Notes) -> Iterator[None]:
    """Let no file of the endpoint's grow any more, the log that it writes to stderr included.

    A limit of its processes (RLIMIT_FSIZE) takes no rights and reaches nobody else. Writes fail as on a full
    disk, with another number of the error (EFBIG, not ENOSPC): our code does not tell the two apart.
    """
    family = [process.pid for process in processes_of(system.server.process.pid)]
    before = {pid: resource.prlimit(pid, resource.RLIMIT_FSIZE) for pid in family}
    dropped = system.sample(RECORDS, "dropped")
    for pid, (_, hard) in before.items():
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, hard))
    try:
        yield
        notes["dropped"] = system.sample(RECORDS, "dropped") - dropped
    finally:
        for pid, limits in before.items():
            resource.prlimit(pid, resource.RLIMIT_FSIZE, limits)
    notes["written_then"] = system.sample(RECORDS, "written")


def note_written(system: System, notes: Notes) -> None:
    """Note how many records of the log were written since the disk took any again."""
    if "written_then" in notes:
        notes["written_after"] = system.sample(RECORDS, "written") - notes.pop("written_then")


def clock_off(seconds: float) -> Break:
    """Return what sets the endpoint's clock off by so much."""

    @contextlib.contextmanager
    def off(system: System, notes: Notes) -> Iterator[None]:
        assert system.clock is not None
        system.clock.jump(seconds)
        try:
            yield
        finally:
            system.clock.jump(0.0)

    return off


# ------------------------------------------------------------------------------------------ bundles


def another_champion(number: int) -> Break:
    """Return what promotes one of the home's two bundles and waits until it answers."""

    @contextlib.contextmanager
    def another(system: System, notes: Notes) -> Iterator[None]:
        known, began = len(system.server.events("bundle")), time.monotonic()
        system.champion(system.champions[number])
        wait_for(lambda: len(system.server.events("bundle")) > known, "the other bundle answers")
        notes.setdefault("swap_s", []).append(time.monotonic() - began)
        yield

    return another


def broken_champion(spoil: Callable[[Path], None]) -> Break:
    """Return what promotes a bundle that is broken, and waits until it is refused."""

    @contextlib.contextmanager
    def broken(system: System, notes: Notes) -> Iterator[None]:
        good, other = system.champions
        place = system.home / "bundles" / f"broken-{time.monotonic_ns()}"
        shutil.copytree(system.home / other.path, place)
        spoil(place)
        refused, began = system.sample(REFUSED, "refused"), time.monotonic()
        system.champion(replace(other, path=f"bundles/{place.name}"))
        try:
            wait_for(lambda: system.sample(REFUSED, "refused") > refused, "the broken bundle is refused")
            notes.setdefault("refused_s", []).append(time.monotonic() - began)
            yield
        finally:
            system.champion(good)
            shutil.rmtree(place)

    return broken


def flip_a_byte(bundle: Path) -> None:
    """Change one byte in the middle of the ranker: it still loads, and scores otherwise."""
    file = bundle / "ranker.onnx"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 0xFF
    file.write_bytes(content)


def cut_in_half(bundle: Path) -> None:
    """Leave half of the index, as a copy that was broken off does."""
    file = bundle / "index.faiss"
    os.truncate(file, file.stat().st_size // 2)


# ------------------------------------------------------------------------------------------ callers


def note_refusals(system: System, notes: Notes) -> None:
    """Note how long a crowd waits for the least there is to answer: no JSON is refused. Nobody else asks."""
    notes["refusals_p99_ms"] = percentiles(_at_once(system, [b"{"]).client_ms)["p99"]


@contextlib.contextmanager
def herd_for_one(system: System, notes: Notes) -> Iterator[None]:
    """Let a crowd ask at once for one list that nobody has asked for before."""
    notes["one_list"] = _herd(system, _cold(system, 1))
    yield


@contextlib.contextmanager
def herd_for_many(system: System, notes: Notes) -> Iterator[None]:
    """Let a crowd ask at once for many lists that nobody has asked for before, two for each."""
    notes["many_lists"] = _herd(system, _cold(system, 1 + system.effort.herd // 2)[1:])
    yield


def _cold(system: System, count: int) -> list[bytes]:
    """Return questions of which nobody has asked any before."""
    asked = itertools.cycle(system.ground.asked)
    cold = []
    for number in range(count):
        one = dict(next(asked))
        one.pop("user_id", None)  # a known shopper's list is his own: no crowd asks for it
        # How many items of a basket nobody sells is part of the question.
        one["basket"] = [*one["basket"], *(f"unheard-of-{line}" for line in range(number + 1))][-MAX_BASKET:]
        cold.append(one)
    return bodies_of(cold, wrapped=True)


def _herd(system: System, bodies: Sequence[bytes]) -> dict[str, Any]:
    """Ask bodies, all at once and again until there are as many as the crowd; return what came of it."""
    load = _at_once(system, bodies)
    computed = Counter(number % len(bodies) for number, one in enumerate(load.answers) if was_computed(one))
    return {
        "lists": len(bodies),
        "asked": len(load.status),
        "failed": int((~load.answered).sum()),
        "whole": int((load.answered & ~load.degraded).sum()),
        "computed_most": max(computed.values(), default=0),
        "p99_ms": percentiles(load.client_ms)["p99"],
    }


def _at_once(system: System, bodies: Sequence[bytes]) -> Load:
    herd = system.effort.herd
    plan = Plan(
        f"{system.server.ready['http']}{PREDICT}",
        system.flood.bodies(bodies),
        LONGEST_S,
        connections=herd,
        requests=herd,
        warm_up=0,
        keep=True,
    )
    return system.flood.run(plan)


def was_computed(answer: bytes) -> bool:
    """Say whether the list in an answer of V1 was computed for it: others name no ranking among their stages.

    One that lacks the shopper's row is another list.
    """
    [found] = orjson.loads(answer or b"{}").get("predictions", [{"stage_ms": (), "degraded": False}])
    return "ranking" in found["stage_ms"] and not found["degraded"]


def note_capacity(system: System, notes: Notes) -> None:
    """Note how many whole answers a second the endpoint gives at most; nobody else asks."""
    full = system.flood.run(replace(_flood(system), connections=SATURATING))
    notes["capacity"] = float((full.answered & ~full.degraded).sum() / CAPACITY_S)


@contextlib.contextmanager
def overload(system: System, notes: Notes) -> Iterator[None]:
    """Ask three times what the endpoint can in prefetches, beside the checkouts."""
    flood = replace(_flood(system), rate=OVERLOAD * max(notes["capacity"], 1.0), prefetch_ratio=1.0)
    with _asking(system, flood) as asked:
        yield
    [load] = asked
    refused_ms = (load.client_ms - load.late_ms)[load.shed]  # from the call: this machine sends late, too
    notes |= {
        "prefetches": len(load.status),
        "shed": int(load.shed.sum()),
        "shed_p50_ms": float(np.median(refused_ms)) if len(refused_ms) else None,
        "not_refused_but_failed": int((~load.answered & (load.status != 429)).sum()),
        "good_per_s": load.summary(system.ground.deadline_ms)["good_per_s"],
    }


def _flood(system: System) -> Plan:
    bodies = system.flood.bodies(bodies_of(system.ground.raw, wrapped=True))
    patience_s = PATIENCE_S + system.ground.deadline_ms / 1e3
    plan = Plan(f"{system.server.ready['http']}{PREDICT}", bodies, CAPACITY_S, warm_up=0)
    return replace(plan, connections=CONNECTIONS, patience_s=patience_s)


@contextlib.contextmanager
def _asking(system: System, plan: Plan) -> Iterator[list[Load]]:
    """Ask beside the two that ask all the time, until the block ends; what came of it is there after it."""
    over = system.ground.folder / f"over-{time.monotonic_ns()}"
    found: list[Load] = []
    with ThreadPoolExecutor(1) as thread:
        asking = thread.submit(system.flood.run, replace(plan, seconds=LONGEST_S, stop=str(over)))
        try:
            yield found
        finally:
            over.touch()
        found.append(asking.result())


@contextlib.contextmanager
def one_asks_for_all(system: System, notes: Notes) -> Iterator[None]:
    """Let one shopper ask as often as all others together."""
    greedy = {**system.ground.raw[0], "user_id": "greedy"}
    rate = system.effort.client_rate + system.effort.raw_rate
    bodies = system.flood.bodies(bodies_of([greedy], wrapped=True))
    plan = Plan(f"{system.server.ready['http']}{PREDICT}", bodies, LONGEST_S, rate, warm_up=0, keep=True)
    with _asking(system, plan) as asked:
        yield
    [load] = asked
    whole = int((load.answered & ~load.degraded).sum())
    notes |= {"asked": len(load.status), "failed": int((~load.answered).sum()), "whole": whole}


def half_a_body(system: System) -> bytes:
    """Return the beginning of a request whose rest never comes."""
    [body] = bodies_of(system.ground.raw[:1], wrapped=False)
    head = f"POST /v1/recommendations HTTP/1.1\r\nHost: drill\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body[: len(body) // 2]


@contextlib.contextmanager
def long_bodies(system: System, notes: Notes) -> Iterator[None]:
    """Let somebody send bodies of 80 MB, one after the other."""
    host, port = system.address
    command = [sys.executable, "-m", "pipelines.drills.callers", host, str(port), PREDICT]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as sender:
        yield
        said, _ = sender.communicate(b"")
    answers = orjson.loads(said)
    notes["long"] = {"refused": answers.pop("413", 0), "otherwise": sum(answers.values())}


def slow_callers(said: Callable[[System], bytes], name: str) -> Break:
    """Return what opens a crowd of connections that say something, or nothing, and then wait.

    Args:
        said: what each of them sends.
        name: under which is noted how many were cut off, and how long the last of those waited.
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
    """Let this process open as many files as it may; those that it started before keep their own limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def _cut_off(crowd: Sequence[socket.socket], began: float) -> dict[str, Any]:
    """Return how many of a crowd the endpoint hangs up on, and when it had done so with the last of them."""
    left, last = set(crowd), 0.0
    poller = select.poll()
    by_number = {one.fileno(): one for one in crowd}
    for number in by_number:
        poller.register(number, select.POLLIN)
    while left and time.monotonic() - began < CUT_S:
        for number, _ in poller.poll(100):
            one = by_number[number]
            with contextlib.suppress(OSError):
                if one.recv(65_536):
                    continue  # a refusal; the end comes behind it
            left.discard(one)
            poller.unregister(number)
            last = time.monotonic() - began
    return {"crowd": len(crowd), "cut": len(crowd) - len(left), "last_s": last}


# ------------------------------------------------------------------------------------------- service


@contextlib.contextmanager
def service_refuses(system: System, notes: Notes) -> Iterator[None]:
    """Let nobody listen where the endpoint was, and reset who is connected."""
    system.front.refuse()
    system.front.reset_peer()
    try:
        yield
    finally:
        system.front.listen()


@contextlib.contextmanager
def service_silent(system: System, notes: Notes) -> Iterator[None]:
    """Let connections to the endpoint stand, and new ones be taken, while nothing passes."""
    system.front.frozen = True
    try:
        yield
    finally:
        system.front.heal()


@contextlib.contextmanager
def name_gone(system: System, notes: Notes) -> Iterator[None]:
    """Let a second client ask an endpoint whose name is not known to this machine's name service."""
    ground = system.ground
    plan = Plan(
        *("client+http://recommender.invalid:8080", system.flood.bodies(bodies_of(ground.asked, False))),
        *(LONGEST_S, system.effort.client_rate),
        warm_up=0,
        patience_s=PATIENCE_S,
        keep=True,
        best_sellers=str(ground.best_sellers),
        deadline_ms=ground.deadline_ms,
    )
    # Before: the first call of a process loads the client's code.
    system.flood.run(replace(plan, rate=0.0, connections=1, requests=WARM_UP))
    with _asking(system, plan) as asked:
        yield
    [load] = asked
    took_ms = (load.client_ms - load.late_ms).tolist()
    notes |= {
        "nameless": {
            "asked": len(load.status),
            "failed": int((~load.answered).sum()),
            "degraded": int(load.degraded.sum()),
            "max_ms": max(took_ms, default=None),
        }
    }
