"""A request that arrived -> whether it begins now, later or never: by time, by event loop, by shopper.

    LoopAdmission    a burst: only a slice of each turn of the event loop begins new requests
    Admission        overload: a request that would be late gets best sellers at once
    ShopperLimits    one shopper: more requests than the limit get a lower rung

Each object belongs to one event loop. Times are seconds of perf_counter unless a name says otherwise.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections import deque
from collections.abc import Callable, Iterator

from serving.schemas import PRIORITIES, Call

# Shares of a request's own time, from arrival to deadline, that may be over when its full answer could begin.
# The time in the kernel's queue is not seen: the loop reads the request after all that it had before.
PATIENT, STRICT = 0.8, 0.35
PREFETCH = 0.1  # the same for a prefetch
STANDING_S = 0.2  # of refusals in a row, after which the strict limit holds
CALM_S = 0.05  # without a refusal, after which the patient limit holds again
_ANSWER_WEIGHT = 0.05  # of the newest in the average time of an answer

SLICE_S = 0.001  # of a turn of the loop, for the first steps of new requests
MOST_BEGUN = 8  # new requests in a slice, even if the latest ones were quick
_STEP_WEIGHT = 0.2  # of the newest in the averages of first steps

BURST_S = 5.0  # a shopper may ask at once as often as the limit allows in this time
MOST_SHOPPERS = 10_000  # that are remembered, before those within their limit are forgotten


def prefetch_waits_s(call: Call) -> float:
    """Return how long after its arrival a prefetch may still begin."""
    return PREFETCH * (call.deadline - call.arrived)


class Admission:
    """Refuses a full answer to requests that would be late, so that the others are in time.

    Under overload a queue in order of arrival makes every request late. A short burst may use most of the
    deadline. After refusals for STANDING_S the queue is kept short until there was none for CALM_S. These are
    the two limits of Maurer, Fail at Scale (ACM Queue 2015), after CoDel (Nichols and Jacobson, ACM Queue
    2012). Added here: the processor time of the requests that wait for a model counts as well.
    """

    def __init__(self, limit_s: float) -> None:
        """Take the server's own deadline, from arrival."""
        self._limit_s = limit_s
        self._computing = 0  # full answers that wait for a model
        self._answer_s = 0.0  # processor time of one, on average
        self._spent_s = -math.inf  # processor time when the latest one was ready
        self._refusing_since = self._refused_at = -math.inf

    def admits(self, call: Call, now: float, ahead_s: float = 0.0) -> bool:
        """Say whether a request gets a full answer; a prefetch is refused first.

        Args:
            call: of the request.
            now: the time at which it could begin, but for `ahead_s`.
            ahead_s: how long it still has to wait for its turn.
        """
        refusing = now - self._refused_at <= CALM_S
        strict = refusing and now - self._refusing_since >= STANDING_S
        waited_s = now + ahead_s + self._computing * self._answer_s - call.arrived
        given_s = call.deadline - call.arrived
        if call.priority != PRIORITIES[0]:
            return not strict and waited_s <= prefetch_waits_s(call)
        share = STRICT if strict else PATIENT
        # A caller with a short deadline of its own, or a prefetch, is no sign of a queue.
        if waited_s > share * self._limit_s:
            self._refusing_since = self._refusing_since if refusing else now
            self._refused_at = now
        return waited_s <= share * given_s

    @contextlib.contextmanager
    def computing(self) -> Iterator[None]:
        """Count a full answer while its models run; not a request that waits for another's list."""
        self._computing += 1
        try:
            yield
        finally:
            self._computing -= 1

    def served(self, began_s: float, spent_s: float) -> None:
        """Learn from a full answer that is ready.

        Args:
            began_s: processor time of the loop's thread at its begin. Not wall time: a request that waits for
                a model elsewhere keeps no other from being answered.
            spent_s: the same now.
        """
        # Of several answers made together, each is charged for the time since the one before it.
        self._answer_s += _ANSWER_WEIGHT * (spent_s - max(began_s, self._spent_s) - self._answer_s)
        self._spent_s = spent_s


class LoopAdmission:
    """Begins requests for SLICE_S in each turn of the loop; the others queue, checkouts before prefetches.

    A loop runs ready steps in the order in which they became ready. Without this limit, every await of a
    running request would queue behind the first step of all newer requests. In a burst hardly any would be
    in time.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._urgent: deque[asyncio.Future[None]] = deque()
        self._others: deque[asyncio.Future[None]] = deque()
        self._is_open = False  # a request has begun in this turn
        self._until = 0.0  # of the clock, the end of this turn's slice
        self._let_in, self._opened_at, self._began_at = 0, 0.0, 0.0
        self._step_s = SLICE_S  # of a first step: the average, or the latest ones if they took longer
        self._each_s = SLICE_S  # wait in the queue for each request ahead, on average

    def enter(self, urgent: bool) -> asyncio.Future[None] | None:
        """Return None if the request may begin now, else the future that it must await, or cancel.

        A request that is not urgent may wait without end while others are.
        """
        now, loop = self._clock(), asyncio.get_running_loop()
        if not self._is_open:
            self._is_open, self._until = True, now + SLICE_S
            loop.call_soon(self._next)
            return None
        if now < self._until and not self._urgent and not self._others:
            return None
        turn = loop.create_future()
        (self._urgent if urgent else self._others).append(turn)
        return turn

    def wait_s(self) -> float:
        """Return how long a request that arrives now would queue, if no urgent one came after it."""
        return (len(self._urgent) + len(self._others)) * self._each_s

    def _next(self) -> None:
        """Let in as many as a slice has room for; runs once in each turn in which a request began."""
        now, loop = self._clock(), asyncio.get_running_loop()
        if self._let_in:
            step_s = (now - self._began_at) / self._let_in
            self._step_s = max(self._step_s + _STEP_WEIGHT * (step_s - self._step_s), step_s)
            self._each_s += _STEP_WEIGHT * ((now - self._opened_at) / self._let_in - self._each_s)
        room, self._let_in, self._opened_at = max(min(int(SLICE_S / self._step_s), MOST_BEGUN), 1), 0, now
        self._until = now  # a request that arrives while others queue comes after them
        loop.call_soon(self._begin)
        while self._let_in < room and (queue := self._urgent or self._others):
            turn = queue.popleft()
            if not turn.done():  # else its client has left
                turn.set_result(None)
                self._let_in += 1
        self._is_open = self._let_in > 0
        if self._is_open:
            loop.call_soon(self._next)

    def _begin(self) -> None:
        self._began_at = self._clock()


class ShopperLimits:
    """Bounds the answers that are computed for one shopper; anonymous shoppers have no limit.

    The generic cell rate algorithm (ITU-T I.371): per shopper one number, the moment at which all computed
    answers are paid for at the limit's rate.
    """

    def __init__(self, per_s: float) -> None:
        """Take the answers per second for one shopper; 0: no limit."""
        self._per_s = per_s
        self._paid_at: dict[str, float] = {}
        self._most = MOST_SHOPPERS

    def admits(self, user_id: str | None, now: float) -> bool:
        """Say whether another answer may be computed for a shopper."""
        return user_id is None or self._paid_at.get(user_id, now) <= now + BURST_S

    def spend(self, user_id: str | None, now: float) -> None:
        """Take note that an answer is computed for a shopper."""
        if user_id is None or not self._per_s:
            return
        self._paid_at[user_id] = max(self._paid_at.get(user_id, now), now) + 1 / self._per_s
        if len(self._paid_at) > self._most:
            self._paid_at = {user: at for user, at in self._paid_at.items() if at > now}
            # Where most are over the limit, the next look would find as many.
            self._most = max(MOST_SHOPPERS, 2 * len(self._paid_at))
