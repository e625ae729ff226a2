"""Purchases and statistics -> training examples, by replaying each user's baskets in time order.

Rolling origin: for each base in (cut - 28, -24, ... -4 weeks) the statistics are fitted on events before the
base, and the examples are the baskets of the four weeks after it. A user's history is the fold of the user's
earlier baskets. So no feature of `ITEM` sees its own window, those of `FRESH` end with the night before, and
none sees its own basket. Candidates and features come from the functions that serve. One source is left out
here, the two-tower: it is trained on these weeks and would return the hidden items from memory.
"""

from __future__ import annotations

import logging
import math
import shutil
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from copy import copy
from dataclasses import asdict, dataclass, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from components.data.examples import (
    GRAPH_DEGREE,
    Examples,
    RankerExamples,
    RetrieverExamples,
    write_arrays,
    write_manifest,
)
from components.data.fit_statistics import NoCatalogue, Purchases, fit, fresh_by_day, read_purchases
from components.hyper_parameters import ExampleParams
from components.measurement import cores
from components.parameters import read_params
from components.progress import with_progress
from feature_repo.aggregates import DAY_S, IMPRESSION, PURCHASE, UserEvents, hash_ids, latest, no_events
from feature_repo.queries import Query, Rows, User
from feature_repo.schema import (
    BASKET_LENGTH,
    CATEGORICAL,
    DENSE_NAMES,
    HISTORY_LENGTH,
    model_inputs,
    tower_inputs,
)
from feature_repo.statistics import Statistics, read_statistics, read_vocabulary, write_statistics
from serving.stages.retrieval import Quotas, retrieve

log = logging.getLogger(__name__)

WINDOW = pd.Timedelta(weeks=4)
FRESH_DAYS = "fresh_days.npy"  # of a window: the day-fresh features on each of its days
BASKET_WIDTH = 64  # items of one basket the retriever trains on
MIN_BASKET_ITEMS = 4  # in smaller baskets no item can be hidden without losing the shopper's purpose
HIDDEN_RATIO = 0.2
ANSWERED_S = 1_800.0  # a checkout is over when it neither asks nor pays for so long
SHARES = 8  # users are split into as many, whatever the machine: the same seed gives the same examples
MOST_BASKETS = 120  # of one shopper within WINDOW that teach; in Complete Journey the busiest has 104
SMALL = 100_000  # purchased lines: up to so many are replayed sooner than other processes start


NO_BASKETS = RetrieverExamples(
    np.empty((0, HISTORY_LENGTH), np.int32),
    np.empty((0, HISTORY_LENGTH), np.float16),
    np.empty((0, BASKET_WIDTH), np.int32),
)
NO_LISTS = RankerExamples(
    np.empty((0, len(DENSE_NAMES)), np.float32),
    np.empty((0, len(CATEGORICAL)), np.int32),
    np.empty(0, np.int8),
    np.zeros(1, np.int64),
    np.empty((0, HISTORY_LENGTH), np.int32),
    np.empty((0, HISTORY_LENGTH), np.float16),
    np.empty((0, BASKET_LENGTH), np.int32),
)


@dataclass(frozen=True)
class Basket:
    """One basket in a user's replay: its items, and the history strictly before its first request.

    If the checkout asked for recommendations, `at` is the time of its first request and `shown` holds the
    answers: items that were not in the basket then, whether the shopper took them or not.
    """

    basket: int
    user: int
    at: float  # seconds since the epoch: when it was asked about, else when it was bought
    items: np.ndarray  # sorted distinct dataset item codes
    shown: np.ndarray  # sorted distinct dataset item codes
    store: int
    history: UserEvents  # of dataset item codes


def replay(
    purchases: Purchases, users: np.ndarray | None = None, since: float = -math.inf
) -> Iterator[Basket]:
    """Yield the baskets of `users` (default all) bought at `since` or later, each with its history.

    They come user by user in time order.

    This is the point-in-time join: a user's lines lie in the order of time, so the history of a basket
    is the part of them before its first request. Baskets that share a moment all see the history before it.
    """
    rows = np.arange(len(purchases.at)) if users is None else np.flatnonzero(np.isin(purchases.user, users))
    if len(rows) == 0:
        return
    replayed = np.unique(purchases.basket[rows])
    hashed = np.zeros(len(purchases.basket_ids), np.uint32)
    hashed[replayed] = hash_ids(purchases.basket_ids[replayed].tolist())
    keys = (purchases.item[rows], hashed[purchases.basket[rows]], purchases.at[rows], purchases.user[rows])
    order = rows[np.lexsort(keys)]
    user, at, basket = purchases.user[order], purchases.at[order], purchases.basket[order]
    new_user = np.r_[True, user[1:] != user[:-1]]
    begins = np.flatnonzero(new_user | np.r_[True, basket[1:] != basket[:-1]])
    ends = np.r_[begins[1:], len(order)]
    begins, ends = begins[at[begins] >= since], ends[at[begins] >= since]
    by_viewer = np.argsort(purchases.views.user, kind="stable")
    viewer = purchases.views.user[by_viewer]
    lines, last_user = no_events(np.int64), -1
    impressions, bought = lines, lines.at
    for begin, end in zip(begins.tolist(), ends.tolist(), strict=True):
        if user[begin] != last_user:
            last_user = int(user[begin])
            own = slice(*np.searchsorted(user, [last_user, last_user + 1]))
            seen = slice(*np.searchsorted(viewer, [last_user, last_user + 1]))
            lines = _lines(purchases, order[own], hashed, by_viewer[seen])
            impressions, bought = lines.where(lines.kind == IMPRESSION), lines.at[lines.kind == PURCHASE]
        asked, shown = _first_asked(impressions, bought, float(at[begin]))
        yield Basket(
            basket=int(basket[begin]),
            user=last_user,
            at=asked,
            items=np.unique(purchases.item[order[begin:end]]),
            shown=shown,
            store=int(purchases.store[order[begin]]),
            history=latest(lines.before(asked)),
        )


def most_of_each(baskets: Iterator[Basket]) -> Iterator[Basket]:
    """Leave out a shopper's baskets beyond MOST_BASKETS within WINDOW; they come user by user, in time."""
    user, counted = -1, deque[float](maxlen=MOST_BASKETS)
    for basket in baskets:
        if basket.user != user:
            user = basket.user
            counted.clear()
        if len(counted) < MOST_BASKETS or basket.at - counted[0] >= WINDOW.total_seconds():
            counted.append(basket.at)
            yield basket


def _first_asked(shown: UserEvents, bought: np.ndarray, at: float) -> tuple[float, np.ndarray]:
    """Return when a basket was first asked about, and all that was shown; if never, its own time and nothing.

    A checkout may ask after each scan: its answers are the impressions since the previous purchase,
    back to the first pause of more than ANSWERED_S. None of them existed at its first request.

    Args:
        shown: the user's impressions.
        bought: (n,) the times of the user's purchases, sorted.
        at: when this basket was bought.
    """
    if len(shown) == 0:
        return at, shown.items[:0]
    earlier = int(np.searchsorted(bought, at))
    since = bought[earlier - 1] if earlier else -np.inf
    answers = shown.where(slice(*np.searchsorted(shown.at, [since, at], "right")))
    pauses = np.flatnonzero(np.diff(answers.at, append=at) > ANSWERED_S)
    answers = answers.where(slice(int(pauses[-1]) + 1 if len(pauses) else 0, None))
    return (float(answers.at[0]) if len(answers) else at), answers.distinct()


def _lines(purchases: Purchases, rows: np.ndarray, basket_hash: np.ndarray, views: np.ndarray) -> UserEvents:
    """Return one user's purchases and views as events with item codes; the rows are in order already."""
    seen = purchases.views
    items, item = np.unique(np.concatenate([purchases.item[rows], seen.item[views]]), return_inverse=True)
    nothing = np.zeros(len(views), np.float32)
    lines = UserEvents(
        items=items,
        at=np.concatenate([purchases.at[rows], seen.at[views]]),
        item=item,
        kind=np.concatenate([np.full(len(rows), PURCHASE, np.uint8), seen.kind[views]]),
        basket=np.concatenate([basket_hash[purchases.basket[rows]], seen.basket[views]]),
        key=np.concatenate([rows, len(purchases.at) + views]).astype(np.uint64),
        paid=np.concatenate([purchases.paid[rows].astype(np.float32), nothing]),
        discount=np.concatenate([purchases.discount[rows].astype(np.float32), nothing]),
    )
    if len(views) == 0:
        return lines
    return lines.where(np.lexsort((lines.key, lines.item, lines.basket, lines.at)))


def build_examples(
    dataset: Path, statistics: Path, examples: Path, cut: str, params: dict[str, Any]
) -> dict[str, int]:
    """Write the retriever's and the ranker's examples of everything before `cut`.

    The cut, in ISO 8601, is that of the statistics; nothing at or after it is read.

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
    users = np.random.default_rng(settings.seed).permutation(len(purchases.user_ids))
    users = users[: math.ceil(settings.user_ratio * len(users))]
    with ExitStack() as stack:
        run: Callable[..., Iterator[Any]] = map
        if len(seen.at) > SMALL:
            workers = min(cores(), SHARES)
            pool = ProcessPoolExecutor(workers, mp_context=get_context("spawn"))
            run = stack.enter_context(pool).map
        log.info("counting %d purchases before each of %d windows", len(seen.at), len(bases))
        write = partial(_write_window, windows, bases, seen, items, vocabulary)
        bases = _enough(bases, list(run(write, range(len(bases)))))
        starts = [base.timestamp() for base in bases]
        shares = np.array_split(users, SHARES)
        own = (seen.where(np.isin(seen.user, share)) for share in shares)
        build = partial(_build_share, statistics, windows, starts, settings)
        log.info("replaying the baskets of %d shoppers", len(users))
        parts = list(with_progress(run(build, own, shares), SHARES, "shares of the shoppers"))
    retriever = _joined([part[0] for part in parts])
    train = _joined([part[1] for part in parts])
    calibration = _joined([part[2] for part in parts])
    if len(train.start) < 2:
        raise ValueError(
            "no basket of the training windows gives an example: a basket needs "
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


def _write_window(
    folder: Path,
    bases: list[pd.Timestamp],
    seen: Purchases,
    items: pd.DataFrame,
    vocabulary: dict[str, list[str]],
    number: int,
) -> NoCatalogue | None:
    """Write the statistics before one base; return why that cannot be done, if it holds too little."""
    try:
        statistics = fit(seen.before(bases[number]), items, vocabulary, bases[number])
    except NoCatalogue as error:
        return error
    write_statistics(folder / str(number), statistics, vocabulary)
    types, begin = statistics.categorical[:, 0], bases[number].timestamp()
    days = fresh_by_day(seen, statistics.item_ids, types, begin, WINDOW.days)
    np.save(folder / str(number) / FRESH_DAYS, days, allow_pickle=False)
    return None


def _enough(bases: list[pd.Timestamp], refused: list[NoCatalogue | None]) -> list[pd.Timestamp]:
    """Return the bases, newest first, that come before the first one with too little history.

    Raises:
        NoCatalogue: even the newest window holds too little.
    """
    for number, error in enumerate(refused):
        if error is not None:
            if number == 0:
                raise error
            log.warning("windows before the first %d are left out: %s", number, error)
            return bases[:number]  # older windows hold even less
    return bases


def _build_share(
    statistics_path: Path,
    windows_path: Path,
    starts: list[float],
    params: ExampleParams,
    seen: Purchases,
    users: np.ndarray,
) -> tuple[RetrieverExamples, RankerExamples, RankerExamples]:
    """Build the examples of some users from their purchases: for retriever, ranker and calibration."""
    final = _Window(read_statistics(statistics_path), seen.item_ids)
    windows = [
        _Window(
            read_statistics(windows_path / str(i)),
            seen.item_ids,
            final.code,
            [np.asarray(day) for day in np.load(windows_path / str(i) / FRESH_DAYS, mmap_mode="r")],
        )
        for i in range(len(starts))
    ]
    quotas, nobody = Quotas(), no_events(np.int64)
    rng = np.random.default_rng([params.seed, int(users[0]) if len(users) else 0])
    held_out = np.random.default_rng(params.seed).random(len(seen.user_ids)) < params.calibration_ratio
    retriever = [NO_BASKETS]
    lists = {calibrates: [NO_LISTS] for calibrates in (True, False)}
    span_s = WINDOW.total_seconds()
    for basket in most_of_each(replay(seen)):
        if (row := _retriever_row(final, basket)) is not None:
            retriever.append(row)
        window = next((i for i, start in enumerate(starts) if start <= basket.at < start + span_s), None)
        if window is None:
            continue
        calibrates = window == 0 and bool(held_out[basket.user])
        shoppers = [(windows[window].user(basket), False)] * (1 if calibrates else params.masks)
        if rng.random() < params.stranger_ratio:
            shoppers.append((User(nobody, basket.at), True))
        negatives = None if calibrates else params.negatives
        for user, stranger in shoppers:
            day = windows[window].as_of(basket.at - starts[window])
            built = _ranker_list(day, basket, user, seen.store_ids, quotas, rng, negatives, stranger)
            if built is not None:
                lists[calibrates].append(built)
    return _joined(retriever), _joined(lists[False]), _joined(lists[True])


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

    def __init__(
        self,
        statistics: Statistics,
        item_ids: np.ndarray,
        final: np.ndarray | None = None,
        fresh: Sequence[np.ndarray] = (),
    ) -> None:
        """Take the statistics, the dataset's item ids and, for each, its code in the catalogue at the cut.

        `fresh` holds the day-fresh features of each day of the window.
        """
        self.statistics = statistics
        at = np.minimum(np.searchsorted(statistics.item_ids, item_ids), len(statistics.item_ids) - 1)
        self.code = np.where(self.statistics.item_ids[at] == item_ids, at, -1)
        own = np.flatnonzero(self.code >= 0)
        # Models of several windows must mean the same item by a code: the one it has at the cut, plus one.
        self.input_code = np.zeros(len(statistics.item_ids) + 1, np.int32)
        self.input_code[self.code[own] + 1] = (self.code if final is None else final)[own] + 1

        self._days = [statistics.as_of(day) for day in fresh]

    def as_of(self, seconds: float) -> _Window:
        """Return the window with the day-fresh counts of the night before; `seconds` since it began."""
        window = copy(self)
        window.statistics = self._days[int(seconds // DAY_S)]
        return window

    def user(self, basket: Basket) -> User:
        """Return the shopper as of a basket; the lists that hide parts of it share its cached parts."""
        return User(replace(basket.history, items=self.code[basket.history.items]), basket.at)


def _retriever_row(window: _Window, basket: Basket) -> RetrieverExamples | None:
    codes = window.code[basket.items]
    codes = codes[codes >= 0]
    if len(codes) < 2:
        return None
    if len(codes) > BASKET_WIDTH:  # evenly, because they lie in the order of their ids
        codes = codes[np.linspace(0, len(codes) - 1, BASKET_WIDTH).astype(int)]
    query = Query(window.statistics, basket.at, np.empty(0, np.int64), 0, window.user(basket))
    inputs = tower_inputs(query)
    row = np.zeros((1, BASKET_WIDTH), np.int32)
    row[0, : len(codes)] = codes + 1
    return RetrieverExamples(
        inputs["history"].astype(np.int32), inputs["history_weight"].astype(np.float16), row
    )


def _ranker_list(
    window: _Window,
    basket: Basket,
    user: User,
    store_ids: np.ndarray,
    quotas: Quotas,
    rng: np.random.Generator,
    negatives: int | None,
    stranger: bool = False,
) -> RankerExamples | None:
    """Hide a fifth of the basket and return the features and labels of the candidates for the rest.

    All positives among the candidates are kept, and `negatives` others at random (None: all others). Where
    the checkout got an answer, the items that the shopper took from it are hidden; the items left are among
    the others. Of a stranger only the first few visible items are known, or no item at all: so the model
    learns popular items.
    """
    codes = window.code[basket.items]
    codes = rng.permutation(codes[codes >= 0])
    if len(codes) < MIN_BASKET_ITEMS:
        return None
    hidden = max(1, round(HIDDEN_RATIO * len(codes)))
    shown = window.code[basket.shown]
    if (accepted := np.isin(codes, shown)).any():
        codes = codes[np.argsort(~accepted, kind="stable")]
        hidden = min(max(hidden, int(accepted.sum())), len(codes) - 1)
    unknown = len(basket.items) - len(codes)
    visible, size = codes[hidden:], len(codes) - hidden + unknown
    if stranger:
        visible = visible[: rng.integers(len(visible) + 1)]
        size = len(visible)
    query = Query(window.statistics, basket.at, visible, size, user)
    best = window.statistics.best_of_store(str(store_ids[basket.store]))
    candidates = retrieve(query, best, quotas).codes
    label = np.isin(candidates, codes[:hidden])
    if negatives is not None:
        if not label.any():
            return None
        others = rng.permutation(np.flatnonzero(~label))
        ignored = np.isin(candidates[others], shown)
        ignored &= np.cumsum(ignored) <= negatives // 2  # the other half is drawn from all, as serving ranks
        others = others[np.argsort(~ignored, kind="stable")][:negatives]
        keep = np.sort(np.r_[np.flatnonzero(label), others])
        candidates, label = candidates[keep], label[keep]
    dense, categorical = model_inputs(Rows(query, candidates))
    categorical[:, 0] = window.input_code[categorical[:, 0]]
    inputs = tower_inputs(query)
    return RankerExamples(
        dense,
        categorical.astype(np.int32),
        label.astype(np.int8),
        np.array([0, len(label)]),
        window.input_code[inputs["history"]],
        inputs["history_weight"].astype(np.float16),
        window.input_code[inputs["basket"]],
    )


def _joined(parts: Sequence[Examples]) -> Examples:
    """Return one part or more as one."""
    kind = type(parts[0])
    columns = {name: np.concatenate([getattr(part, name) for part in parts]) for name in vars(parts[0])}
    if kind is RankerExamples:
        columns["start"] = np.cumsum([0, *np.concatenate([np.diff(part.start) for part in parts])])
    return kind(**columns)
