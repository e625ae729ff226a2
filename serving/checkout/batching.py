"""Requests that wait for a shared ranker -> one call for several of them -> each request's own result.

Only a ranker that requests share needs this: a remote one, or one on a GPU. In process on a CPU a joined call
saves nothing, so a request calls its ranker itself.

While no call is in flight, all requests that are ready in this turn of the event loop share one. Otherwise
they wait for the end of a call, for `expected` companions, or for the longest wait; not at all if a companion
would have no room.
`expected` is the number of requests that arrive during one call: arrival rate x measured time of a call.
A call holds requests of one bundle, checkouts before prefetches. An expired or cancelled request leaves the
queue, and rows that break a joined call fail alone.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

from serving.errors import DeadlineExceeded, Overloaded, RankerMismatch, RankerUnavailable, RowsRefused
from serving.metrics import (
    BATCH_EXPIRED,
    BATCH_QUEUE_SECONDS,
    BATCH_REFUSED,
    BATCH_REQUESTS,
    BATCH_ROWS,
)

MOST_WAITING = 256  # requests in the queue; more are refused
_WEIGHT = 0.1  # of the newest in the averages
_OF_THE_CALL = (DeadlineExceeded, RankerMismatch, RankerUnavailable)  # each request alone would get the same

# Bundle, works, latest deadline -> one result for each work; a result that is an exception fails that one.
CallModel = Callable[[str, Sequence[Any], float], Awaitable[Sequence[Any]]]


class Priority(IntEnum):
    """The order of service, and the reverse order of refusal."""

    CHECKOUT = 0  # a shopper waits
    PREFETCH = 1  # an answer for later


_refused = {priority: BATCH_REFUSED.labels(priority.name.lower()) for priority in Priority}


@dataclass(slots=True, eq=False)
class _Waiting:
    work: Any
    rows: int
    bundle_id: str
    priority: Priority
    deadline: float
    since: float
    # Errors travel as results: a model may raise an error that no future takes (StopIteration).
    answer: asyncio.Future[Any] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    def settle(self, result: Any) -> None:
        """Wake the request, unless it was cancelled."""
        if not self.answer.done():
            self.answer.set_result(result)


class Batcher:
    """Joins requests that wait for one ranker; belongs to one event loop."""

    def __init__(
        self,
        call: CallModel,
        *,
        max_wait_ms: float,
        max_rows: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Take the model and the limits.

        Args:
            call: see `CallModel`.
            max_wait_ms: longest wait for companions; 0 means that no request waits.
            max_rows: most rows of a joined call; a single request may have more.
            clock: seconds; deadlines are times of it.
        """
        self._model, self._max_wait_s, self._max_rows = call, max_wait_ms / 1e3, max_rows
        self._clock = clock
        self._waiting: list[_Waiting] = []  # in order of arrival
        self._calls: set[asyncio.Task[None]] = set()  # in flight; the loop itself keeps weak references only
        self._planned: asyncio.Handle | None = None
        self._arrived_at = -math.inf
        self._gap_s, self._call_s = math.inf, 0.0  # between two arrivals, and of a call, on average

    @property
    def expected(self) -> int:
        """How many requests arrive during one call: rate x time, Little's law."""
        return max(round(self._call_s / self._gap_s), 1) if self._gap_s > 0 else MOST_WAITING

    async def ask(
        self,
        work: Any,
        *,
        rows: int,
        bundle_id: str,
        priority: Priority = Priority.CHECKOUT,
        deadline: float = math.inf,
    ) -> Any:
        """Return the model's result for `work`.

        Args:
            work: one element of what `call` takes.
            rows: rows of the model's input.
            bundle_id: requests of two bundles never share a call.
            priority: see `Priority`.
            deadline: time of the clock after which the result has no use.

        Raises:
            DeadlineExceeded: the deadline passed before the call.
            Overloaded: too many requests wait.
            Exception: whatever the model raises for this work.
        """
        now = self._clock()
        gap_s, self._arrived_at = now - self._arrived_at, now
        self._gap_s = gap_s if math.isinf(self._gap_s) else self._gap_s + _WEIGHT * (gap_s - self._gap_s)
        if len(self._waiting) >= MOST_WAITING:
            _refused[priority].inc()
            raise Overloaded(f"{MOST_WAITING} requests wait for the model, the most that may: ask later")
        member = _Waiting(work, rows, bundle_id, priority, deadline, now)
        self._waiting.append(member)
        self._plan()
        result = await member.answer
        if isinstance(result, Exception):
            raise result
        return result

    def _plan(self) -> None:
        """Plan the next call: now, or at the end of the first request's longest wait."""
        if self._planned is not None:
            self._planned.cancel()
            self._planned = None
        if self._waiting:
            loop, wait_s = asyncio.get_running_loop(), self._wait_s()
            # Without a wait the call still comes after all that is ready in this turn of the loop.
            self._planned = (
                loop.call_later(wait_s, self._flush) if wait_s > 0 else loop.call_soon(self._flush)
            )

    def _wait_s(self) -> float:
        rows = sum(member.rows for member in self._waiting) + self._waiting[-1].rows  # with one more like it
        if not self._calls or len(self._waiting) >= self.expected or rows > self._max_rows:
            return 0.0
        return self._waiting[0].since + self._max_wait_s - self._clock()

    def _flush(self) -> None:
        """Start one call, and plan the next for the requests that it leaves."""
        now = self._clock()
        for member in self._waiting:
            if now >= member.deadline and not member.answer.done():
                BATCH_EXPIRED.inc()
                late_ms = (now - member.deadline) * 1e3
                member.settle(DeadlineExceeded(f"the deadline passed {late_ms:.1f} ms before the call"))
        self._waiting = [member for member in self._waiting if not member.answer.done()]
        if self._waiting:
            task = asyncio.get_running_loop().create_task(self._serve(self._take_batch(), now))
            self._calls.add(task)
            task.add_done_callback(self._ended)
        self._plan()

    def _take_batch(self) -> list[_Waiting]:
        """Take the members of the next call from the queue: at least one, all of one bundle."""
        first, *others = sorted(self._waiting, key=lambda member: member.priority)  # stable: then by arrival
        batch, rows = [first], first.rows
        for member in others:
            if member.bundle_id == first.bundle_id:
                rows += member.rows
                if rows > self._max_rows:
                    break
                batch.append(member)
        self._waiting = [member for member in self._waiting if member not in batch]
        return batch

    async def _serve(self, batch: Sequence[_Waiting], began: float) -> None:
        """Call the model; after an error that belongs to single rows, once for each request."""
        called_at = self._clock()
        BATCH_ROWS.observe(sum(member.rows for member in batch))
        BATCH_REQUESTS.observe(len(batch))
        deadline = max(member.deadline for member in batch)
        try:
            results = await self._model(batch[0].bundle_id, [member.work for member in batch], deadline)
            if len(results) != len(batch):
                raise ValueError(f"the model gave {len(results)} results for {len(batch)} requests")
            self._call_s += _WEIGHT * (self._clock() - called_at - self._call_s)
        except Exception as error:  # noqa: BLE001 - it belongs to the request whose rows raise it
            is_shared = isinstance(error, _OF_THE_CALL) and not isinstance(error, RowsRefused)
            if len(batch) > 1 and not is_shared:
                await asyncio.gather(*(self._serve([member], began) for member in batch))
                return
            results = [error] * len(batch)
        for member, result in zip(batch, results, strict=True):
            BATCH_QUEUE_SECONDS.observe(began - member.since)
            member.settle(result)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._calls.discard(task)
        self._plan()
