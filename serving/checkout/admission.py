"""How long a request waited, and for how many others it would -> whether it gets a full answer.

Under overload a queue that is served in order makes every request late, and all work is in vain. Here who
would come too late is answered by best sellers at once, at a fraction of the cost, so that the others are in
time. A short burst may use most of the deadline; once that was not enough, the queue is kept short until
it has been so for a while: the two limits of Maurer, Fail at Scale (ACM Queue 2015), after CoDel (Nichols and
Jacobson, ACM Queue 2012). What those two do not have: the time of those who wait for a model counts as well.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator

from serving.checkout.call_headers import PRIORITIES, Call

# Shares of a request's own time, from arrival to deadline, that may be over when its full answer could begin.
# How long the request lay in the kernel is not seen: the loop takes it up after all it had before.
PATIENT, STRICT = 0.8, 0.35
PREFETCH = 0.1  # for which there must be time anyway
STANDING_S = 0.2  # of refusals one upon the other, after which it is the strict limit that holds
CALM_S = 0.05  # without a refusal, after which it is the patient one again
_WEIGHT = 0.05  # of the newest in the average time of an answer


def prefetch_waits_s(call: Call) -> float:
    """Return how long after its arrival a prefetch may still be begun."""
    return PREFETCH * (call.deadline - call.arrived)


class Admission:
    """Belongs to one event loop."""

    def __init__(self, limit_s: float) -> None:
        """Take the server's own deadline, from arrival."""
        self._limit_s = limit_s
        self._computing = 0  # full answers that wait for a model
        self._answer_s = 0.0  # processor time of one, on average
        self._spent_s = -math.inf  # processor time when the latest one was ready
        self._refusing_since = self._refused = -math.inf

    def admits(self, call: Call, now: float, ahead_s: float = 0.0) -> bool:
        """Say whether a request is to be computed in full; a prefetch is refused first.

        Args:
            call: of the request.
            now: perf_counter when its turn came.
            ahead_s: how long it has to wait for its turn from now on.
        """
        refusing = now - self._refused <= CALM_S
        strict = refusing and now - self._refusing_since >= STANDING_S
        waited_s = now + ahead_s + self._computing * self._answer_s - call.arrived
        given_s = call.deadline - call.arrived
        if call.priority != PRIORITIES[0]:
            return not strict and waited_s <= prefetch_waits_s(call)
        share = STRICT if strict else PATIENT
        # That one caller is in a hurry, or asks for what can wait, does not make a queue.
        if waited_s > share * self._limit_s:
            self._refusing_since = self._refusing_since if refusing else now
            self._refused = now
        return waited_s <= share * given_s

    @contextlib.contextmanager
    def computing(self) -> Iterator[None]:
        """Count a full answer while its models are asked; who waits for what another one makes is none."""
        self._computing += 1
        try:
            yield
        finally:
            self._computing -= 1

    def served(self, began_s: float, spent_s: float) -> None:
        """Learn from a full answer that is ready.

        Args:
            began_s: processor time of the loop's thread when its turn came. Not the clock's: who waits for a
                model elsewhere keeps nobody from being answered.
            spent_s: the same now.
        """
        # Of several that are made together each is charged with what was spent since the one before it.
        self._answer_s += _WEIGHT * (spent_s - max(began_s, self._spent_s) - self._answer_s)
        self._spent_s = spent_s
