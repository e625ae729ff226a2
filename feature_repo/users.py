"""A user's row and a moment -> the user's events, history and sums as of then."""

from __future__ import annotations

from functools import cached_property

import numpy as np

from feature_repo.aggregates import (
    IMPRESSION,
    PURCHASE,
    Totals,
    UserEvents,
    UserHistory,
    merge_lines,
    summary_of,
)
from feature_repo.kernels.history import last_distinct, totals_of
from feature_repo.kernels.pairs import LAST_ITEMS

MINUTE_S, HOUR_S = 60, 3_600


class User:
    """One user's events strictly before `at`, an item once in each basket.

    `events.items` are codes of the catalogue, -1 outside it. In the offline store they are ids: a feature
    that looks at single items takes `Rows`.
    """

    def __init__(self, events: UserEvents, at: float) -> None:
        self._read = events.before(at)
        self.at = at
        self._kinds: dict[int, UserEvents] = {}
        self._windows: dict[tuple[float, int | None], EventWindow] = {}

    @cached_property
    def events(self) -> UserEvents:
        """All events; lines of one item in one basket are added up."""
        return merge_lines(self._read)

    @cached_property
    def _summary(self) -> tuple[UserHistory, Totals]:
        return summary_of(self._read, self.at)

    @property
    def history(self) -> UserHistory:
        """The items that the user bought, those outside the catalogue included."""
        return self._summary[0]

    @property
    def totals(self) -> Totals:
        """Sums over the events."""
        return self._summary[1]

    @property
    def spend_per_line(self) -> float:
        """Mean paid per line, in the shop's currency."""
        return self.totals.spend / max(self.totals.lines, 1)

    def of(self, kind: int | None) -> UserEvents:
        """Return the events of one kind; of all without one."""
        if kind is None:
            return self.events
        if kind not in self._kinds:
            self._kinds[kind] = self.events.where(self.events.kind == kind)
        return self._kinds[kind]

    @cached_property
    def acts(self) -> UserEvents:
        """All events but impressions, which are acts of the shop."""
        if not self.totals.impressions:
            return self.events
        return self.events.where(self.events.kind != IMPRESSION)

    @cached_property
    def session(self) -> UserEvents:
        """The acts since the last pause of SESSION_GAP_S; empty during a pause."""
        return self.acts.where(slice(len(self.acts) - int(self.totals.session_lines), None))

    @cached_property
    def last_items(self) -> np.ndarray:
        """The LAST_ITEMS items that the user bought or clicked last, the latest first."""
        acts = self.acts if self.totals.impressions else self._read
        return acts.items[last_distinct(acts.item, 200, LAST_ITEMS)]

    def window(self, seconds: float, kind: int | None = PURCHASE) -> EventWindow:
        """Return the events of one kind (None: of all) in the last `seconds`."""
        window = self._windows.get((seconds, kind))
        if window is None:
            events = self.of(kind)
            window = EventWindow(events, int(events.at.searchsorted(self.at - seconds)))
            self._windows[seconds, kind] = window
        return window


class EventWindow:
    """The events from number `first` on: counts, sums and distinct values."""

    def __init__(self, events: UserEvents, first: int = 0) -> None:
        self._events, self._first = events, first

    @cached_property
    def events(self) -> UserEvents:
        """The events of the span."""
        return self._events.where(slice(self._first, None))

    @property
    def baskets(self) -> int:
        """Number of baskets."""
        return self._totals[0]

    @property
    def items(self) -> int:
        """Number of distinct items."""
        return self._totals[1]

    @property
    def spend(self) -> float:
        """Paid, in the shop's currency."""
        return self._totals[2]

    @cached_property
    def _totals(self) -> tuple[int, int, float]:
        events, rows = self._events, slice(self._first, None)
        totals: tuple[int, int, float] = totals_of(
            events.at[rows], events.basket[rows], events.item[rows], events.paid[rows], len(events.items)
        )
        return totals
