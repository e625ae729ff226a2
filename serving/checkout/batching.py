"""Work of waiting requests -> one model call for all of it -> each request's own result.

The endpoint is one asyncio loop: a request computes its features, then asks for its scores. Requests that
became ready in the same turn of the loop are answered by one call; whether that pays, and whether to wait
for more of them, `serving.checkout.batch_steering` decides. One `Batcher` stands before each model.

A batch holds requests of one bundle only, the urgent before the others, each group in order of arrival. What
goes wrong with a request stays with it: its deadline, its cancelling, its bad rows.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Generic, TypeVar

from serving import metrics
from serving.checkout.batch_steering import WAIT_SHARE, Steering
from serving.errors import DeadlineExceeded, Overloaded

AGED_S = 0.05  # a prefetch that has waited so long is as urgent as a checkout
MOST_WAITING = 256  # requests in the queue; more are refused

Work = TypeVar("Work")
Result = TypeVar("Result")


class Priority(IntEnum):
    """Who is answered first, and refused last."""

    CHECKOUT = 0  # a shopper waits
    PREFETCH = 1  # an answer that may be wanted soon


@dataclass(slots=True, eq=False)
class _Waiting(Generic[Work, Result]):
    work: Work
    rows: int
    bundle_id: str
    priority: Priority
    deadline: float
    asked: float
    # Errors travel as results: what a model raises may be nothing that a future takes (StopIteration).
    answer: asyncio.Future[Result | Exception] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )

    def settle(self, result: Result | Exception) -> None:
        """Wake the asker, unless it was cancelled."""
        if not self.answer.done():
            self.answer.set_result(result)


class Batcher(Generic[Work, Result]):
    """Joins the work of requests that wait for the same model; belongs to one event loop."""

    def __init__(
        self,
        run: Callable[[str, Sequence[Work]], Sequence[Result | Exception]],
        steering: Steering,
        *,
        stage: str,
        most_waiting: int = MOST_WAITING,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Take the model and what decides on joining.

        Args:
            run: takes a bundle's id and the work of requests, and returns one result for each, in their
                order; a result that is an exception is raised to its asker alone. It holds the loop
                while it runs. Work of no rows comes alone and needs no model.
            steering: used by this batcher alone.
            stage: label of the metrics, for example "ranking".
            most_waiting: how many requests may wait.
            clock: in seconds, the same that deadlines are of.
        """
        self._run = run
        self._steering = steering
        self._most_waiting = most_waiting
        self._clock = clock
        self._waiting: list[_Waiting[Work, Result]] = []  # in order of arrival
        self._joins = False  # whether the next batch was already decided to be one
        self._flush_at = math.inf  # of the clock; infinite while none is planned
        self._planned: asyncio.Handle | None = None
        self._metrics = metrics.batch_metrics(stage, [priority.name.lower() for priority in Priority])

    async def ask(
        self,
        work: Work,
        *,
        rows: int,
        bundle_id: str,
        priority: Priority = Priority.CHECKOUT,
        deadline: float = math.inf,
    ) -> Result:
        """Return the model's result for `work`.

        Where joining does not pay and nobody waits, the model is called at once, as if by hand.

        Args:
            work: what `run` takes.
            rows: of the model's input, 0 or more.
            bundle_id: whose model is asked; work of two bundles never shares a call.
            priority: how urgent it is.
            deadline: seconds of the clock after which the result is of no use.

        Raises:
            DeadlineExceeded: the deadline passed before the model was called.
            Overloaded: too many wait.
            Exception: whatever the model raises for this very work.
        """
        if rows == 0:
            return _unwrap(self._call(bundle_id, [work])[0])
        now = self._clock()
        if now >= deadline:
            raise self._expired(now - deadline)
        self._steering.arrived(now)
        if not self._waiting:
            if self._steering.alone():
                return self._call_alone(work, rows, bundle_id)
            self._joins = True
        if len(self._waiting) >= self._most_waiting:
            self._make_room(priority)
        member = _Waiting[Work, Result](work, rows, bundle_id, priority, deadline, now)
        self._waiting.append(member)
        self._plan(member)
        return _unwrap(await member.answer)

    def state(self) -> dict[str, Any]:
        """Return how many wait, and what the steering measured and decided."""
        return {"waiting": len(self._waiting), **self._steering.state()}

    def _call_alone(self, work: Work, rows: int, bundle_id: str) -> Result:
        began = self._clock()
        [result] = self._call(bundle_id, [work])
        ended = self._clock()
        self._steering.ran(ended, rows, 1, (ended - began) * 1e3, queued=False)
        self._metrics.count_call(rows, 1)
        return _unwrap(result)

    def _call(self, bundle_id: str, works: Sequence[Work]) -> Sequence[Result | Exception]:
        results = self._run(bundle_id, works)
        if len(results) != len(works):
            raise ValueError(f"the model gave {len(results)} results for {len(works)} requests: mend `run`")
        return results

    def _make_room(self, priority: Priority) -> None:
        """See that one more may wait: the youngest prefetch goes before a checkout is refused."""
        self._drop(lambda member: member.answer.done())
        if len(self._waiting) < self._most_waiting:
            return
        prefetches = [member for member in self._waiting if member.priority is Priority.PREFETCH]
        refused = Priority.PREFETCH if prefetches else priority
        self._metrics.refused[refused.name.lower()].inc()
        error = Overloaded(f"{self._most_waiting} requests wait for the model, the most that may: ask later")
        if priority is Priority.PREFETCH or not prefetches:
            raise error
        prefetches[-1].settle(error)
        self._drop(lambda member: member is prefetches[-1])

    def _plan(self, member: _Waiting[Work, Result]) -> None:
        """See that a flush comes when the first of the queue has waited enough, and in time for `member`."""
        now = member.asked
        if self._flush_at <= now:
            return  # it comes at once anyway
        wait_s = WAIT_SHARE * (member.deadline - now)
        if self._planned is None:
            wait_s = min(wait_s, self._steering.window_ms(now) / 1e3)
        if sum(waiting.rows for waiting in self._waiting) >= self._steering.limit_rows:
            wait_s = 0.0
        if now + wait_s < self._flush_at:
            self._flush_in(wait_s, now)

    def _flush_in(self, wait_s: float, now: float) -> None:
        if self._planned is not None:
            self._planned.cancel()
        loop = asyncio.get_running_loop()
        self._flush_at = now + wait_s
        # Without a wait the flush still comes after all that is ready in this turn of the loop.
        self._planned = loop.call_later(wait_s, self._flush) if wait_s > 0 else loop.call_soon(self._flush)

    def _flush(self) -> None:
        """Answer one batch; the rest after the loop's next turn, so that others get theirs in between."""
        self._planned, self._flush_at = None, math.inf
        now = self._clock()
        for member in self._waiting:
            if now >= member.deadline and not member.answer.done():
                member.settle(self._expired(now - member.deadline))
        self._drop(lambda member: member.answer.done())
        if self._waiting:
            self._serve(self._take_batch(now), now)
        if self._waiting:
            self._flush_in(0.0, now)

    def _take_batch(self, now: float) -> list[_Waiting[Work, Result]]:
        """Take from the queue what the next call answers: at least one request, all of one bundle."""

        def urgency(member: _Waiting[Work, Result]) -> Priority:
            return Priority.CHECKOUT if now - member.asked >= AGED_S else member.priority

        # What was left waiting by a call before is joined only if that pays, like what comes new.
        limit_rows = self._steering.batch_rows() if self._joins or not self._steering.alone() else 1
        self._joins = False
        first, *others = sorted(self._waiting, key=urgency)  # stable: by arrival where it is equal
        batch, rows = [first], first.rows
        for member in others:
            if member.bundle_id == first.bundle_id:
                rows += member.rows
                if rows > limit_rows:
                    break
                batch.append(member)
        taken = set(map(id, batch))
        self._drop(lambda member: id(member) in taken)
        return batch

    def _serve(self, batch: Sequence[_Waiting[Work, Result]], now: float) -> None:
        rows = sum(member.rows for member in batch)
        bundle_id = batch[0].bundle_id
        results: Sequence[Result | Exception]
        try:
            results = self._call(bundle_id, [member.work for member in batch])
        except Exception as error:  # noqa: BLE001 - whatever it is, it belongs to whose rows raise it
            results = [error] if len(batch) == 1 else [self._attempt(member) for member in batch]
        else:
            ended = self._clock()
            full = any(member.bundle_id == bundle_id for member in self._waiting)
            self._steering.ran(ended, rows, len(batch), (ended - now) * 1e3, queued=True, full=full)
        self._metrics.count_call(rows, len(batch))
        for member, result in zip(batch, results, strict=True):
            self._metrics.queue_seconds.observe(now - member.asked)
            member.settle(result)

    def _attempt(self, member: _Waiting[Work, Result]) -> Result | Exception:
        """Run one request's work by itself after a call for several has failed."""
        try:
            return self._call(member.bundle_id, [member.work])[0]
        except Exception as error:  # noqa: BLE001 - likewise
            return error

    def _drop(self, gone: Callable[[_Waiting[Work, Result]], bool]) -> None:
        self._waiting = [member for member in self._waiting if not gone(member)]

    def _expired(self, late_s: float) -> DeadlineExceeded:
        self._metrics.expired.inc()
        return DeadlineExceeded(f"the deadline passed {late_s * 1e3:.1f} ms before the model could be asked")


def _unwrap(result: Result | Exception) -> Result:
    if isinstance(result, Exception):
        raise result
    return result
