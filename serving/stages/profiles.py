"""A profile's name -> the quotas of its sources, the search of its index, its filter of items."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from feature_repo.statistics import Statistics
from serving.stages.item_index import FaissTower, ItemIndex, Search
from serving.stages.retrieval import Quotas

COLUMNS = ("price", "discount_ratio", "purchases_4w", "purchases_13w", "repeat_ratio", "age_days")


@dataclass(frozen=True)
class ItemFilter:
    """Items whose value in a column of the item table lies above a quantile of the catalogue's."""

    column: str
    above_quantile: float  # from 0 to 1

    def __post_init__(self) -> None:
        """Refuse an unknown column and an invalid quantile."""
        if self.column not in COLUMNS or not 0 <= self.above_quantile < 1:
            raise ValueError(
                f"items with {self.column!r} above quantile {self.above_quantile}: expected one of "
                f"{', '.join(COLUMNS)} and a number from 0 to less than 1"
            )

    def allowed(self, statistics: Statistics) -> np.ndarray:
        """Return which items pass, (n,) bool; an item whose value is unknown does not."""
        values = np.asarray(getattr(statistics, self.column), np.float64)
        is_known = np.isfinite(values)
        passes = np.zeros(len(values), bool)
        if is_known.any():
            passes[is_known] = values[is_known] > np.quantile(values[is_known], self.above_quantile)
        return passes


@dataclass(frozen=True)
class Profile:
    """How candidates are found for one kind of request."""

    quotas: Quotas
    search: Mapping[str, int] = field(default_factory=dict)  # see `serving.stages.item_index.Search`
    items: ItemFilter | None = None


@dataclass(frozen=True, eq=False)
class OpenProfile:
    """A profile of a bundle in memory."""

    quotas: Quotas
    tower: FaissTower
    offers: np.ndarray  # (n,) bool, which items its filter passes; no removed ones


def read_profile(given: Mapping[str, Any]) -> Profile:
    """Return the profile of a manifest.

    Raises:
        TypeError, ValueError, KeyError: it is invalid.
    """
    items = given["items"]
    for name, value in given["search"].items():
        if type(value) is not int or value < 1:
            raise ValueError(f"search {name} is {value!r:.40}: expected a whole number from 1")
    return Profile(Quotas(**given["quotas"]), dict(given["search"]), items and ItemFilter(**items))


def open_profile(
    profile: Profile, statistics: Statistics, query_tower: Any, index: ItemIndex, removed: np.ndarray
) -> OpenProfile:
    """Return a profile ready to answer with a bundle's tables, its query tower and its index.

    The index is without the `removed` items, (r,) int64 codes; the other sources leave them out, too.
    """
    allowed = None if profile.items is None else profile.items.allowed(statistics)
    tower = FaissTower(query_tower, index, Search(profile.search, allowed))
    offers = np.ones(len(statistics.item_ids), bool) if allowed is None else allowed.copy()
    offers[removed] = False
    return OpenProfile(profile.quotas, tower, offers)
