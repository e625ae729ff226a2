"""The stream's heartbeat -> whether the rows of the online store are fresh.

Feast does not apply a view's time to live to online reads, and an old row may only mean that the shopper
stayed away. So the stream writes a heartbeat row every second. A thread reads it here; requests read an
attribute.
"""

from __future__ import annotations

import logging
import threading
import time

from feature_repo.snapshots import HEARTBEAT, PARTITIONS, unpack_times
from serving.errors import FeaturesUnavailable
from serving.metrics import FEATURES_AGE
from serving.stores.online_features import OnlineStore

POLL_S = 1.0
_log = logging.getLogger(__name__)


class Freshness:
    """Reports an online store that is no longer updated; a store that never had a stream never ages.

    `reason` is "stale_features" while the stream is silent for too long, else None.
    A heartbeat that disappears or is damaged keeps ageing: nothing shows that the rows are current.
    """

    def __init__(self, store: OnlineStore | None = None, stale_after_s: float = 60.0) -> None:
        """Look once, then every second until `close`; without a store nothing is ever stale."""
        self._store, self._stale_after_s = store, stale_after_s
        self._beat_at: float | None = None
        self.reason: str | None = None
        self._closing = threading.Event()
        if store is not None:
            self._look()
            self._thread = threading.Thread(target=self._watch, name="freshness", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Stop looking."""
        self._closing.set()
        if self._store is not None:
            self._thread.join()

    def _watch(self) -> None:
        while not self._closing.wait(POLL_S):
            try:
                self._look()
            except Exception:  # noqa: BLE001 - the thread must go on: without it no answer is ever stale, or all are
                _log.exception("the heartbeat could not be looked at")

    def _look(self) -> None:
        assert self._store is not None
        try:
            row, partitions = self._store.read(HEARTBEAT), self._store.read(PARTITIONS)
        except FeaturesUnavailable:
            row = partitions = None  # requests report the failure themselves; the last heartbeat keeps ageing
        until = {} if partitions is None else unpack_times(partitions.history)
        if row is not None and until is not None:
            # The rows are complete until the time of the partition that is furthest behind.
            self._beat_at = min(until.values(), default=row.written_at)
        if self._beat_at is None:
            return
        age_s = time.time() - self._beat_at
        FEATURES_AGE.set(max(age_s, 0.0))
        before, self.reason = self.reason, "stale_features" if age_s > self._stale_after_s else None
        if before is not None and self.reason is None:
            _log.warning("the stream is back: features are fresh again")
