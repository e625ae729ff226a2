"""A dependency that keeps failing -> calls stop until a probe succeeds."""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable

from serving.metrics import BREAKER_OPEN

FAILURES = 3  # in a row, until the breaker opens
# The breaker also opens when MOST_FAILED of the LATEST calls failed, with any successes in between.
LATEST, MOST_FAILED = 20, 8
PROBE_S = 0.5  # between two probes while it is open
# Pause before the first probe; it doubles each time. If our process was late, the first probe succeeds.
FIRST_PROBE_S = 0.05


class CircuitBreaker:
    """Decides from the results of the latest calls whether to call the dependency; safe to share by threads.

    While it is open, a background thread probes the dependency: no request is spent on that.
    """

    def __init__(self, dependency: str, probe: Callable[[], bool], *, probe_s: float = PROBE_S) -> None:
        """Watch a dependency; `probe` calls it once and returns whether it works."""
        self._dependency, self._probe, self._probe_s = dependency, probe, probe_s
        self._gauge = BREAKER_OPEN.labels(dependency)
        # Of the same logger, the endpoint shows one such line a second: two dependencies may fail at once.
        self._log = logging.getLogger(f"{__name__}.{dependency}")
        self._lock = threading.Lock()
        self._failures = 0  # in a row
        # A bit for each of the latest calls, the newest the lowest; set where the call failed.
        self.failures_lately = 0
        self.is_open = False  # calls must not be made
        self._opened: threading.Event | None = None  # set to end the probing; None while closed
        self._probing: threading.Thread | None = None

    def succeeded(self) -> None:
        """Record a reply of any kind; needed only while there are `failures_lately`."""
        self._failures = 0
        self.failures_lately = self.failures_lately << 1 & _MASK

    def failed(self, why: object) -> None:
        """Record a failure: no reply, a late reply or an invalid one."""
        with self._lock:
            self._failures += 1
            self.failures_lately = self.failures_lately << 1 & _MASK | 1
            failed = self.failures_lately.bit_count()
            if self._opened is not None or (self._failures < FAILURES and failed < MOST_FAILED):
                return
            self._log.warning(
                "%s failed %d times in a row, in %d of the latest %d calls, and is not asked for now: %s",
                *(self._dependency, self._failures, failed, LATEST, why),
            )
            self._open()

    def close(self) -> None:
        """Stop probing and let calls through again."""
        with self._lock:
            self._shut(self._opened)
            probing, self._probing = self._probing, None
        if probing is not None:
            probing.join()

    def _open(self) -> None:
        """Open the breaker and start to probe; the lock is held."""
        self._opened = over = threading.Event()
        self.is_open = True
        self._gauge.set(1)
        name = f"{self._dependency.replace('_', '-')}-probe"
        probing = threading.Thread(target=self._watch, args=(over,), name=name, daemon=True)
        try:
            probing.start()
            self._probing = probing
        except RuntimeError:  # no thread can start, so nothing would ever close the breaker again
            self._shut(over)

    def _watch(self, over: threading.Event) -> None:
        """Probe until a probe succeeds, then close the breaker."""
        pause_s = FIRST_PROBE_S
        try:
            # Random pauses keep the replicas of the endpoint from probing at the same moment.
            while not over.wait(min(pause_s, self._probe_s) * random.uniform(0.8, 1.2)):
                pause_s *= 2
                if self._probe():
                    self._log.warning("%s is back", self._dependency)
                    return
        finally:
            with self._lock:
                self._shut(over)

    def _shut(self, opened: threading.Event | None) -> None:
        """Close the breaker if `opened` is its current opening; the lock is held."""
        if opened is not None and self._opened is opened:
            opened.set()
            self._opened = None
            self.is_open = False
            self._failures = self.failures_lately = 0
            self._gauge.set(0)


_MASK = (1 << LATEST) - 1
