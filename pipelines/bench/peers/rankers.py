"""Purchases before a cut -> scores of the whole catalogue for a basket, by the well-known methods.

Each peer has a small grid of parameters; the validation weeks choose. All get the same request: the visible
basket, and the shopper's own earlier baskets up to that moment.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from implicit.als import AlternatingLeastSquares
from implicit.bpr import BayesianPersonalizedRanking
from implicit.nearest_neighbours import CosineRecommender, TFIDFRecommender
from implicit.utils import ParameterWarning
from scipy.sparse import csr_matrix
from threadpoolctl import threadpool_limits

from components.data.fit_statistics import Purchases
from components.evaluation.protocol import Task
from feature_repo.aggregates import DAY_S, PURCHASE
from feature_repo.statistics import Statistics
from pipelines.bench.peers.sequence import fit_sasrec

EASE_ITEMS = 10_000  # the most bought ones: the method inverts a square matrix of them
THREADS = 2


@dataclass(frozen=True)
class PeerRequest:
    """One request: codes of the basket, and of the shopper's earlier lines with basket number and age."""

    user: int
    visible: np.ndarray  # (v,)
    item: np.ndarray  # (m,) oldest first
    basket: np.ndarray  # (m,) number of the own basket, from 0
    age_days: np.ndarray  # (m,)

    def counts(self, items: int, weight: np.ndarray | float = 1.0) -> np.ndarray:
        """Return the weights of the earlier lines, summed by item, (items,)."""
        return np.bincount(self.item, np.broadcast_to(weight, self.item.shape), items)


@dataclass(frozen=True)
class Seen:
    """The purchases that peers are fitted on, as codes of one catalogue."""

    items: int
    user: np.ndarray  # (n,) lines sorted by shopper and time
    basket: np.ndarray  # (n,) number of the basket, over all shoppers
    item: np.ndarray  # (n,)
    own: np.ndarray  # (n,) number of the basket among the shopper's own, from 0
    users: int

    @property
    def by_basket(self) -> csr_matrix:
        """Baskets x items, 1 where bought."""
        return _matrix(self.basket, self.item, (int(self.basket.max()) + 1, self.items))

    @property
    def by_user(self) -> csr_matrix:
        """Shoppers x items, the number of purchases."""
        return _matrix(self.user, self.item, (self.users, self.items))

    def weighted(self, weight: np.ndarray) -> csr_matrix:
        """Return shoppers x items with the summed weights of the lines."""
        return _matrix(self.user, self.item, (self.users, self.items), weight)

    @property
    def own_baskets(self) -> np.ndarray:
        """How many baskets each shopper has, (users,)."""
        last = np.zeros(self.users, np.int64)
        np.maximum.at(last, self.user, self.own + 1)
        return last


Score = Callable[[PeerRequest], np.ndarray]  # (items,) float


@dataclass(frozen=True)
class Peer:
    """A method: its library, its fit, and the parameters that are tried."""

    library: str
    fit: Callable[..., Score]  # (seen, **parameters)
    grid: tuple[Mapping[str, Any], ...] = field(default=({},))
    with_own: bool = False  # also as a mix with the shopper's own purchases


def read_seen(purchases: Purchases, statistics: Statistics) -> Seen:
    """Return purchases as codes of a catalogue; items outside of it are left out."""
    code = statistics.each_code(purchases.item_ids.tolist())
    item = code[purchases.item]
    rows = np.flatnonzero(item >= 0)
    order = rows[np.lexsort((purchases.basket[rows], purchases.at[rows], purchases.user[rows]))]
    user, basket = purchases.user[order].astype(np.int64), purchases.basket[order]
    begins = np.r_[True, (basket[1:] != basket[:-1]) | (user[1:] != user[:-1])]
    number = np.cumsum(begins) - 1
    first = np.zeros(len(purchases.user_ids), np.int64)
    new_user = np.flatnonzero(np.r_[True, user[1:] != user[:-1]])
    first[user[new_user]] = number[new_user]
    return Seen(
        len(statistics.item_ids), user, number, item[order], number - first[user], len(purchases.user_ids)
    )


def read_asked(task: Task, statistics: Statistics) -> PeerRequest:
    """Return a task's request as codes of a catalogue."""
    history = task.history
    number = np.cumsum(history.begins()) - 1
    item = statistics.each_code(history.items.tolist())[history.item]
    kept = (item >= 0) & (history.kind == PURCHASE)
    _, number = np.unique(number[kept], return_inverse=True)
    age = (task.at - history.at[kept]) / DAY_S
    return PeerRequest(task.user, statistics.codes(task.visible), item[kept], number, age)


def fit_personal(seen: Seen, tau_days: float) -> Score:
    """Score by the own purchases, decayed with their age; infinity: counted."""
    return lambda asked: asked.counts(seen.items, np.exp(-asked.age_days / tau_days))


def fit_item_knn(seen: Seen, weighting: str, neighbours: int) -> Score:
    """Score by the items' similarity in baskets (Deshpande and Karypis, 2004)."""
    makers = {"cosine": CosineRecommender, "tf-idf": TFIDFRecommender}
    model = makers[weighting](K=neighbours, num_threads=THREADS)
    with warnings.catch_warnings(action="ignore", category=ParameterWarning):  # of its own conversion
        model.fit(seen.by_basket, show_progress=False)
    similarity = csr_matrix(model.similarity)
    return lambda asked: np.asarray(similarity[asked.visible].sum(axis=0)).ravel()


def fit_ease(seen: Seen, penalty: float) -> Score:
    """Score by the linear item-item model in closed form (Steck, arXiv 1905.03375), fitted on baskets."""
    popular = np.argsort(-np.bincount(seen.item, minlength=seen.items), kind="stable")[:EASE_ITEMS]
    place = np.full(seen.items, -1)
    place[popular] = np.arange(len(popular))
    baskets = seen.by_basket[:, popular]
    gram = (baskets.T @ baskets).toarray().astype(np.float32)
    gram[np.diag_indices_from(gram)] += penalty
    weights = np.linalg.inv(gram)
    weights /= -np.diag(weights)
    np.fill_diagonal(weights, 0)

    def score(asked: PeerRequest) -> np.ndarray:
        scores = np.zeros(seen.items)
        rows = place[asked.visible]
        scores[popular] = weights[rows[rows >= 0]].sum(axis=0)
        return scores

    return score


def fit_tifu_knn(seen: Seen, neighbours: int, own_share: float, within: float, across: float) -> Score:
    """Score by decayed own baskets and those of the nearest shoppers (Hu et al., arXiv 2006.00556).

    A group is seven baskets; `within` is the decay inside a group, `across` that from group to group.
    """
    size = 7

    def weight(basket: np.ndarray, last: np.ndarray | int) -> np.ndarray:
        group, place = np.divmod(last - basket, size)
        return np.asarray(within**place * across**group / size)

    groups = np.maximum(np.ceil(seen.own_baskets / size), 1)
    last = seen.own_baskets[seen.user] - 1
    known = seen.weighted(weight(seen.own, last) / groups[seen.user])
    square = np.asarray(known.multiply(known).sum(axis=1)).ravel()

    def score(asked: PeerRequest) -> np.ndarray:
        if not len(asked.item):
            return np.asarray(known.mean(axis=0)).ravel()
        baskets = int(asked.basket[-1]) + 1
        own = asked.counts(seen.items, weight(asked.basket, baskets - 1) / np.ceil(baskets / size))
        distance = square - 2 * (known @ own)
        distance[asked.user] = np.inf
        near = np.argpartition(distance, min(neighbours, seen.users - 1))[:neighbours]
        return own_share * own + (1 - own_share) * np.asarray(known[near].mean(axis=0)).ravel()

    return score


def fit_up_cf(seen: Seen, window: int, alpha: float, power: float) -> Score:
    """Score by the recent baskets of the shopper and of like ones (Faggioli, Polato, Aiolli, UMAP 2020)."""
    baskets = seen.own_baskets
    recent = seen.own >= baskets[seen.user] - window
    known = seen.weighted(recent / np.minimum(baskets, window).clip(1)[seen.user])
    length = np.asarray(known.multiply(known).sum(axis=1)).ravel()

    def score(asked: PeerRequest) -> np.ndarray:
        if not len(asked.item):
            return np.asarray(known.mean(axis=0)).ravel()
        count = int(asked.basket[-1]) + 1
        own = asked.counts(seen.items, (asked.basket >= count - window) / min(count, window))
        both = (own @ own) ** alpha * length ** (1 - alpha)
        like = np.divide(known @ own, both, out=np.zeros(seen.users), where=both > 0) ** power
        like[asked.user] = 0.0
        return own + np.asarray(known.T @ like).ravel()

    return score


def fit_als(seen: Seen, rows: str, factors: int) -> Score:
    """Score by implicit matrix factorisation (Hu, Koren, Volinsky, 2008); a basket is folded in."""
    matrix = seen.by_basket if rows == "baskets" else seen.by_user
    with threadpool_limits(1, "blas"):  # the library shares out its own threads
        model = AlternatingLeastSquares(
            factors=factors,
            regularization=0.05,
            alpha=10.0,
            iterations=12,
            num_threads=THREADS,
            random_state=0,
        )
        model.fit(matrix.astype(np.float32), show_progress=False)
    model.num_threads = 1  # for each request: with more, OpenBLAS warns at every parallel loop

    def score(asked: PeerRequest) -> np.ndarray:
        codes = asked.visible if rows == "baskets" else np.concatenate([asked.item, asked.visible])
        row = _matrix(np.zeros(len(codes), np.int64), codes, (1, seen.items)).astype(np.float32)
        vector = model.recalculate_user(0, row)
        return np.asarray(model.item_factors @ np.asarray(vector).ravel(), np.float64)

    return score


def fit_bpr(seen: Seen, learning_rate: float, iterations: int) -> Score:
    """Score by pairwise matrix factorisation (Rendle et al., arXiv 1205.2618); strangers get the mean."""
    model = BayesianPersonalizedRanking(
        factors=64,
        learning_rate=learning_rate,
        regularization=0.01,
        iterations=iterations,
        num_threads=THREADS,
        random_state=0,
    )
    model.fit(seen.by_user.astype(np.float32), show_progress=False)
    mean = model.user_factors.mean(axis=0)
    known = np.isin(np.arange(seen.users), seen.user)
    return lambda asked: np.asarray(
        model.item_factors @ (model.user_factors[asked.user] if known[asked.user] else mean), np.float64
    )


PEERS: dict[str, Peer] = {
    "personal frequency": Peer("NumPy", fit_personal, ({"tau_days": np.inf},)),
    "personal, decayed": Peer("NumPy", fit_personal, tuple({"tau_days": t} for t in (60.0, 120.0, 240.0))),
    "item-kNN": Peer(
        "implicit",
        fit_item_knn,
        tuple({"weighting": w, "neighbours": k} for w in ("cosine", "tf-idf") for k in (200, 1_000, 4_000)),
        with_own=True,
    ),
    "EASE": Peer("NumPy", fit_ease, tuple({"penalty": p} for p in (10.0, 30.0, 100.0)), with_own=True),
    "UP-CF": Peer(
        "SciPy",
        fit_up_cf,
        tuple({"window": w, "alpha": 0.75, "power": q} for w in (10, 25, 50) for q in (5.0, 50.0, 100.0)),
    ),
    "TIFU-kNN": Peer(
        "SciPy",
        fit_tifu_knn,
        tuple(
            {"neighbours": n, "own_share": s, "within": 0.9, "across": a}
            for n in (100, 300, 900)
            for s in (0.7, 0.9)
            for a in (0.7, 0.9, 0.97)
        ),
    ),
    "ALS": Peer(
        "implicit",
        fit_als,
        (
            {"rows": "baskets", "factors": 64},
            {"rows": "baskets", "factors": 128},
            {"rows": "baskets", "factors": 256},
            {"rows": "users", "factors": 64},
        ),
        with_own=True,
    ),
    "BPR": Peer(
        "implicit",
        fit_bpr,
        tuple({"learning_rate": r, "iterations": n} for r in (0.003, 0.01) for n in (30, 100, 300)),
    ),
    "SASRec": Peer("PyTorch", fit_sasrec, tuple({"epochs": n} for n in (1, 2, 4))),
}


def _matrix(
    row: np.ndarray, column: np.ndarray, shape: tuple[int, int], value: np.ndarray | None = None
) -> csr_matrix:
    ones = np.ones(len(row)) if value is None else value
    return csr_matrix((ones, (row, column)), shape=shape)
