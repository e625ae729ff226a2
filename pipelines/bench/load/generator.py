"""A plan of requests -> when each was due, asked and answered: a client in a process of its own.

Open loop: requests are sent at the times of a Poisson process whatever the answers do, and a latency counts
from the time its request was due. So a stalled server is charged for every waiting request. Without that, the
very requests that would have met the stall are not sent ("coordinated omission", Tene, How NOT to Measure
Latency, 2013). Every sample is kept, so that percentiles are exact.

    with load_generator() as generator:
        load = generator.run(LoadPlan(url, bodies, seconds=5, rate=200))
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import os
import selectors
import tempfile
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from pipelines.bench.load.connections import OK, UNANSWERED, ConnectionPool, Exchange
from pipelines.bench.report import percentiles

REFUSED = 429, 503
WARM_UP_CONNECTIONS = 16  # opened before anything is measured
WARM_UP_S = 60.0  # no longer is worth the wait
PAUSE_S = 0.05  # from the warm-up to the first request that counts
_DEGRADED = (b'"degraded":true', b'"degraded": true')  # the marks of a degraded answer


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """The requests for one server, and their times."""

    # http://HOST:PORT/PATH, or client+http://HOST:PORT, the project's own
    # client: its bodies are request lines, and its answers are kept as the JSON of a response.
    url: str
    bodies: Sequence[bytes]  # sent in turn
    seconds: float
    rate: float = 0.0  # requests per second; 0: closed loop, a connection sends again after its answer
    connections: int = 64  # at most; the wait for a free connection is part of the latency
    requests: int = 0  # the closed loop ends after so many; 0: by the clock alone
    warm_up: int = 50  # requests sent before, not counted: the bodies before the first
    start: int = 0  # number of the first body that counts
    seed: int = 0  # of the times
    patience_s: float = 2.0  # for missing answers, after the last request was due
    keep: bool = False  # return the answers, too
    prefetch: bool = False  # over HTTP: its requests are prefetches
    stop: str = ""  # a file: once it exists, an open loop has no more requests due
    best_sellers: str = ""  # of the client: the file that `write_best_sellers` wrote
    deadline_ms: float = 50.0  # of the client's calls


@dataclass(frozen=True)
class Load:
    """The outcome of each request, in the order in which they were due."""

    due_s: np.ndarray  # (n,) after the first moment of the run
    client_ms: np.ndarray  # (n,) from due to the answer's last byte, or to its loss, or to the end
    late_ms: np.ndarray  # (n,) delay of the generator itself; part of `client_ms`
    status: np.ndarray  # (n,) HTTP's, or UNANSWERED
    degraded: np.ndarray  # (n,) the answer says that it is degraded
    answers: list[bytes] = field(default_factory=list)  # with `LoadPlan.keep`
    began_s: float = 0.0  # the first moment, by the machine's monotonic clock

    @property
    def answered(self) -> np.ndarray:
        """Which requests got an answer with status 200, (n,) bool."""
        found: np.ndarray = self.status == OK
        return found

    @property
    def waits_ms(self) -> np.ndarray:
        """Return the waits of answered requests, and of unanswered ones the time until the end.

        A connection that is refused or reset ends its request at once: that time would flatter. So would
        refused and failed requests, which are left out.
        """
        lost, due_ms = self.status == UNANSWERED, self.due_s * 1e3
        end_ms = (due_ms + self.client_ms).max(initial=0.0)
        waits: np.ndarray = np.where(lost, end_ms - due_ms, self.client_ms)[self.answered | lost]
        return waits

    def responses(self) -> list[tuple[float, dict[str, Any]]]:
        """Return `client_ms` and the response of each request, an empty one if it was not answered."""
        rows = zip(self.client_ms.tolist(), self.answered, self.answers, strict=True)
        return [(ms, response_of(answer) if ok else {}) for ms, ok, answer in rows]

    def summary(self, deadline_ms: float) -> dict[str, Any]:
        """Return counts, rates and percentiles.

        An answer is good if it came within the deadline and is not degraded. Degraded answers in time are
        `degraded_in_time`. Rates are over the time in which requests were due, not until the last answer.
        One request has no rate.

        Percentiles are of `waits_ms`: refused and failed requests are counted alone.
        """
        in_time = self.answered & (self.client_ms <= deadline_ms)
        good, less = int((in_time & ~self.degraded).sum()), int((in_time & self.degraded).sum())
        span_s = float(np.ptp(self.due_s)) if len(self.due_s) else 0.0
        refused = np.isin(self.status, REFUSED)
        return {
            "requests": len(self.status),
            "answered": int(self.answered.sum()),
            "unanswered": int((self.status == UNANSWERED).sum()),
            "refused": int(refused.sum()),
            "failed": int((~self.answered & ~refused & (self.status != UNANSWERED)).sum()),
            "degraded": int(self.degraded.sum()),
            "late": int((self.answered & (self.client_ms > deadline_ms)).sum()),
            "good": good,
            "degraded_in_time": less,
            "good_per_s": good / span_s if span_s else None,
            "degraded_in_time_per_s": less / span_s if span_s else None,
            "ms": percentiles(self.waits_ms),
        }


def bodies_of(requests: Sequence[Mapping[str, Any]], wrapped: bool = True) -> list[bytes]:
    """Return request lines as bodies: of V1 if they are wrapped, else as the client takes them.

    Raises:
        ValueError: no request was given.
    """
    if not requests:
        raise ValueError("no requests to ask: give at least one request line")
    return [orjson.dumps({"instances": [one]} if wrapped else one) for one in requests]


def response_of(answer: bytes) -> dict[str, Any]:
    """Return the response in an answer of the client, or the first one in that of V1."""
    document = orjson.loads(answer)
    found: dict[str, Any] = document["predictions"][0] if "predictions" in document else document
    return found


class LoadGenerator:
    """The generator's process, from the side of a bench."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    def run(self, plan: LoadPlan) -> Load:
        """Carry a plan out.

        Raises:
            RuntimeError: the generator died; its last words are on stderr.
        """
        try:
            self._pipe.send(plan)
            load: Load = self._pipe.recv()
        except (EOFError, OSError) as error:
            raise RuntimeError("the load generator died: stderr says why") from error
        return load


@contextlib.contextmanager
def load_generator() -> Iterator[LoadGenerator]:
    """Start a generator; it ends with the block."""
    context = get_context("spawn")
    ours, its = context.Pipe()
    process = context.Process(target=_carry_out_all, args=(its,), daemon=True)
    process.start()
    its.close()
    with ours:
        try:
            yield LoadGenerator(ours)
        finally:
            process.kill()
            process.join()


def _carry_out_all(plans: Connection) -> None:
    """Carry out each plan that comes, and answer with its load; the bench ends this process."""
    with asyncio.Runner(loop_factory=open_loop) as runner:
        while True:
            plans.send(carry_out(plans.recv(), runner))


@contextlib.contextmanager
def sending(*plans: tuple[LoadGenerator, LoadPlan]) -> Iterator[list[Load]]:
    """Carry out open loops until the block ends; the load of each is in the list after it."""
    loads: list[Load] = []
    with (
        tempfile.TemporaryDirectory(prefix="reco-load-") as scratch,
        ThreadPoolExecutor(len(plans)) as threads,
    ):
        over = Path(scratch) / "over"
        asking = [threads.submit(generator.run, replace(plan, stop=str(over))) for generator, plan in plans]
        try:
            yield loads
        finally:
            over.touch()
        loads += [one.result() for one in asking]


def carry_out(plan: LoadPlan, runner: asyncio.Runner) -> Load:
    """Send all requests of a plan in this process."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        return runner.run(_carry_out(plan))
    finally:
        gc.unfreeze()
        gc.enable()


def open_loop() -> asyncio.AbstractEventLoop:
    """Return an event loop with exact timers: `select` waits microseconds, `epoll` whole milliseconds."""
    return asyncio.SelectorEventLoop(selectors.SelectSelector())


async def _carry_out(plan: LoadPlan) -> Load:
    pool = ConnectionPool(plan)
    turn = _turn(plan.bodies, plan.start)
    try:
        if plan.warm_up:
            at_once = min(plan.connections, WARM_UP_CONNECTIONS)
            await _closed(
                pool, _turn(plan.bodies, plan.start - plan.warm_up), at_once, WARM_UP_S, plan.warm_up
            )
        await asyncio.sleep(PAUSE_S)
        began = pool.now()
        if plan.rate > 0:
            exchanges = await _open(pool, turn, plan)
        else:
            exchanges = await _closed(
                pool, turn, plan.connections, plan.seconds, plan.requests, plan.patience_s
            )
        return _load(exchanges, began, pool.now(), plan.keep)
    finally:
        await pool.close()


def _turn(bodies: Sequence[bytes], start: int) -> Iterator[bytes]:
    """Yield the bodies in a cycle, beginning with the one of a number."""
    first = start % len(bodies)
    return itertools.cycle([*bodies[first:], *bodies[:first]])


async def _open(pool: ConnectionPool, turn: Iterator[bytes], plan: LoadPlan) -> list[Exchange]:
    rng = np.random.default_rng(plan.seed)
    gaps = rng.exponential(1 / plan.rate, max(int(plan.seconds * plan.rate), 1))
    first = pool.now() + PAUSE_S
    dues = deque((first + np.cumsum(gaps)).tolist())
    end, loop = dues[-1] + plan.patience_s, asyncio.get_running_loop()
    exchanges: list[Exchange] = []

    def send() -> None:
        while dues and dues[0] <= (now := pool.now()):
            exchange = Exchange(next(turn), dues.popleft(), now)
            exchanges.append(exchange)
            pool.ask(exchange)
        if dues:
            loop.call_at(dues[0], send)

    loop.call_at(dues[0], send)
    while pool.now() < end and (dues or pool.busy):
        await asyncio.sleep(0.01)
        if dues and plan.stop and os.path.exists(plan.stop):
            dues.clear()
            end = pool.now() + plan.patience_s
    return exchanges


async def _closed(
    pool: ConnectionPool,
    turn: Iterator[bytes],
    connections: int,
    seconds: float,
    requests: int = 0,
    patience_s: float = 0.0,
) -> list[Exchange]:
    exchanges: list[Exchange] = []
    end = pool.now() + seconds

    def again() -> None:
        now = pool.now()
        if now < end and (not requests or len(exchanges) < requests):
            exchange = Exchange(next(turn), now, now)
            exchanges.append(exchange)
            pool.ask(exchange)

    pool.on_answer = again
    for _ in range(connections):
        again()
    while pool.busy and pool.now() < end + patience_s:
        await asyncio.sleep(0.01)
    pool.on_answer = None
    return exchanges


def _load(exchanges: Sequence[Exchange], began: float, ended: float, keep: bool) -> Load:
    done = np.array([one.done or ended for one in exchanges])
    due = np.array([one.due for one in exchanges])
    return Load(
        due_s=due - began,
        client_ms=(done - due) * 1e3,
        late_ms=np.array([one.turned_to - one.due for one in exchanges]) * 1e3,
        status=np.array([one.status for one in exchanges], np.int16),
        degraded=np.array([any(mark in one.answer for mark in _DEGRADED) for one in exchanges], bool),
        answers=[one.answer for one in exchanges] if keep else [],
        began_s=began,
    )
