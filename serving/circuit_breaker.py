"""An online store that fails again and again -> no more reads of it, until one in the background succeeds."""

from __future__ import annotations

import logging
import random
import threading
from typing import TYPE_CHECKING

from serving.errors import FeaturesUnavailable, RowInvalid
from serving.feast_layout import UserRow
from serving.metrics import STORE_BREAKER_OPEN, STORE_READS

if TYPE_CHECKING:
    from serving.online_features import OnlineStore

FAILURES = 3  # in a row, until the breaker opens
PROBE_S = 0.5  # between two reads in the background while it is open
_PROBE_USER = ""  # of whom the store holds nothing

_log = logging.getLogger(__name__)
_reads = {name: STORE_READS.labels(name) for name in ("found", "absent", "invalid", "failed", "refused")}


class CircuitBreaker:
    """Reads through to a store while it is well, and fails at once while it is not; threads may share it.

    A row that is broken is no failure of the store: one bad row must not take everybody's away.
    """

    def __init__(self, store: OnlineStore, *, failures: int = FAILURES, probe_s: float = PROBE_S) -> None:
        self._store = store
        self._limit = failures
        self._probe_s = probe_s
        self._lock = threading.Lock()
        self._failures = 0  # in a row
        self._opened: threading.Event | None = None  # set to end the probing; none while closed
        self._probing: threading.Thread | None = None

    @property
    def is_open(self) -> bool:
        """Whether reads fail without asking the store."""
        return self._opened is not None

    def read(self, user_id: str) -> UserRow | None:
        """Return the user's row, or None for a user the store does not know.

        Raises:
            RowInvalid: the user's row cannot be read.
            FeaturesUnavailable: the store failed, now or a few times before.
        """
        if self._opened is not None:
            _reads["refused"].inc()
            raise FeaturesUnavailable("the online store failed repeatedly and is not asked until it is back")
        try:
            row = self._store.read(user_id)
        except RowInvalid:
            self._failures = 0
            _reads["invalid"].inc()
            raise
        except FeaturesUnavailable as error:
            _reads["failed"].inc()
            self._failed(error)
            raise
        self._failures = 0
        _reads["absent" if row is None else "found"].inc()
        return row

    def close(self) -> None:
        """Stop probing and let go of the store's connections; a later read opens them again."""
        with self._lock:
            self._shut(self._opened)
            probing, self._probing = self._probing, None
        if probing is not None:
            probing.join()  # a read that is under way would open connections again
        self._store.close()

    def _failed(self, error: FeaturesUnavailable) -> None:
        with self._lock:
            self._failures += 1
            if self._failures < self._limit or self._opened is not None:
                return
            self._opened = threading.Event()
            STORE_BREAKER_OPEN.set(1)
            _log.warning("the online store failed %d times in a row, reads pause: %s", self._failures, error)
            probing = threading.Thread(
                target=self._probe, args=(self._opened,), name="store-probe", daemon=True
            )
            try:
                probing.start()
                self._probing = probing
            except RuntimeError:  # no more threads: nothing could ever close it again
                self._shut(self._opened)

    def _probe(self, over: threading.Event) -> None:
        """Read until the store answers, then close the breaker."""
        try:
            # Not all replicas of the endpoint at once.
            while not over.wait(self._probe_s * random.uniform(0.8, 1.2)):
                try:
                    self._store.read(_PROBE_USER)
                except RowInvalid:
                    pass  # an answer, too
                except FeaturesUnavailable:
                    continue
                _log.info("the online store is back")
                return
        finally:
            with self._lock:
                self._shut(over)

    def _shut(self, opened: threading.Event | None) -> None:
        """Close the breaker if it is this opening's; the lock is held."""
        if opened is not None and self._opened is opened:
            opened.set()
            self._opened = None
            self._failures = 0
            STORE_BREAKER_OPEN.set(0)
