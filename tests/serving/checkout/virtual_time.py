"""Run coroutines that wait and work on a virtual clock that jumps: load without real time.

A wait takes no real time, and work reports its duration. So a test of timeouts cannot be late on a busy
machine, and a bench can put load on a model that does not exist.
"""

from __future__ import annotations

import asyncio
import selectors


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop that jumps to its next timer instead of waiting for it; `now` is its clock, in s."""

    def __init__(self) -> None:
        self.now = 0.0
        super().__init__(_Jumping(self))

    def time(self) -> float:
        """Return the virtual time, for timers and for clocks that are passed on."""
        return self.now

    def work(self, ms: float) -> None:
        """Let time pass while the loop is blocked, as by a model call."""
        self.now += ms / 1e3


class _Jumping(selectors.DefaultSelector):
    """Polls its files without waiting."""

    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise RuntimeError("everything waits for something that never comes")
        self._loop.now += max(timeout, 0.0)
        return super().select(0)
