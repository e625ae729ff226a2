"""A bundle and the purchases after its cut -> the bundle as each night's count leaves it.

Without training or promotion a night changes one thing: the day-fresh features of each item, counted to the
end of the day before (`reco refresh`). An evaluation over weeks asks each basket of the bundle of its day.
"""

from __future__ import annotations

from copy import copy

import pandas as pd

from components.data.fit_statistics import Purchases, fresh_by_day
from components.data.ingest_events import TEST_WINDOW
from feature_repo.item_days import DAY_S
from serving.answer.recommender import Recommender
from serving.release.bundle import Bundle


class Nightly:
    """The days of a test window, each with its own counts."""

    def __init__(self, bundle: Bundle, purchases: Purchases, start: pd.Timestamp | None = None) -> None:
        """Count the purchases before each day of the window, which begins at the bundle's cut if not said."""
        self._start = (start or pd.Timestamp(bundle.manifest["cut"])).timestamp()
        statistics = bundle.statistics
        fresh = fresh_by_day(
            purchases, statistics.item_ids, statistics.categorical[:, 0], self._start, TEST_WINDOW.days
        )
        self.statistics = [statistics.as_of(day) for day in fresh]  # of each day, the first as at the start
        self._recommenders: dict[tuple[Recommender, int], Recommender] = {}

    def recommender(self, recommender: Recommender, at: float) -> Recommender:
        """Return a recommender with the counts of the night before `at`; the bundle is the same otherwise."""
        day = int((at - self._start) // DAY_S)
        if (recommender, day) not in self._recommenders:
            bundle = copy(recommender.bundle)
            object.__setattr__(bundle, "statistics", self.statistics[day])
            other = copy(recommender)
            other.bundle = bundle
            self._recommenders[recommender, day] = other
        return self._recommenders[recommender, day]
