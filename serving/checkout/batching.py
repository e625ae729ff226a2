"""Requests that wait for a shared ranker -> one call for several of them -> each request's own result.

Only a remote ranker, which requests share, needs this: in process on a CPU a joined call saves nothing.

While no call is in flight, all requests that are ready in this turn of the event loop share one. Otherwise
they wait for the end of a call, for `expected` companions, or for the longest wait; not at all if a companion
would have no room. A call holds requests of one bundle, checkouts before prefetches. A request whose time is
over is cancelled by its checkout, and leaves the queue.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from serving.errors import RowsRefused
from serving.metrics import BATCH_QUEUE_SECONDS, BATCH_REQUESTS, BATCH_ROWS
from serving.schemas import PRIORITIES

_WEIGHT = 0.1  # of the newest in the averages


@dataclass(slots=True, eq=False)
class _Waiting:
    work: Any
    rows: int
    bundle_id: str
    priority: str
    deadline: float
    since: float
    answer: asyncio.Future[Any] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class Batcher:
    """Joins requests that wait for one ranker; belongs to one event loop."""

    def __init__(
        self,
        call: Callable[[str, Sequence[Any], float], Awaitable[Sequence[Any]]],
        *,
        max_wait_ms: float,
        max_rows: int,
    ) -> None:
        """Take the model and the limits.

        Args:
            call: bundle, works, latest deadline -> one result for each work.
            max_wait_ms: longest wait for companions; 0 means that no request waits.
            max_rows: most rows of a joined call; a single request may have more.
        """
        self._model, self._max_wait_s, self._max_rows = call, max_wait_ms / 1e3, max_rows
        self._waiting: list[_Waiting] = []  # in order of arrival
        self._calls: set[asyncio.Task[None]] = set()  # in flight; the loop itself keeps weak references only
        self._planned: asyncio.Handle | None = None
        self._arrived_at = -math.inf
        self._gap_s, self._call_s = math.inf, 0.0  # between two arrivals, and of a call, on average

    @property
    def expected(self) -> int:
        """How many requests arrive during one call: rate x time, Little's law."""
        return max(round(self._call_s / max(self._gap_s, 1e-6)), 1)

    async def ask(
        self, work: Any, *, rows: int, bundle_id: str, deadline: float, priority: str = PRIORITIES[0]
    ) -> Any:
        """Return the model's result for `work`, or raise its error.

        Args:
            work: one element of what `call` takes.
            rows: rows of the model's input.
            bundle_id: requests of two bundles never share a call.
            deadline: for the model; a call has the latest of its requests.
            priority: one of PRIORITIES, in the order of service.
        """
        now = _now()
        gap_s, self._arrived_at = now - self._arrived_at, now
        self._gap_s = gap_s if math.isinf(self._gap_s) else self._gap_s + _WEIGHT * (gap_s - self._gap_s)
        member = _Waiting(work, rows, bundle_id, priority, deadline, now)
        self._waiting.append(member)
        self._plan()
        return await member.answer

    def _plan(self) -> None:
        """Plan the next call: now, or at the end of the first request's longest wait."""
        if self._planned is not None:
            self._planned.cancel()
        if self._waiting:
            # Without a wait the call still comes after all that is ready in this turn of the loop.
            self._planned = asyncio.get_running_loop().call_later(max(self._wait_s(), 0.0), self._flush)

    def _wait_s(self) -> float:
        rows = sum(member.rows for member in self._waiting) + self._waiting[-1].rows  # with one more like it
        if not self._calls or len(self._waiting) >= self.expected or rows > self._max_rows:
            return 0.0
        return self._waiting[0].since + self._max_wait_s - _now()

    def _flush(self) -> None:
        """Start one call, and plan the next for the requests that it leaves."""
        self._waiting = [member for member in self._waiting if not member.answer.done()]
        if self._waiting:
            # Sorting is stable: requests of one priority stay in the order of their arrival.
            queue = sorted(self._waiting, key=lambda member: PRIORITIES.index(member.priority))
            of_bundle = [member for member in queue if member.bundle_id == queue[0].bundle_id]
            rows = accumulate(member.rows for member in of_bundle)
            batch = [member for member, upto in zip(of_bundle, rows, strict=True) if upto <= self._max_rows]
            self._begin(batch or of_bundle[:1])
        self._plan()

    def _begin(self, batch: list[_Waiting]) -> None:
        self._waiting = [member for member in self._waiting if member not in batch]
        now = _now()
        for member in batch:
            BATCH_QUEUE_SECONDS.observe(now - member.since)
        task = asyncio.get_running_loop().create_task(self._serve(batch))
        self._calls.add(task)
        task.add_done_callback(self._ended)

    async def _serve(self, batch: Sequence[_Waiting]) -> None:
        """Call the model; where it refuses the rows of several requests, once for each of them."""
        began = _now()
        BATCH_ROWS.observe(sum(member.rows for member in batch))
        BATCH_REQUESTS.observe(len(batch))
        deadline = max(member.deadline for member in batch)
        try:
            results = await self._model(batch[0].bundle_id, [member.work for member in batch], deadline)
        except Exception as error:  # noqa: BLE001 - it belongs to the requests
            if isinstance(error, RowsRefused) and len(batch) > 1:
                await asyncio.gather(*(self._serve([member]) for member in batch))
                return
            for member in batch:
                if not member.answer.done():  # else it was cancelled meanwhile
                    member.answer.set_exception(error)
            return
        self._call_s += _WEIGHT * (_now() - began - self._call_s)
        for member, result in zip(batch, results, strict=True):
            if not member.answer.done():
                member.answer.set_result(result)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._calls.discard(task)
        self._plan()


def _now() -> float:
    return time.perf_counter()  # uvloop's own clock has whole milliseconds
