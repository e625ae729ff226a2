"""Measured model calls and the rate of requests -> whether joining requests pays, how long, how many rows.

    alone     joining saves less than it costs, or there is nobody to join: it is run at once
    join      requests that became ready by themselves together share a call; nobody waits for another
    wait      the first of a batch waits a little for others: only while calls would fill the model's time

Three measurements decide, all of them in `state()`:

* The cost of a call is a line, fixed + per row, fitted to the calls that were made. Only the fixed part is
  saved by joining; on a processor there is hardly any, on an accelerator it is most of a small call.
* The busy share of the model's time, and the rate of requests. Where the model is called for one batch after
  the other, who comes during a call is joined anyway, and a wait on purpose makes no answer faster: it buys
  time of the model. So the window opens, slowly, only while calls fill more than BUSY_RATIO of the time, and
  halves as soon as they do not.
* Late calls. As in Clipper (Crankshaw et al., NSDI 2017, section 4.3) the most rows of a call grow by one
  request's for each full call in time, and are cut when calls come late; halved, as in TCP, because a p99
  forgives few. A call is late when somebody who came just as one like it began, and so waits for two, would
  miss the goal (the rule of Nexus: Shen et al., SOSP 2019).
"""

from __future__ import annotations

from collections import deque
from itertools import combinations
from statistics import median
from typing import Any

FIRST_ROWS = 1_024  # most rows of a call to begin with
BUSY_RATIO = 0.9  # of the model's time that calls may take before anybody waits on purpose
WINDOW_STEP_MS = 0.1  # by which the window opens with each call above that; below a step it is shut
WAIT_SHARE = 0.2  # of the goal, and of the time a request has left, that it may wait on purpose
MAX_WAIT_MS = 10.0  # that any setting allows
TRIP_MS = 0.05  # what the way through the queue costs a request by itself
WORTH_RATIO = 0.1  # of a call that joining two must save, else it is noise
LOOK_EVERY = 16  # requests run alone between two that look whether joining would pay
LATE_RATIO = 0.01  # of calls that may be late: the goal is a p99
_LATEST = 100  # calls that the share of late ones is taken from
_REFIT_EVERY = 64  # calls
_SAMPLES = 15  # calls of one size that are remembered
_ENOUGH = 3  # of them make a median
_LONELY = 1.02  # requests a call below which there is nobody to join, while the cost is not known
_APART = 1.5  # two sizes nearer than this say nothing about a slope


class CallCost:
    """What a model call takes as a line over its rows; robust against single slow calls and rare sizes."""

    def __init__(self) -> None:
        self._sizes: dict[int, deque[tuple[int, float]]] = {}  # power of two -> its latest (rows, ms)

    def add(self, rows: int, call_ms: float) -> None:
        """Remember one call."""
        size = rows.bit_length()
        if size not in self._sizes:
            self._sizes[size] = deque(maxlen=_SAMPLES)
        self._sizes[size].append((rows, call_ms))

    def line(self) -> tuple[float, float] | None:
        """Return fixed and per-row milliseconds, neither below 0; None before two sizes were seen.

        Median slope and median rest over the sizes' medians (Theil, 1950; Sen, 1968).
        """
        points = [
            (median(rows for rows, _ in calls), median(ms for _, ms in calls))
            for calls in self._sizes.values()
            if len(calls) >= _ENOUGH
        ]
        points.sort()
        slopes = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in combinations(points, 2) if b[0] > _APART * a[0]]
        if not slopes:
            return None
        row_ms = max(median(slopes), 0.0)
        return max(median(ms - row_ms * rows for rows, ms in points), 0.0), row_ms


class Steering:
    """Decides for one `Batcher`; not for use by several threads. Times come in, no clock is read."""

    def __init__(self, goal_ms: float, *, max_wait_ms: float = MAX_WAIT_MS, max_rows: int = 8_192) -> None:
        """Take the limits that it keeps to.

        Args:
            goal_ms: p99 of the time from asking to the result.
            max_wait_ms: longest wait on purpose, 0 for none, at most MAX_WAIT_MS.
            max_rows: most rows of a call that joins requests; one request alone may have more.

        Raises:
            ValueError: naming the limit that is out of range.
        """
        if not goal_ms > 0:
            raise ValueError(f"goal_ms is {goal_ms}; expected a time above 0")
        if not 0 <= max_wait_ms <= MAX_WAIT_MS:
            raise ValueError(f"max_wait_ms is {max_wait_ms}; expected 0 to {MAX_WAIT_MS:g}")
        if max_rows < 1:
            raise ValueError(f"max_rows is {max_rows}; expected at least 1")
        self._goal_ms = goal_ms
        self._max_wait_ms = min(max_wait_ms, WAIT_SHARE * goal_ms)
        self._max_rows = max_rows
        self.limit_rows = min(FIRST_ROWS, max_rows)  # most rows of a call now
        self._cost = CallCost()
        self._line: tuple[float, float] | None = None
        self._asked: deque[float] = deque(maxlen=64)  # when the latest requests came, seconds
        self._took: deque[tuple[float, float]] = deque(maxlen=32)  # ends of the latest calls, their seconds
        self._late: deque[bool] = deque(maxlen=_LATEST)
        self._halved = 0
        self._calls = 0
        self._request_rows = 1.0  # of a typical request
        self._joined = 2.0  # requests of a typical call out of the queue; hopeful until measured
        self._window_ms = 0.0
        self._why = ""  # requests are run alone; empty while they are joined
        self._until_look = LOOK_EVERY

    def batch_rows(self) -> int:
        """Return the most rows of the next call that joins requests.

        Where requests are run alone, a look joins two: that tells what joining saves, and more would keep
        the first of them waiting for all the others.
        """
        return min(self.limit_rows, max(round(2 * self._request_rows), 2)) if self._why else self.limit_rows

    def arrived(self, now: float) -> None:
        """Note that a request came, `now` in seconds of any clock that only goes on."""
        self._asked.append(now)

    def alone(self) -> bool:
        """Whether the request at hand is to be run by itself.

        Each LOOK_EVERY-th one is not, so that a change is found out: others may join it.
        """
        if not self._why:
            return False
        self._until_look -= 1
        if self._until_look > 0:
            return True
        self._until_look = LOOK_EVERY
        return False

    def window_ms(self, now: float) -> float:
        """Return how long the first request of a batch waits for others on purpose: mostly 0."""
        if self._window_ms and self._busy_ratio(now) <= BUSY_RATIO / 2:
            self._window_ms = 0.0  # the rush is over
        return self._window_ms

    def ran(
        self, now: float, rows: int, requests: int, call_ms: float, *, queued: bool, full: bool = False
    ) -> None:
        """Learn from one call.

        Args:
            now: when it ended, seconds of the same clock as in `arrived`.
            rows: of all its requests together.
            requests: how many they were.
            call_ms: what the call took.
            queued: whether it came out of the queue, where requests could join.
            full: whether a request was left waiting because its rows were too many.
        """
        self._cost.add(rows, call_ms)
        self._took.append((now, call_ms / 1e3))
        self._request_rows += 0.05 * (rows / requests - self._request_rows)
        self._calls += 1
        if queued:
            self._joined += 0.02 * (requests + full - self._joined)  # who is left waiting would have joined
            late = self._window_ms + 2 * call_ms > self._goal_ms
            self._steer_rows(rows, requests, late, full)
            self._steer_window(now, late, full)
        if queued or self._calls % _REFIT_EVERY == 0:
            self._decide()

    def state(self) -> dict[str, Any]:
        """Return what was measured and what follows from it, for metrics and reports."""
        fixed_ms, row_ms = self._line or (None, None)
        return {
            "decision": "alone" if self._why else "wait" if self._window_ms else "join",
            "why": self._why or ("not known yet" if self._line is None else "joining saves the fixed cost"),
            "window_ms": self._window_ms,
            "limit_rows": self.limit_rows,
            "fixed_ms": fixed_ms,
            "row_ms": row_ms,
            "rows_per_request": self._request_rows,
            "requests_per_queued_call": self._joined,
            "requests_per_s": self._per_ms(self._asked[-1]) * 1e3 if self._asked else 0.0,
            "busy_ratio": self._busy_ratio(self._took[-1][0]) if self._took else 0.0,
            "calls": self._calls,
            "late_ratio": sum(self._late) / max(len(self._late), 1),
            "halved": self._halved,
        }

    def _per_ms(self, now: float) -> float:
        """Return requests per millisecond over the latest ones; it falls while none comes."""
        span_ms = (now - self._asked[0]) * 1e3 if self._asked else 0.0
        return (len(self._asked) - 1) / span_ms if span_ms > 0 else 0.0

    def _busy_ratio(self, now: float) -> float:
        """Return the share of the time that the latest calls took; it falls while there is none."""
        if len(self._took) < _ENOUGH:
            return 0.0
        span_s = now - self._took[0][0]  # the first one's end: its own seconds do not count
        return (sum(s for _, s in self._took) - self._took[0][1]) / span_s if span_s > 0 else 0.0

    def _steer_rows(self, rows: int, requests: int, late: bool, full: bool) -> None:
        self._late.append(late and requests > 1)  # one request cannot be made smaller
        if sum(self._late) > LATE_RATIO * _LATEST:
            self.limit_rows = max(min(self.limit_rows, rows) // 2, 1)
            self._halved += 1
            self._late.clear()  # those calls have been answered for
        elif full and not late and rows + self._request_rows > self.limit_rows:
            self.limit_rows = min(self.limit_rows + max(round(self._request_rows), 1), self._max_rows)

    def _steer_window(self, now: float, late: bool, full: bool) -> None:
        row_ms = self._line[1] if self._line else 0.0
        # With so much work in the rows themselves no wait would be enough; an idle model makes it worse.
        hopeless = self._per_ms(now) * row_ms * self._request_rows > BUSY_RATIO
        if self._why or late or full or hopeless or self._busy_ratio(now) <= BUSY_RATIO:
            self._window_ms /= 2
            if self._window_ms < WINDOW_STEP_MS:
                self._window_ms = 0.0
        else:
            self._window_ms = min(self._window_ms + WINDOW_STEP_MS, self._max_wait_ms)

    def _decide(self) -> None:
        if self._calls % _REFIT_EVERY == 0 or self._line is None:
            self._line = self._cost.line()
        self._why = ""
        if self._line is not None:
            fixed_ms, row_ms = self._line
            alone_ms = fixed_ms + row_ms * self._request_rows
            # Two that are joined save half the fixed cost each.
            if fixed_ms / 2 <= max(TRIP_MS, WORTH_RATIO * alone_ms):
                self._why = "joining saves less than it costs"
            elif fixed_ms * (1 - 1 / self._joined) <= TRIP_MS:
                self._why = "nobody to join"
        elif self._joined < _LONELY:
            self._why = "nobody to join"
