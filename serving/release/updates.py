"""A home's champion -> the bundle that answers: a promoted one is loaded beside it and takes over.

    look -> the pointer names another bundle -> load and verify it, in this thread -> take over
                                                        └─ broken: refused, counted, and the old one stays

Requests go on meanwhile: hashing, mapping and opening the graphs leave the interpreter to them, and the rest
hands it over every half millisecond. A request that began with the old bundle ends with it; with the last
of them goes the old bundle.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path

from serving.errors import BundleInvalid, NoChampion
from serving.metrics import BUNDLE_UPDATES, CHAMPION_READ_AT, CHAMPION_SERVED
from serving.release.champion import Champion, read_champion

POLL_S = 1.0
RETRY_S = 60.0  # a refused bundle is looked at again: its files may have been mended
_log = logging.getLogger(__name__)


# Loads a bundle and lets it answer from then on; returns the rest of the work. It raises BundleInvalid, or
# anything else, for one that must not answer.
Take = Callable[[Champion], Callable[[], None]]


class Updates:
    """Follows a home's champion for an endpoint that answers."""

    def __init__(
        self,
        home: Path,
        serving: str,
        take: Take,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Take the home, the id of the bundle that answers, the taker of another, and a clock in seconds."""
        self.serving = serving
        self._home, self._take, self._clock = home, take, clock
        self._refused: Champion | None = None
        self._retry_at = 0.0
        self._unread = ""
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="updates", daemon=True)

    def start(self) -> None:
        """Look once a second until `close`."""
        self._thread.start()

    def close(self) -> None:
        """Stop looking; a bundle that is being loaded is waited for."""
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join()

    def look(self) -> None:
        """Look at the pointer once, and take its bundle if another one answers."""
        try:
            pointer, self._unread = read_champion(self._home), ""
        except NoChampion as error:
            if str(error) != self._unread:
                _log.error("%s stays: %s", self.serving, error)
            self._unread = str(error)
            return
        CHAMPION_READ_AT.set(time.time())
        if pointer.bundle_id == self.serving:
            self._refused = None
        elif pointer != self._refused or self._clock() >= self._retry_at:
            self._update(pointer)
        CHAMPION_SERVED.set(pointer.bundle_id == self.serving)

    def _update(self, pointer: Champion) -> None:
        self._refused = None
        try:
            follow_up = self._take(pointer)
        except BundleInvalid as error:
            self._refuse(pointer, str(error))
            return
        except Exception as error:  # noqa: BLE001 - the edge of the thread: no bundle may end the watch
            if not self._closing.is_set():
                self._refuse(pointer, f"{error.__class__.__name__}: {error}")
            return
        self.serving = pointer.bundle_id
        BUNDLE_UPDATES.labels("done").inc()
        try:
            follow_up()
        except Exception:  # noqa: BLE001 - the same; the endpoint answers all the same
            _log.exception("%s answers, but not all that belongs to a swap was done", pointer.bundle_id)

    def _refuse(self, pointer: Champion, why: str) -> None:
        self._refused, self._retry_at = pointer, self._clock() + RETRY_S
        BUNDLE_UPDATES.labels("refused").inc()
        _log.error("champion %s is refused, %s goes on answering: %s", pointer.bundle_id, self.serving, why)

    def _watch(self) -> None:
        while not self._closing.wait(POLL_S):
            self.look()
