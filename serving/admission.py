"""How long a request waited, and for how many others it would -> whether it gets a full answer.

Under overload a queue that is served in order makes every request late, and all work is in vain. Here who
would come too late is answered by best sellers at once, at a fraction of the cost, so that the others are in
time. A short burst may use most of the deadline; once that was not enough, the queue is kept short until
it has been so for a while: the two limits of Maurer, Fail at Scale (ACM Queue 2015), after CoDel (Nichols and
Jacobson, ACM Queue 2012). What those two do not have: the time of those who have begun and wait to be joined
counts as well.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator

from serving.calls import PRIORITIES, Call

# Shares of a request's own time, from arrival to deadline, that may be over when its full answer could begin.
# How long the request lay in the kernel is not seen: the loop takes it up after all it had before.
PATIENT, STRICT = 0.8, 0.35
STANDING_S = 0.2  # of refusals one upon the other, after which it is the strict limit that holds
CALM_S = 0.05  # without a refusal, after which it is the patient one again
_WEIGHT = 0.05  # of the newest in the average time of an answer


class Admission:
    """Belongs to one event loop."""

    def __init__(self) -> None:
        self._computing = 0  # full answers that wait for a model
        self._service_s = 0.0  # an answer's own time, on average
        self._refusing_since = self._refused = -math.inf
        self._last_s = 0.0

    def admits(self, call: Call, now: float) -> bool:
        """Say whether a request is to be computed in full; a prefetch is refused first.

        Args:
            call: of the request.
            now: perf_counter when its turn came.
        """
        refusing = now - self._refused <= CALM_S
        strict = refusing and now - self._refusing_since >= STANDING_S
        share = STRICT if strict else PATIENT
        if call.priority != PRIORITIES[0]:
            share = 0.0 if strict else STRICT
        begins = now + self._computing * self._service_s
        admitted = begins - call.arrived <= share * (call.deadline - call.arrived)
        if not admitted:
            self._refusing_since = self._refusing_since if refusing else now
            self._refused = now
        return admitted

    @contextlib.contextmanager
    def computing(self) -> Iterator[None]:
        """Count a full answer while its models are asked; who waits for what another one makes is none."""
        self._computing += 1
        try:
            yield
        finally:
            self._computing -= 1

    def served(self, began: float, now: float) -> None:
        """Learn from a full answer.

        Args:
            began: when its turn came.
            now: perf_counter.
        """
        # Of several under way each is charged with the time since the one before it was done.
        self._service_s += _WEIGHT * (now - max(began, self._last_s) - self._service_s)
        self._last_s = now
