"""Requests that came -> those that begin in this turn of the event loop; the others in the next ones.

A loop runs what is ready in the order in which it became so. In a burst, whoever has begun would wait at
each of his steps for the first step of all who came after him: hardly anybody would be in time, and a list
that many wait for would not be made before all of them are too late. Here a turn of the loop begins requests
for SLICE_S only, and then lets those that have begun go on; the others queue, those first for whom somebody
waits.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable

SLICE_S = 0.001  # of a turn of the loop, for first steps
MOST = 8  # of them in a slice, however quick the latest ones were
_WEIGHT = 0.2  # of the newest in the averages


class Turnstile:
    """Belongs to one event loop."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        """Take what tells the time in seconds."""
        self._clock = clock
        self._urgent: deque[asyncio.Future[None]] = deque()
        self._others: deque[asyncio.Future[None]] = deque()
        self._is_open = False  # somebody has begun in this turn
        self._until = 0.0  # of the clock, when this turn's slice is over
        self._let_in, self._looked, self._began = 0, 0.0, 0.0
        self._step_s = SLICE_S  # that a first step takes, or the latest ones if they took longer
        self._each_s = SLICE_S  # that one who queues waits for each before him, on average

    def enter(self, urgent: bool) -> asyncio.Future[None] | None:
        """Return None to who may begin now, else what he must wait for, or cancel.

        Who is not urgent may wait without end while others are.
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
        """Return how long who comes now would queue, if nobody more urgent came after him."""
        return (len(self._urgent) + len(self._others)) * self._each_s

    def _next(self) -> None:
        """Let in as many as a slice has room for; this runs once in each turn in which somebody began."""
        now, loop = self._clock(), asyncio.get_running_loop()
        if self._let_in:
            step_s = (now - self._began) / self._let_in
            self._step_s = max(self._step_s + _WEIGHT * (step_s - self._step_s), step_s)
            self._each_s += _WEIGHT * ((now - self._looked) / self._let_in - self._each_s)
        room, self._let_in, self._looked = max(min(int(SLICE_S / self._step_s), MOST), 1), 0, now
        self._until = now  # who comes while others queue comes after them
        loop.call_soon(self._begin)
        while self._let_in < room and (queue := self._urgent or self._others):
            turn = queue.popleft()
            if not turn.done():  # it is still waited for
                turn.set_result(None)
                self._let_in += 1
        self._is_open = self._let_in > 0
        if self._is_open:
            loop.call_soon(self._next)

    def _begin(self) -> None:
        self._began = self._clock()
