"""A running system -> the same with one part broken, until a block ends; each fault is one function.

A fault notes the figures that only it can see (`Notes`), such as the time without a worker. It is over when
its block has ended: a killed part is ready again, a frozen one runs on, written data is as before.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import resource
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from feature_repo.aggregates import DAY_S, pack, unpack
from feature_repo.snapshots import USER_TTL_DAYS
from pipelines.bench.load.measured_server import processes_of
from pipelines.bench.load.waiting import NotReached, repeating, wait_for
from pipelines.drills.system import (
    ESTABLISHED,
    LISTENING,
    SCRAPE_S,
    System,
    address_of,
    bytes_proto,
    sockets_of,
    time_proto,
)
from serving.release.champion import write_champion
from serving.stores.online_features import HISTORY_FIELD, WRITTEN_FIELD, bytes_value

Notes = dict[str, Any]  # the figures of a fault; plain JSON types
Break = Callable[[System, Notes], contextlib.AbstractContextManager[None]]

UPDATES = "reco_bundle_updates_total"
RESPONSES = "reco_responses_total"
RANKER_CALLS = "reco_ranker_calls_total"
FAILED_CALLS = (("failed",), ("late",), ("mismatch",))  # other calls were not made
RECORDS = "reco_log_records_total"
CLOCK = "reco_champion_read_timestamp_seconds"  # the endpoint's own time, a second ago at most
RESET_EVERY_S = 0.2
KILL_EVERY_S, LOOK_EVERY_S = 2.0, 0.1
SPINS_PER_CORE = 2  # processes that take the processors away


def between(begin: Callable[[System], object], end: Callable[[System], object]) -> Break:
    """Return a fault that one act begins and another ends."""

    @contextlib.contextmanager
    def broken(system: System, notes: Notes) -> Iterator[None]:
        begin(system)
        try:
            yield
        finally:
            end(system)

    return broken


store_killed = between(lambda system: system.store.kill(), lambda system: system.store.start())
# SIGSTOP: connections stay, new ones are accepted, nothing is answered.
store_frozen = between(lambda system: system.store.freeze(), lambda system: system.store.thaw())
stream_silent = between(lambda system: system.silent.set(), lambda system: system.silent.clear())


def store_late(latency_s: float) -> Break:
    """Return a fault that delays each piece of the store's answers."""
    return _spoiled(latency_s=lambda: latency_s)


def store_late_now_and_then(one_in: int, latency_s: float) -> Break:
    """Return a fault that delays one in so many answers of the store."""
    numbers = itertools.count(1)
    return _spoiled(latency_s=lambda: 0.0 if next(numbers) % one_in else latency_s)


def answers_cut(after_bytes: int) -> Break:
    """Return a fault that closes each connection to the store after so many bytes of its first answer."""
    return _spoiled(limit_bytes=after_bytes)


def answers_drip(size: int, pause_s: float) -> Break:
    """Return a fault that lets the store's answers come in pieces."""
    return _spoiled(drip=(size, pause_s))


def _spoiled(**toxics: Any) -> Break:
    return between(lambda system: vars(system.proxy).update(toxics), lambda system: system.proxy.heal())


@contextlib.contextmanager
def connections_reset(system: System, notes: Notes) -> Iterator[None]:
    """Reset all connections to the store, again and again; the endpoint opens others."""
    before = system.proxy.accepted
    with repeating(system.proxy.reset_peer, RESET_EVERY_S):
        yield
    notes["opened_again"] = system.proxy.accepted - before


def open_files(system: System) -> float:
    """Return how many files the endpoint has open, connections of its callers not counted."""
    files = psutil.Process(system.server.process.pid).num_fds()
    return float(files - sockets_of(system.address[1], ESTABLISHED))


def poisoned(user: str, row: Mapping[bytes, bytes], number: int) -> dict[bytes, bytes]:
    """Return the poisoned fields of a user's row, the kinds of poison in turn."""
    packed = bytes_value(row[HISTORY_FIELD])
    kinds: Sequence[Callable[[], bytes]] = (
        lambda: bytes_proto(packed[: len(packed) // 2]),
        lambda: b"\xff" * 40,  # no value of Feast's
        lambda: bytes_proto(b"\x63\x00" + packed[2:]),  # of an unknown format
        lambda: bytes_proto(_with_money(user, packed, np.nan)),
        lambda: bytes_proto(_with_money(user, packed, np.inf)),
        lambda: bytes_proto(_with_money(user, packed, 1e30)),
    )
    return {HISTORY_FIELD: kinds[number % len(kinds)]()}


def _with_money(user: str, packed: bytes, amount: float) -> bytes:
    events = unpack(packed)
    money = np.full(len(events), amount, np.float32)
    return pack(replace(events, paid=money, discount=money), user)


def _aged(user: str, row: Mapping[bytes, bytes], number: int) -> dict[bytes, bytes]:
    """Return the field of a row that is older than a row may be."""
    return {WRITTEN_FIELD: time_proto(time.time() - 20 * USER_TTL_DAYS * DAY_S)}


def _rewritten(
    requests: Callable[[System], Sequence[Mapping[str, Any]]],
    write: Callable[[str, Mapping[bytes, bytes], int], dict[bytes, bytes]],
) -> Break:
    """Return a fault that writes other fields into the rows of the requests' shoppers."""

    @contextlib.contextmanager
    def rewritten(system: System, notes: Notes) -> Iterator[None]:
        users = dict.fromkeys(str(request["user_id"]) for request in requests(system))
        rows = {user: row for user in users if (row := system.store.row(user))}
        for number, (user, row) in enumerate(rows.items()):
            system.store.write(user, write(user, row, number))
        try:
            yield
        finally:
            for user, row in rows.items():
                system.store.write(user, row)

    return rewritten


rows_of_long_ago = _rewritten(lambda system: system.testbed.asked, _aged)
rows_poisoned = _rewritten(lambda system: system.testbed.raw, poisoned)


@contextlib.contextmanager
def ranker_killed(system: System, notes: Notes) -> Iterator[None]:
    """Kill the ranker that the endpoint asks, and start it again; it is over when that one is ready."""
    assert system.ranker
    assert system.start_ranker
    before = system.server.samples(RANKER_CALLS)
    system.ranker.process.kill()
    system.ranker.process.wait()
    try:
        yield
        after = system.server.samples(RANKER_CALLS)
        notes["failed_calls"] = sum(after.get(one, 0.0) - before.get(one, 0.0) for one in FAILED_CALLS)
    finally:
        system.ranker = system.start_ranker()


@contextlib.contextmanager
def worker_killed(system: System, notes: Notes) -> Iterator[None]:
    """Kill one of the endpoint's processes; it is over when all of them answer again."""
    all_of_them = _ready(system)
    _workers(system)[0].kill()
    gone_s = wait_for(lambda: _ready(system) < all_of_them, "a killed process is gone")
    with ThreadPoolExecutor(1) as thread:
        coming = thread.submit(wait_for, lambda: _ready(system) == all_of_them, "a killed process is back")
        yield
        notes.setdefault("back_s", []).append(gone_s + coming.result())


def _workers(system: System) -> list[psutil.Process]:
    """Return the processes that answer, or start: the first child has forked them."""
    return processes_of(system.server.process.pid)[2:]


def _ready(system: System) -> int:
    """Return how many processes of the endpoint are ready: each opens gRPC's port for itself then."""
    _, port = address_of(str(system.server.ready["grpc"]))
    return sockets_of(port, LISTENING)


@contextlib.contextmanager
def workers_killed(system: System, notes: Notes) -> Iterator[None]:
    """Kill one of the endpoint's processes again and again, whether it is ready or starts.

    It is over when all of them answer again. It notes the longest time with fewer than all, and without any.
    """
    chosen, all_of_them = random.Random(0), _ready(system)
    kills, looks = itertools.count(), list[tuple[float, int]]()

    def kill() -> None:
        if workers := _workers(system):
            chosen.choice(workers).kill()
            notes["kills"] = next(kills) + 1

    def look() -> None:
        looks.append((time.monotonic(), _ready(system)))

    with repeating(look, LOOK_EVERY_S):
        with repeating(kill, KILL_EVERY_S):
            yield
        wait_for(lambda: _ready(system) == all_of_them, "the killed processes are back")
    notes["longest_short_s"] = longest_below(all_of_them, looks)
    notes["longest_empty_s"] = longest_below(1, looks)


def longest_below(most: int, looks: Sequence[tuple[float, int]]) -> float:
    """Return the longest time, in seconds, with fewer ready processes; `looks` are times and their number."""
    runs = itertools.groupby(itertools.pairwise(looks), lambda pair: pair[0][1] < most)
    below = [sum(end[0] - start[0] for start, end in run) for is_below, run in runs if is_below]
    return max(below, default=0.0)


def answers_given(system: System) -> float:
    """Return how many answers the endpoint has given."""
    return sum(system.server.samples(RESPONSES).values())


@contextlib.contextmanager
def processors_taken(system: System, notes: Notes) -> Iterator[None]:
    """Run endless computations, more of them than there are processors; note their share of these."""
    cores, began = os.cpu_count() or 1, time.monotonic()
    spins = [psutil.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(SPINS_PER_CORE * cores)]
    try:
        yield
        spent_s = sum(sum(spin.cpu_times()[:2]) for spin in spins)
        notes["taken"] = 100 * spent_s / (time.monotonic() - began) / cores
    finally:
        for spin in spins:
            spin.kill()
            spin.wait()


@contextlib.contextmanager
def disk_full(system: System, notes: Notes) -> Iterator[None]:
    """Let no file of the endpoint's grow any more, the log that it writes to stderr included.

    A limit of its processes (RLIMIT_FSIZE) takes no rights and reaches no other process. Writes fail as on a
    full disk, with another error number (EFBIG, not ENOSPC): our code treats both alike.
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
    written = system.sample(RECORDS, "written")
    with contextlib.suppress(NotReached):  # then the figure is missing, and missed
        notes["written_again_s"] = wait_for(
            lambda: system.sample(RECORDS, "written") > written, "the log is written again", look_s=SCRAPE_S
        )


def clock_off(seconds: float) -> Break:
    """Return a fault that sets the endpoint's clock off by so much, and notes by how much it was."""

    @contextlib.contextmanager
    def off(system: System, notes: Notes) -> Iterator[None]:
        assert system.clock is not None
        system.clock.jump(seconds)
        try:
            yield
            notes.setdefault("clock_s", {})[f"{seconds:g}"] = system.sample(CLOCK) - time.time()
        finally:
            system.clock.jump(0.0)

    return off


def another_champion(number: int) -> Break:
    """Return a fault that promotes one of the home's two bundles and waits until it answers."""

    @contextlib.contextmanager
    def another(system: System, notes: Notes) -> Iterator[None]:
        swapped, began = system.sample(UPDATES, "done"), time.monotonic()
        write_champion(system.home, system.champions[number])
        wait_for(
            lambda: system.sample(UPDATES, "done") > swapped, "the other bundle answers", look_s=SCRAPE_S
        )
        notes.setdefault("swap_s", []).append(time.monotonic() - began)
        yield

    return another


def broken_champion(spoil: Callable[[Path], None]) -> Break:
    """Return a fault that promotes a bundle that is broken, and waits until it is refused."""

    @contextlib.contextmanager
    def broken(system: System, notes: Notes) -> Iterator[None]:
        good, other = system.champions
        place = system.home / "bundles" / f"broken-{time.monotonic_ns()}"
        shutil.copytree(system.home / other.path, place)
        spoil(place)
        refused, began = system.sample(UPDATES, "refused"), time.monotonic()
        write_champion(system.home, replace(other, path=f"bundles/{place.name}"))
        try:
            wait_for(
                lambda: system.sample(UPDATES, "refused") > refused,
                "the broken bundle is refused",
                look_s=SCRAPE_S,
            )
            notes.setdefault("refused_s", []).append(time.monotonic() - began)
            yield
        finally:
            write_champion(system.home, good)
            shutil.rmtree(place)

    return broken


def flip_a_byte(bundle: Path) -> None:
    """Change one byte in the middle of the ranker: it still loads, and scores otherwise."""
    file = bundle / "ranker.onnx"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 0xFF
    file.write_bytes(content)


def cut_in_half(bundle: Path) -> None:
    """Leave half of the index, like an interrupted copy."""
    file = bundle / "index.faiss"
    os.truncate(file, file.stat().st_size // 2)
