"""Purchases and statistics -> training examples, by replaying each user's baskets in time order.

Rolling origin: for each base in (cut - 20, -16, -12, -8, -4 weeks) the statistics are fitted on what
came before the base, and the examples are the baskets of the four weeks after it. A user's history is
the fold of that user's earlier baskets. So no feature sees its own week, nor its own basket; and the
candidates and features come out of the very functions that serve. One source is left out here, the
two-tower: it is trained on these very weeks and would bring the hidden items by heart.
"""

from __future__ import annotations

import logging
import math
import os
import shutil
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from components.examples import RankerExamples, RetrieverExamples, write_arrays, write_manifest
from components.fit_statistics import NoCatalogue, Purchases, fit, read_purchases
from components.parameters import read_params, require_positive, require_share
from feature_repo.aggregates import UserHistory, empty_history, fold
from feature_repo.schema import (
    BASKET_LENGTH,
    CATEGORICAL,
    DENSE_NAMES,
    HISTORY_LENGTH,
    model_inputs,
    tower_inputs,
)
from feature_repo.statistics import Statistics, read_statistics, read_vocabulary, write_statistics
from feature_repo.transforms import Query, Rows
from serving.retrieval import Quotas, restrict, retrieve

log = logging.getLogger(__name__)

WINDOW = pd.Timedelta(weeks=4)
BASKET_WIDTH = 64  # items of one basket the retriever trains on
MIN_BASKET_ITEMS = 4  # smaller baskets have nothing to hide and still say what the shopper is after
HIDDEN_RATIO = 0.2
GRAPH_DEGREE = 20  # neighbours of an item in the graph that a graph ranker smooths over
SHARES = 8  # users are split into as many, whatever the machine: the same seed gives the same examples


@dataclass(frozen=True)
class ExampleParams:
    """How many examples to build; `fast` runs lower the numbers, never the steps."""

    windows: int = 5
    negatives: int = 60  # per list, drawn from the retrieved candidates
    masks: int = 4  # lists made from one basket, each hiding other items; against one: NDCG@10 + 2.3 %
    user_ratio: float = 1.0  # users who give examples; all count in the statistics
    stranger_ratio: float = 0.1  # baskets asked once more without history, with any part of the basket
    calibration_ratio: float = 0.2  # users whose last window is held out of training, all candidates kept
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse examples of nothing, of nobody, or with none held out."""
        require_positive(self, "windows", "negatives", "masks")
        require_share(self, "stranger_ratio")
        if not 0 < self.calibration_ratio < 1:
            raise TypeError(
                f"ExampleParams.calibration_ratio is {self.calibration_ratio}, expected between 0 and 1"
            )
        if not 0 < self.user_ratio <= 1:
            raise TypeError(
                f"ExampleParams.user_ratio is {self.user_ratio}, expected a share: 0.1, or 1 for all"
            )


@dataclass(frozen=True)
class Basket:
    """One basket in a user's replay: what is bought at `at`, and the history strictly before."""

    basket: int
    user: int
    at: int
    items: np.ndarray  # sorted distinct dataset item codes
    paid: float
    discount: float
    store: int
    history: UserHistory


def replay(purchases: Purchases, users: np.ndarray | None = None) -> Iterator[Basket]:
    """Yield every basket of `users` (default all), user by user in time order, with its history.

    Baskets of one user that share a timestamp all see the history before it: no feature may know what
    happened at the very moment it is asked.
    """
    rows = np.arange(len(purchases.at)) if users is None else np.flatnonzero(np.isin(purchases.user, users))
    order = rows[
        np.lexsort((purchases.item[rows], purchases.basket[rows], purchases.at[rows], purchases.user[rows]))
    ]
    basket = purchases.basket[order]
    bounds = np.flatnonzero(np.r_[True, basket[1:] != basket[:-1], True]) if len(basket) else np.zeros(1, int)
    user, at = purchases.user[order], purchases.at[order]
    item, store = purchases.item[order], purchases.store[order]
    paid = np.add.reduceat(purchases.paid[order], bounds[:-1]) if len(basket) else np.empty(0)
    discount = np.add.reduceat(purchases.discount[order], bounds[:-1]) if len(basket) else np.empty(0)
    current, history = -1, empty_history(np.int64)
    waiting: list[Basket] = []
    for i, (begin, end) in enumerate(zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True)):
        if user[begin] != current:
            current, history, waiting = int(user[begin]), empty_history(np.int64), []
        if waiting and waiting[0].at != at[begin]:
            for earlier in waiting:
                history = fold(history, earlier.at, earlier.items, earlier.paid, earlier.discount)
            waiting = []
        one = Basket(
            int(basket[begin]),
            current,
            int(at[begin]),
            np.unique(item[begin:end]),
            float(paid[i]),
            float(discount[i]),
            int(store[begin]),
            history,
        )
        waiting.append(one)
        yield one


def build_examples(
    dataset: Path, statistics: Path, examples: Path, cut: str, params: dict[str, Any]
) -> dict[str, int]:
    """Write the retriever's and the ranker's examples of everything before `cut`.

    Args:
        dataset: what `ingest_events` wrote.
        statistics: what `fit_statistics` wrote for the same cut.
        examples: the directory to write.
        cut: ISO 8601 time; nothing at or after it is read.
        params: fields of `ExampleParams`.

    Returns:
        The number of retriever baskets, ranker lists and ranker rows.

    Raises:
        ValueError: too little history before the cut to build one window.
    """
    settings = read_params(ExampleParams, params)
    end = pd.Timestamp(cut)
    purchases, items = read_purchases(dataset)
    seen = purchases.before(end)
    vocabulary = read_vocabulary(statistics)
    bases = [end - WINDOW * (j + 1) for j in range(settings.windows)]
    bases = [base for base in bases if seen.at[0] < (base - WINDOW).timestamp()] if len(seen.at) else []
    if not bases:
        raise ValueError(
            f"the purchases before {cut} span less than two windows of {WINDOW.days} days: "
            "move --train-until later or bring more history"
        )
    examples.mkdir(parents=True, exist_ok=True)
    windows = examples / "windows"
    for done, base in enumerate(bases):
        try:
            fitted = fit(seen.before(base), items, vocabulary, base)
        except NoCatalogue as error:
            if done == 0:
                raise
            log.warning("windows before the first %d are left out: %s", done, error)
            bases = bases[:done]  # older ones hold less still
            break
        write_statistics(windows / str(done), fitted, vocabulary)
        log.info("window %d of %d: statistics before %s", done + 1, len(bases), base.date())

    users = np.random.default_rng(settings.seed).permutation(len(purchases.user_ids))
    users = users[: math.ceil(settings.user_ratio * len(users))]
    starts = [int(base.timestamp()) for base in bases]
    jobs = [
        (
            seen.where(np.isin(seen.user, share)),
            share,
            statistics,
            windows,
            starts,
            int(end.timestamp()),
            settings,
        )
        for share in np.array_split(users, SHARES)
    ]
    with ProcessPoolExecutor(min(os.cpu_count() or 1, SHARES), mp_context=get_context("spawn")) as pool:
        parts = list(pool.map(_build_share, jobs))
    retriever = _concatenate([part[0] for part in parts])
    train = _concatenate_lists([part[1] for part in parts])
    calibration = _concatenate_lists([part[2] for part in parts])
    if len(train.start) < 2:
        raise ValueError(
            f"no basket of the {len(bases)} training windows gives an example: a basket needs "
            f"{MIN_BASKET_ITEMS} catalogue items or more, one of which is found when it is hidden; "
            "bring larger baskets or more history"
        )
    write_arrays(examples / "retriever", retriever)
    write_arrays(examples / "ranker_train", train)
    write_arrays(examples / "ranker_calibration", calibration)
    _write_graph(examples, statistics, windows / str(len(bases) - 1), seen.item_ids)
    counts = {
        "retriever_baskets": len(retriever.basket),
        "ranker_lists": len(train.start) - 1,
        "ranker_rows": len(train.label),
        "calibration_lists": len(calibration.start) - 1,
    }
    shutil.rmtree(windows)
    write_manifest(
        examples, cut=cut, params=asdict(settings), bases=[base.isoformat() for base in bases], **counts
    )
    return counts


def _build_share(
    job: tuple[Purchases, np.ndarray, Path, Path, list[int], int, ExampleParams],
) -> tuple[RetrieverExamples, RankerExamples, RankerExamples]:
    """Build the examples of some users from their purchases: for retriever, ranker and calibration."""
    seen, users, statistics_path, windows_path, starts, end_s, params = job
    final = _Window(read_statistics(statistics_path), seen.item_ids)
    windows = [
        _Window(read_statistics(windows_path / str(i)), seen.item_ids, final.code) for i in range(len(starts))
    ]
    quotas, nobody = Quotas(), empty_history(np.int64)
    rng = np.random.default_rng([params.seed, int(users[0]) if len(users) else 0])
    held_out = np.random.default_rng(params.seed).random(len(seen.user_ids)) < params.calibration_ratio
    retriever: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
    lists: dict[bool, list[RankerExamples]] = {True: [], False: []}
    for basket in replay(seen):
        if (row := _retriever_row(final, basket)) is not None:
            retriever.append(row)
        window = next(
            (i for i, start in enumerate(starts) if start <= basket.at < start + WINDOW.total_seconds()), None
        )
        if window is None or basket.at >= end_s:
            continue
        calibrates = window == 0 and bool(held_out[basket.user])
        asked = [(basket, False)] * (1 if calibrates else params.masks)
        if rng.random() < params.stranger_ratio:
            asked.append((replace(basket, history=nobody), True))
        negatives = None if calibrates else params.negatives
        for one, stranger in asked:
            built = _ranker_list(windows[window], one, seen.store_ids, quotas, rng, negatives, stranger)
            if built is not None:
                lists[calibrates].append(built)
    return _stack(retriever), _concatenate_lists(lists[False]), _concatenate_lists(lists[True])


def _write_graph(examples: Path, statistics: Path, oldest: Path, item_ids: np.ndarray) -> None:
    """Write the bought-together graph as it was before the first example, in codes shifted by one."""
    final = _Window(read_statistics(statistics), item_ids)
    window = _Window(read_statistics(oldest), item_ids, final.code)
    found = window.statistics
    near = found.neighbours[:, :GRAPH_DEGREE]
    there = near >= 0
    share = np.where(there, found.together_count[:, :GRAPH_DEGREE], 0)
    share = share / np.sqrt(np.maximum(found.basket_count[near], 1))
    neighbours = np.zeros((len(final.statistics.item_ids) + 1, GRAPH_DEGREE), np.int32)
    weights = np.zeros(neighbours.shape, np.float32)
    rows = window.input_code[1:]
    neighbours[rows, : near.shape[1]] = window.input_code[near + 1]
    weights[rows, : near.shape[1]] = share / np.maximum(share.sum(1, keepdims=True), 1e-9)
    np.save(examples / "graph_neighbours.npy", neighbours, allow_pickle=False)
    np.save(examples / "graph_weights.npy", weights, allow_pickle=False)


class _Window:
    """Statistics with the map from dataset item codes to their catalogue codes."""

    def __init__(self, statistics: Statistics, item_ids: np.ndarray, final: np.ndarray | None = None) -> None:
        """Take the statistics, the dataset's item ids and, for each, its code in the catalogue at the cut."""
        self.statistics = statistics
        at = np.minimum(np.searchsorted(statistics.item_ids, item_ids), len(statistics.item_ids) - 1)
        self.code = np.where(self.statistics.item_ids[at] == item_ids, at, -1)
        own = np.flatnonzero(self.code >= 0)
        # Models of several windows must mean the same item by a code: the one it has at the cut, plus one.
        self.input_code = np.zeros(len(statistics.item_ids) + 1, np.int32)
        self.input_code[self.code[own] + 1] = (self.code if final is None else final)[own] + 1

    def query(self, basket: Basket, visible: np.ndarray, size: int) -> Query:
        history = restrict(basket.history, self.code[basket.history.items])
        return Query(self.statistics, float(basket.at), visible, size, history)


def _retriever_row(window: _Window, basket: Basket) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
    codes = window.code[basket.items]
    codes = codes[codes >= 0][:BASKET_WIDTH]
    if len(codes) < 2:
        return None
    inputs = tower_inputs(window.query(basket, np.empty(0, np.int64), 0))
    row = np.zeros(BASKET_WIDTH, np.int32)
    row[: len(codes)] = codes + 1
    return inputs["history"][0].astype(np.int32), inputs["history_weight"][0].astype(np.float16), row


def _ranker_list(
    window: _Window,
    basket: Basket,
    store_ids: np.ndarray,
    quotas: Quotas,
    rng: np.random.Generator,
    negatives: int | None,
    stranger: bool = False,
) -> RankerExamples | None:
    """Hide a fifth of the basket and return the features and labels of the candidates for the rest.

    All positives among the candidates are kept, and `negatives` others at random (None: all others).
    Of a stranger only the first so many visible items are known, down to none: the model must know what
    most people buy.
    """
    codes = window.code[basket.items]
    codes = rng.permutation(codes[codes >= 0])
    if len(codes) < MIN_BASKET_ITEMS:
        return None
    hidden = max(1, round(HIDDEN_RATIO * len(codes)))
    unknown = len(basket.items) - len(codes)
    visible, size = codes[hidden:], len(codes) - hidden + unknown
    if stranger:
        visible = visible[: rng.integers(len(visible) + 1)]
        size = len(visible)
    query = window.query(basket, visible, size)
    store = window.statistics.store_row.get(str(store_ids[basket.store]))
    candidates = retrieve(
        query, None if store is None else window.statistics.store_popular[store], quotas
    ).codes
    label = np.isin(candidates, codes[:hidden])
    if negatives is not None:
        if not label.any():
            return None
        others = np.flatnonzero(~label)
        keep = np.sort(np.r_[np.flatnonzero(label), rng.permutation(others)[:negatives]])
        candidates, label = candidates[keep], label[keep]
    dense, categorical = model_inputs(Rows(query, candidates))
    categorical[:, 0] = window.input_code[categorical[:, 0]]
    asked = tower_inputs(query)
    return RankerExamples(
        dense,
        categorical.astype(np.int32),
        label.astype(np.int8),
        np.array([0, len(label)]),
        window.input_code[asked["history"]],
        asked["history_weight"].astype(np.float16),
        window.input_code[asked["basket"]],
    )


def _stack(rows: list[tuple[np.ndarray, np.ndarray, np.ndarray]]) -> RetrieverExamples:
    if not rows:
        return RetrieverExamples(
            np.empty((0, HISTORY_LENGTH), np.int32),
            np.empty((0, HISTORY_LENGTH), np.float16),
            np.empty((0, BASKET_WIDTH), np.int32),
        )
    return RetrieverExamples(*(np.stack(column) for column in zip(*rows, strict=True)))


def _concatenate(parts: list[RetrieverExamples]) -> RetrieverExamples:
    return RetrieverExamples(
        *(np.concatenate(column) for column in zip(*(vars(p).values() for p in parts), strict=True))
    )


def _concatenate_lists(parts: list[RankerExamples]) -> RankerExamples:
    parts = parts or [_no_lists()]
    lengths = np.concatenate([np.diff(part.start) for part in parts])
    columns = {
        name: np.concatenate([getattr(part, name) for part in parts])
        for name in RankerExamples.__annotations__
        if name != "start"
    }
    return RankerExamples(start=np.cumsum([0, *lengths]), **columns)


def _no_lists() -> RankerExamples:
    return RankerExamples(
        np.empty((0, len(DENSE_NAMES)), np.float32),
        np.empty((0, len(CATEGORICAL)), np.int32),
        np.empty(0, np.int8),
        np.zeros(1, np.int64),
        np.empty((0, HISTORY_LENGTH), np.int32),
        np.empty((0, HISTORY_LENGTH), np.float16),
        np.empty((0, BASKET_LENGTH), np.int32),
    )
