"""A bundle and the weeks after its cut -> quality through the served path, beside the baselines.

Protocol: a test basket holds four catalogue items or more; a seeded fifth of them is hidden, the rest is
the request; the whole catalogue minus the basket is ranked, never a sample. The user's history is
streamed: every basket strictly before the request's time is in it. Answers come from
`serving.recommender`, so what is measured is what is served. Intervals are a bootstrap over users.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from components.baselines import BASELINES
from components.build_examples import HIDDEN_RATIO, MIN_BASKET_ITEMS, Basket, replay
from components.fit_statistics import Purchases, fit, purchases_of
from feature_repo.aggregates import UserHistory, empty_history, fold, pack
from feature_repo.events import Dataset, read_dataset
from feature_repo.schema import DENSE_NAMES
from feature_repo.statistics import read_vocabulary
from serving.bundle import Bundle, load_bundle, seal_bundle
from serving.online_features import MemoryStore, UserRow
from serving.prediction_log import Record, records_to_table
from serving.recommender import Prepared, Recommender
from serving.retrieval import FaissTower, Quotas, retrieve
from serving.schemas import DEFAULT_K, MAX_K, Request

log = logging.getLogger(__name__)

TEST_WINDOW = pd.Timedelta(weeks=5)
REFERENCE_WINDOW = pd.Timedelta(weeks=9)
REFERENCE_RECORDS = 4_000
PROTOCOL_SEED = 20171
BOOTSTRAP_DRAWS = 300
COLD_RATIO = 0.2
METRICS = ("recall_at_10", "recall_at_20", "ndcg_at_10", "hit_ratio_at_10", "hit_ratio_at_3", "mrr")
DISCOUNT = 1 / np.log2(np.arange(2, 12))


@dataclass(frozen=True)
class Task:
    """One test basket: what the checkout sees, and what the shopper also bought."""

    basket: Basket
    user_id: str
    basket_id: str
    store_id: str
    visible: tuple[str, ...]
    hidden: np.ndarray  # catalogue codes
    bought_before: np.ndarray  # (hidden,) bool: a repeat purchase
    history: UserHistory  # with item ids, strictly before the request


@dataclass
class Tally:
    """Metrics of one system, one entry per test basket."""

    rows: list[tuple[float, ...]]
    repeat: list[tuple[float, float]]  # found and wanted among repeat purchases, top 20
    new: list[tuple[float, float]]
    shown: set[int]

    @classmethod
    def empty(cls) -> Tally:
        """Return a tally of nothing."""
        return cls([], [], [], set())

    def add(self, ranked: np.ndarray, task: Task) -> None:
        """Count one ranked list of item codes, best first."""
        hit = np.isin(ranked[:MAX_K], task.hidden)
        wanted = len(task.hidden)
        ideal = DISCOUNT[: min(10, wanted)].sum()
        first = np.flatnonzero(hit)
        self.rows.append(
            (
                hit[:10].sum() / wanted,
                hit[:20].sum() / wanted,
                float(DISCOUNT[: len(hit[:10])] @ hit[:10]) / ideal,
                float(hit[:10].any()),
                float(hit[:3].any()),
                1 / (first[0] + 1) if len(first) else 0.0,
            )
        )
        found = np.isin(task.hidden, ranked[:20])
        self.repeat.append((float(found[task.bought_before].sum()), float(task.bought_before.sum())))
        self.new.append((float(found[~task.bought_before].sum()), float((~task.bought_before).sum())))
        self.shown.update(ranked[:10].tolist())


class Bootstrap:
    """Draws users with replacement; the same draws serve every system, so differences are paired."""

    def __init__(self, users: list[str], draws: int = BOOTSTRAP_DRAWS) -> None:
        """Take the user of each test basket."""
        _, self._row = np.unique(users, return_inverse=True)
        count = int(self._row.max()) + 1 if users else 1
        self._weight = (
            np.random.default_rng(0).multinomial(count, np.full(count, 1 / count), draws).astype(float)
        )
        self._size = self._weight @ np.bincount(self._row, minlength=count)

    def means(self, values: np.ndarray) -> np.ndarray:
        """Return the mean over baskets in each draw, (draws,)."""
        totals: np.ndarray = self._weight @ np.bincount(self._row, values, self._weight.shape[1]) / self._size
        return totals

    def interval(self, values: np.ndarray) -> list[float]:
        """Return the 95 % interval of the mean."""
        return _percentiles(self.means(values))

    def ratio_interval(self, values: np.ndarray, others: np.ndarray) -> list[float]:
        """Return the 95 % interval of the ratio of the two means."""
        return _percentiles(self.means(values) / np.maximum(self.means(others), 1e-12))


def _percentiles(draws: np.ndarray) -> list[float]:
    return [round(float(x), 5) for x in np.percentile(draws, [2.5, 97.5])]


def evaluate_bundle(bundle: Path, dataset: Path, evaluated: Path) -> dict[str, float]:
    """Evaluate a bundle and write it anew, sealed with its results and its drift reference.

    Args:
        bundle: what `assemble_bundle` wrote.
        dataset: the data set, including the weeks after the bundle's cut.
        evaluated: the directory to write.

    Returns:
        The headline metrics of the served path.

    Raises:
        ValueError: no basket of the test window can be asked.
    """
    loaded = load_bundle(bundle)
    data = read_dataset(dataset)
    results, records = evaluate(loaded, data)
    if evaluated.exists():
        shutil.rmtree(evaluated)
    shutil.copytree(bundle, evaluated)
    (evaluated / "evaluation.json").write_text(json.dumps(results, indent=1))
    pq.write_table(records_to_table(records, DENSE_NAMES), evaluated / "reference_log.parquet")
    pq.write_table(
        _reference_events(data, pd.Timestamp(loaded.manifest["cut"])), evaluated / "reference_events.parquet"
    )
    seal_bundle(
        evaluated,
        cut=loaded.manifest["cut"],
        settings=loaded.settings,
        made_from={**loaded.manifest["made_from"], "parent": loaded.bundle_id},
    )
    return {
        name: results["served"][name] for name in ("ndcg_at_10", "recall_at_20", "hit_ratio_at_10", "mrr")
    }


def evaluate(bundle: Bundle, data: Dataset) -> tuple[dict[str, Any], list[Record]]:
    """Return the evaluation of a bundle on the five weeks after its cut, and the served answers' records.

    Raises:
        ValueError: no basket of the test window can be asked.
    """
    began = time.perf_counter()
    purchases = purchases_of(data.events)
    start = pd.Timestamp(bundle.manifest["cut"])
    end = start + TEST_WINDOW
    tasks, counts = _tasks(purchases, bundle, int(start.timestamp()), int(end.timestamp()))
    if not tasks:
        raise ValueError(
            f"no basket of {MIN_BASKET_ITEMS} catalogue items between {start} and {end}: "
            "choose an earlier --train-until, so that some weeks are left to test on"
        )
    log.info("%d test baskets from %s to %s", len(tasks), start.date(), end.date())
    boot = Bootstrap([task.user_id for task in tasks])
    size = len(bundle.statistics.item_ids)
    store = MemoryStore()
    baselines = {name: Tally.empty() for name in BASELINES}
    # The parts share nothing but their inputs, so a second process halves the wait.
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as beside:
        others = beside.submit(_evaluate_beside, bundle.path, data.items, purchases, tasks)
        served, pairs, records = _serve(Recommender(bundle, store), store, tasks, baselines)
        frozen, candidates, cold = others.result()
    window = f"{data.manifest['data_hash']} {start.isoformat()}"
    results: dict[str, Any] = {
        "test_window": {
            "from": start.isoformat(),
            "until": end.isoformat(),
            "data_hash": data.manifest["data_hash"],
            "hash": hashlib.sha256(window.encode()).hexdigest()[:16],
        },
        "baskets": len(tasks),
        "users": len({task.user_id for task in tasks}),
        "catalogue_items": size,
        "hidden_items": int(sum(len(task.hidden) for task in tasks)),
        **counts,
        "served": _summary(served, boot, size),
        "served_frozen_history": _summary(frozen, boot, size),
        "baselines": {name: _summary(tally, boot, size) for name, tally in baselines.items()},
        "ratios": {name: _ratios(served, tally, boot) for name, tally in baselines.items()},
        "candidates": candidates,
        "segments": _segments(served, tasks),
        "cold": cold,
        "calibration": _calibration(pairs),
    }
    results["seconds"] = round(time.perf_counter() - began, 1)
    return results, records


def _evaluate_beside(
    bundle_path: Path, items: pd.DataFrame, purchases: Purchases, tasks: list[Task]
) -> tuple[Tally, dict[str, dict[str, float]], dict[str, Any]]:
    """Return the tally with histories frozen at the cut, the recall of each source, and cold users."""
    bundle = load_bundle(bundle_path)
    store = MemoryStore()
    recommender = Recommender(bundle, store)
    history = _histories_at(purchases, int(pd.Timestamp(bundle.manifest["cut"]).timestamp()))
    frozen = [replace(task, history=history.get(task.user_id, empty_history())) for task in tasks]
    tally, _, _ = _serve(recommender, store, frozen)
    return tally, _source_recall(recommender, tasks), _cold(bundle, items, purchases, tasks)


def _tasks(purchases: Purchases, bundle: Bundle, start: int, end: int) -> tuple[list[Task], dict[str, Any]]:
    code_of = bundle.statistics.code_of
    code = np.array([code_of.get(item, -1) for item in purchases.item_ids.tolist()], np.int64)
    window = (purchases.at >= start) & (purchases.at < end)
    users = np.unique(purchases.user[window])
    until = replace(purchases, **{name: getattr(purchases, name)[purchases.at < end] for name in _ROWS})
    tasks = []
    lines = known = 0
    for basket in replay(until, users):
        if basket.at < start:
            continue
        lines += len(basket.items)
        items = basket.items[code[basket.items] >= 0]
        known += len(items)
        if len(items) < MIN_BASKET_ITEMS:
            continue
        basket_id = str(purchases.basket_ids[basket.basket])
        order = _protocol_rng(basket_id).permutation(len(items))
        hide = max(1, round(HIDDEN_RATIO * len(items)))
        hidden, shown = items[order[:hide]], items[np.sort(order[hide:])]
        unknown = basket.items[code[basket.items] < 0]
        tasks.append(
            Task(
                basket=basket,
                user_id=str(purchases.user_ids[basket.user]),
                basket_id=basket_id,
                store_id=str(purchases.store_ids[basket.store]),
                visible=tuple(purchases.item_ids[np.concatenate([shown, unknown])].tolist()),
                hidden=code[hidden],
                bought_before=np.isin(hidden, basket.history.items),
                history=replace(basket.history, items=purchases.item_ids[basket.history.items]),
            )
        )
    tasks.sort(key=lambda task: (task.basket.at, task.basket_id))
    return tasks, {"out_of_catalogue_ratio": round(1 - known / max(lines, 1), 4)}


_ROWS = ("item", "user", "store", "basket", "at", "paid", "discount", "quantity")


def _protocol_rng(basket_id: str) -> np.random.Generator:
    number = (
        int(basket_id)
        if basket_id.isdigit()
        else int(hashlib.sha256(basket_id.encode()).hexdigest()[:15], 16)
    )
    return np.random.default_rng([PROTOCOL_SEED, number % 2**31])


def _request(task: Task, k: int) -> Request:
    return Request(
        task.visible, float(task.basket.at), task.user_id, task.store_id or None, k, task.basket_id
    )


Pair = tuple[np.ndarray, np.ndarray]  # probability and label of every candidate of one request


def _serve(
    recommender: Recommender, store: MemoryStore, tasks: list[Task], baselines: dict[str, Tally] | None = None
) -> tuple[Tally, list[Pair], list[Record]]:
    """Ask every task through the served path, and the baselines beside it; k is the largest one may ask."""
    tally, pairs, records = Tally.empty(), [], []
    bundle = recommender.bundle
    tower = FaissTower(bundle.query_tower, bundle.index, len(bundle.statistics.item_ids))
    keep = max(1, len(tasks) // REFERENCE_RECORDS)
    began = time.perf_counter()
    for number, (task, prepared) in enumerate(_prepared(recommender, store, tasks)):
        scores = recommender.rank(prepared.dense, prepared.categorical)
        response = recommender.finish(prepared, scores)
        ranked = np.array([bundle.statistics.code_of[item.item_id] for item in response.items], np.int64)
        tally.add(ranked, task)
        if baselines is None:
            continue
        _rank_baselines(baselines, bundle, tower, task, prepared)
        pairs.append((scores, np.isin(prepared.candidates.codes, task.hidden)))
        if number % keep == 0:
            records.append(_record(prepared, response, ranked))
        if (number + 1) % 2_000 == 0:
            each = (time.perf_counter() - began) / (number + 1)
            log.info(
                "%d of %d answered, %.0f s to go", number + 1, len(tasks), each * (len(tasks) - number - 1)
            )
    return tally, pairs, records


def _rank_baselines(
    tallies: dict[str, Tally], bundle: Bundle, tower: FaissTower, task: Task, prepared: Prepared
) -> None:
    row = bundle.statistics.store_row.get(task.store_id)
    best = None if row is None else bundle.statistics.store_popular[row]
    for name, baseline in BASELINES.items():
        scores = baseline(prepared.query, best, tower)
        scores[prepared.query.basket] = -np.inf
        top = np.argpartition(-scores, min(MAX_K, len(scores) - 1))[:MAX_K]
        tallies[name].add(top[np.argsort(-scores[top], kind="stable")], task)


def _prepared(
    recommender: Recommender, store: MemoryStore, tasks: list[Task]
) -> Iterator[tuple[Task, Prepared]]:
    for task in tasks:
        store.write(task.user_id, UserRow(pack(task.history), float(task.basket.at)))
        yield task, recommender.prepare(_request(task, MAX_K))


def _record(prepared: Prepared, response: Any, ranked: np.ndarray) -> Record:
    """Return the record a request for the default number of items would have left."""
    row_of = {int(code): row for row, code in enumerate(prepared.candidates.codes)}
    rows = [row_of[int(code)] for code in ranked[:DEFAULT_K]]
    return Record(
        replace(prepared.request, k=DEFAULT_K),
        replace(response, items=response.items[:DEFAULT_K]),
        prepared.dense[rows],
        prepared.request.at,
    )


def _summary(tally: Tally, boot: Bootstrap, items: int) -> dict[str, Any]:
    values = np.array(tally.rows)
    summary: dict[str, Any] = {name: round(float(values[:, i].mean()), 5) for i, name in enumerate(METRICS)}
    summary["interval"] = {name: boot.interval(values[:, i]) for i, name in enumerate(METRICS)}
    summary["repeat_recall_at_20"] = _share(tally.repeat)
    summary["new_recall_at_20"] = _share(tally.new)
    summary["coverage_at_10"] = round(len(tally.shown) / items, 4)
    return summary


def _share(pairs: list[tuple[float, float]]) -> float:
    """Return the mean over baskets that want any of the share found."""
    found, wanted = np.array(pairs).T
    some = wanted > 0
    return round(float((found[some] / wanted[some]).mean()), 5) if some.any() else 0.0


def _ratios(served: Tally, other: Tally, boot: Bootstrap) -> dict[str, Any]:
    ours, theirs = np.array(served.rows), np.array(other.rows)
    ratios: dict[str, Any] = {}
    for name in ("ndcg_at_10", "recall_at_20"):
        i = METRICS.index(name)
        ratios[name] = round(float(ours[:, i].mean() / max(theirs[:, i].mean(), 1e-12)), 4)
        ratios[f"{name}_interval"] = boot.ratio_interval(ours[:, i], theirs[:, i])
    return ratios


def _source_recall(recommender: Recommender, tasks: list[Task]) -> dict[str, dict[str, float]]:
    """Return Recall@500 of each source alone and of the union as served, on a sample of the tasks."""
    bundle = recommender.bundle
    alone: dict[str, Quotas] = {
        "served": bundle.settings.quotas,
        "history": Quotas(history=500, together=0, tower=0, store=0),
        "together": Quotas(history=0, together=500, tower=0, store=0),
        "tower": Quotas(history=0, together=0, tower=500, store=0),
        "store": Quotas(history=0, together=0, tower=0, store=500),
        "popular": Quotas(history=0, together=0, tower=0, store=0),
    }
    store = MemoryStore()
    tower = FaissTower(bundle.query_tower, bundle.index, len(bundle.statistics.item_ids))
    found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in alone}
    sample = Recommender(bundle, store)
    for task, prepared in _prepared(sample, store, tasks[:: max(1, len(tasks) // 2_000)]):
        row = bundle.statistics.store_row.get(task.store_id)
        best = None if row is None else bundle.statistics.store_popular[row]
        for name, quotas in alone.items():
            candidates = retrieve(prepared.query, best, quotas, tower if quotas.tower else None)
            # `retrieve` fills up with best sellers; a source alone is only what it brought itself.
            own = (
                candidates.codes if name in ("served", "popular") else candidates.codes[candidates.source < 4]
            )
            hit = np.isin(task.hidden, own)
            before = task.bought_before
            found[name].append(
                (
                    hit.mean(),
                    hit[before].mean() if before.any() else np.nan,
                    hit[~before].mean() if (~before).any() else np.nan,
                )
            )
    return {
        name: dict(
            zip(("recall", "repeat", "new"), (round(float(x), 4) for x in _nanmeans(rows)), strict=True)
        )
        for name, rows in found.items()
    }


def _nanmeans(rows: list[tuple[float, float, float]]) -> list[float]:
    columns = np.array(rows).T
    return [float(c[~np.isnan(c)].mean()) if (~np.isnan(c)).any() else 0.0 for c in columns]


def _segments(tally: Tally, tasks: list[Task]) -> dict[str, dict[str, float]]:
    values = np.array(tally.rows)
    visible = np.array([len(task.visible) for task in tasks])
    baskets = np.array([task.history.basket_count for task in tasks])
    masks = {
        "basket 3 items or fewer": visible <= 3,
        "basket 4-6 items": (visible >= 4) & (visible <= 6),
        "basket 7-12 items": (visible >= 7) & (visible <= 12),
        "basket 13 items or more": visible >= 13,
        "under 20 baskets before": baskets < 20,
        "20-60 baskets before": (baskets >= 20) & (baskets < 60),
        "60 baskets or more before": baskets >= 60,
    }
    return {
        name: {
            "baskets": int(mask.sum()),
            **{m: round(float(values[mask, i].mean()), 5) for i, m in enumerate(METRICS)},
        }
        for name, mask in masks.items()
        if mask.any()
    }


def _cold(bundle: Bundle, items: pd.DataFrame, purchases: Purchases, tasks: list[Task]) -> dict[str, Any]:
    """Return metrics for users the tables know nothing of, with no, a little and all of their history.

    The tables are fitted again without a seeded fifth of the users (leaving those users' other baskets in
    them would flatter the score by a seventh). The models' weights are shared; they hold no user id.
    """
    cut = pd.Timestamp(bundle.manifest["cut"])
    cold = np.random.default_rng(PROTOCOL_SEED).random(len(purchases.user_ids)) < COLD_RATIO
    seen = purchases.before(cut)
    warm = replace(seen, **{name: getattr(seen, name)[~cold[seen.user]] for name in _ROWS})
    chosen = [task for task in tasks if cold[task.basket.user]]
    if not chosen or len(warm.at) == 0:
        return {}
    vocabulary = read_vocabulary(bundle.path / "statistics")
    statistics = fit(
        warm, items.set_index("item_id"), vocabulary, cut, np.asarray(bundle.statistics.item_ids)
    )
    stranger = replace(bundle, statistics=statistics)
    store = MemoryStore()
    recommender = Recommender(stranger, store)
    boot = Bootstrap([task.user_id for task in chosen])
    shapes: dict[str, Callable[[Task], UserHistory]] = {
        "no_history": lambda task: empty_history(),
        "last_5_baskets": lambda task: _last_baskets(purchases, task, 5),
        "all_history": lambda task: task.history,
    }
    results: dict[str, Any] = {"users": len({task.user_id for task in chosen}), "baskets": len(chosen)}
    for name, shape in shapes.items():
        tally, _, _ = _serve(recommender, store, [replace(task, history=shape(task)) for task in chosen])
        results[name] = _summary(tally, boot, len(statistics.item_ids))
    return results


def _last_baskets(purchases: Purchases, task: Task, count: int) -> UserHistory:
    rows = np.flatnonzero((purchases.user == task.basket.user) & (purchases.at < task.basket.at))
    history = empty_history(np.int64)
    baskets = list(dict.fromkeys(purchases.basket[rows].tolist()))[-count:]
    for basket in baskets:
        own = rows[purchases.basket[rows] == basket]
        history = fold(
            history,
            int(purchases.at[own[0]]),
            np.unique(purchases.item[own]),
            float(purchases.paid[own].sum()),
            float(purchases.discount[own].sum()),
        )
    return replace(history, items=purchases.item_ids[history.items])


def _histories_at(purchases: Purchases, cut: int) -> dict[str, UserHistory]:
    """Return every user's history as of the cut, with item ids."""
    seen = replace(purchases, **{name: getattr(purchases, name)[purchases.at < cut] for name in _ROWS})
    latest: dict[int, UserHistory] = {}
    for basket in replay(seen):
        latest[basket.user] = fold(basket.history, basket.at, basket.items, basket.paid, basket.discount)
    return {
        str(purchases.user_ids[user]): replace(history, items=purchases.item_ids[history.items])
        for user, history in latest.items()
    }


def _calibration(pairs: list[Pair]) -> dict[str, Any]:
    """Return how true the probabilities are, over all candidates of all requests."""
    p = np.clip(np.concatenate([scores for scores, _ in pairs]).astype(np.float64), 1e-7, 1 - 1e-7)
    y = np.concatenate([label for _, label in pairs]).astype(np.float64)
    base = y.mean()
    edges = np.quantile(p, np.linspace(0, 1, 21)[1:-1])
    bucket = np.searchsorted(edges, p)
    size = np.bincount(bucket, minlength=20)
    gap = np.abs(np.bincount(bucket, p, 20) - np.bincount(bucket, y, 20))
    entropy = -(base * np.log(base) + (1 - base) * np.log(1 - base)) if 0 < base < 1 else 1.0
    log_loss = -(y * np.log(p) + (1 - y) * np.log(1 - p)).mean()
    return {
        "candidates": int(size.sum()),
        "mean_probability": round(float(p.mean()), 6),
        "purchase_rate": round(float(base), 6),
        "expected_calibration_error": round(float(gap.sum() / size.sum()), 6),
        "log_loss": round(float(log_loss), 6),
        "normalised_entropy": round(float(log_loss / entropy), 5),
        "auc": round(_auc(p, y), 5),
        "gauc": round(float(np.mean([_auc(s, t) for s, t in pairs if 0 < t.sum() < len(t)] or [0.5])), 5),
    }


def _auc(scores: np.ndarray, label: np.ndarray) -> float:
    """Return the area under the ROC curve (rank statistic, ties counted half)."""
    label = label.astype(bool)
    positives, negatives = int(label.sum()), int((~label).sum())
    if not positives or not negatives:
        return 0.5
    _values, inverse, counts = np.unique(scores, return_inverse=True, return_counts=True)
    rank = np.cumsum(counts) - (counts - 1) / 2
    return float((rank[inverse][label].sum() - positives * (positives + 1) / 2) / (positives * negatives))


def _reference_events(data: Dataset, cut: pd.Timestamp) -> pa.Table:
    """Return the purchases of the nine weeks before the cut: what later weeks are compared with."""
    events = data.events
    window = (
        (events["at"] >= cut - REFERENCE_WINDOW) & (events["at"] < cut) & (events["event_type"] == "purchase")
    )
    columns = ["at", "item_id", "basket_id", "store_id", "price", "discount", "quantity"]
    items = data.items.reindex(columns=["item_id", "category", "department"])
    joined = events.loc[window, columns].merge(items, on="item_id", how="left")
    return pa.Table.from_pandas(joined, preserve_index=False)
