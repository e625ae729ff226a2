"""What one would use without this project: simple rankers over the whole catalogue, scored beside it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from feature_repo.queries import Query
from feature_repo.statistics import SOLD_28D
from serving.stages.item_index import FaissTower

# A baseline takes the query, the best sellers of its store (or None) and the two-tower search, and
# returns a score per item of the catalogue, (n,).
Baseline = Callable[[Query, "np.ndarray | None", FaissTower], np.ndarray]

TOWER_DEPTH = 600  # items: no metric looks so far down


def popularity(query: Query, store: np.ndarray | None, tower: FaissTower) -> np.ndarray:
    """Baskets in the 4 weeks until the night before, as our ranker knows them."""
    return query.statistics.fresh[:, SOLD_28D].astype(np.float64)


def store_popularity(query: Query, store: np.ndarray | None, tower: FaissTower) -> np.ndarray:
    """Best sellers of the store at the cut first, then those of the chain."""
    scores = _tie_break(query)
    if store is not None:
        scores[store] += np.arange(len(store), 0, -1)
    return scores


def personal(query: Query, store: np.ndarray | None, tower: FaissTower) -> np.ndarray:
    """The user's own 120-day decayed purchase counts, popularity breaking ties."""
    scores = 1e-3 * _tie_break(query)
    scores[query.history.items] += query.history.decayed[2]
    return scores


def together(query: Query, store: np.ndarray | None, tower: FaissTower) -> np.ndarray:
    """Bought together with the basket: pairs / (n_basket_item^0.7 n_item^0.3), summed over the basket."""
    scores = 1e-6 * _tie_break(query)
    scores[query.together.codes] += query.together.sums[0]
    return scores


def blend(query: Query, store: np.ndarray | None, tower: FaissTower) -> np.ndarray:
    """Personal (log) and together, each divided by its maximum, added: the best that needs no training."""
    scores = 1e-6 * _tie_break(query)
    own = np.log1p(query.history.decayed[2])
    if len(own):
        scores[query.history.items] += own / max(own.max(), 1e-9)
    if len(query.together.codes):
        scores[query.together.codes] += query.together.sums[0] / max(query.together.sums[0].max(), 1e-9)
    return scores


def two_tower(query: Query, store: np.ndarray | None, tower: FaissTower) -> np.ndarray:
    """The two-tower model alone: retrieval by vector and nothing after it."""
    scores = np.zeros(len(query.statistics.item_ids))
    found = tower.search(query, min(TOWER_DEPTH, len(scores)))
    scores[found] = np.arange(len(found), 0, -1)
    return scores


BASELINES: dict[str, Baseline] = {
    "popularity": popularity,
    "store_popularity": store_popularity,
    "personal": personal,
    "together": together,
    "blend": blend,
    "two_tower": two_tower,
}


def _tie_break(query: Query) -> np.ndarray:
    counts = query.statistics.fresh[:, SOLD_28D].astype(np.float64)
    return counts / max(counts.max(), 1.0) * 0.99
