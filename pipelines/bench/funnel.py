"""A bundle and test baskets -> the price of two stages, the gain of each source, AUC, and new items."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from components.data.fit_statistics import Purchases, purchases_of
from components.evaluation.baselines import BASELINES
from components.evaluation.evaluate_bundle import prepared_tasks, window_s
from components.evaluation.metrics import Bootstrap, Tally, auc, ratios, summary
from components.evaluation.nightly import Nightly
from components.evaluation.protocol import Task, read_tasks
from components.retriever.extend_index import extend_index
from feature_repo.aggregates import no_events
from feature_repo.events import Dataset
from feature_repo.queries import Rows
from feature_repo.schema import LEVELS, model_inputs
from serving.answer.recommender import Prepared, Recommender
from serving.release.bundle import Bundle, load_bundle
from serving.schemas import DEFAULT_PROFILE
from serving.stages.retrieval import SOURCES, Candidates
from serving.stores.online_features import MemoryStore

TASKS = 500  # test baskets; ranking a whole catalogue for one takes as long as many answers


def sample(tasks: Sequence[Task], most: int = TASKS) -> list[Task]:
    """Return some tasks of the whole window."""
    return list(tasks[:: max(1, len(tasks) // most)][:most])


def compare_with_whole_catalogue(
    bundle: Bundle, tasks: Sequence[Task], purchases: Purchases
) -> dict[str, Any]:
    """Return quality and time of the funnel beside the same ranker over every item, basket by basket.

    Also AUC over the served candidates: of the ranker, and of each baseline for the same candidates.
    """
    store = MemoryStore()
    recommender = Recommender(bundle, store)
    funnel, whole = Tally.empty(), Tally.empty()
    took: list[tuple[float, float]] = []
    judged: dict[str, list[tuple[np.ndarray, np.ndarray]]] = {name: [] for name in ("served", *BASELINES)}
    counts = Nightly(bundle, purchases)
    for task, prepared in prepared_tasks(recommender, store, list(tasks), counts=counts):
        retrieved_ms = prepared.stage_ms["features"] + prepared.stage_ms["retrieval"]
        funnel_ms, scores = _rank(recommender, prepared, task, funnel)
        began = time.perf_counter()
        everything = _over_all_items(bundle, prepared)
        whole_ms = (time.perf_counter() - began) * 1e3 + _rank(recommender, everything, task, whole)[0]
        took.append((retrieved_ms + funnel_ms, whole_ms))
        label = np.isin(prepared.candidates.codes, task.hidden)
        judged["served"].append((scores, label))
        for name, baseline in _baselines(bundle, task, prepared).items():
            judged[name].append((baseline, label))
    boot = Bootstrap([task.user_id for task in tasks])
    items = len(bundle.statistics.item_ids)
    times = np.array(took)
    return {
        "baskets": len(tasks),
        "items": items,
        "funnel": summary(funnel, boot, items),
        "whole_catalogue": summary(whole, boot, items),
        "kept": ratios(funnel, whole, boot),
        "ms": dict(zip(("funnel", "whole_catalogue"), np.median(times, axis=0).tolist(), strict=True)),
        "times_slower": np.percentile(times[:, 1] / times[:, 0], [50, 5, 95]).tolist(),
        "auc": {name: _areas(pairs) for name, pairs in judged.items()},
    }


def _rank(recommender: Recommender, prepared: Prepared, task: Task, tally: Tally) -> tuple[float, np.ndarray]:
    began = time.perf_counter()
    scores = recommender.rank(prepared.dense, prepared.categorical)
    answer = recommender.finish(prepared, scores)
    took_ms = (time.perf_counter() - began) * 1e3
    codes = recommender.bundle.statistics.codes([item.item_id for item in answer.items])
    tally.add(codes, task.hidden, task.bought_before)
    return took_ms, scores


def _over_all_items(bundle: Bundle, prepared: Prepared) -> Prepared:
    barred = np.concatenate([prepared.query.basket, bundle.profiles[DEFAULT_PROFILE].barred])
    codes = np.setdiff1d(np.arange(len(bundle.statistics.item_ids)), barred)
    dense, categorical = model_inputs(Rows(prepared.query, codes))
    candidates = Candidates(codes, np.full(len(codes), SOURCES.index("popular"), np.int8))
    return replace(prepared, candidates=candidates, dense=dense, categorical=categorical)


ARMS = {"history": 0, "together": 0, "week": 0, "store": 0, "tower": 60}  # a source, and its other quota
SHAPES: dict[str, Callable[[Task], Task]] = {
    "as they are": lambda task: task,
    "no history": lambda task: replace(task, history=no_events()),
    "no history, one item": lambda task: replace(task, history=no_events(), visible=task.visible[:1]),
}
RANKS = (20, 50, 100)  # places in the ranked list, beside "later" and "not retrieved"


def compare_sources(bundle: Bundle, tasks: Sequence[Task], purchases: Purchases) -> list[dict[str, Any]]:
    """Return the ratio of quality with another quota of one source to the quality as served, for all arms."""
    rows, boot = [], Bootstrap([task.user_id for task in tasks])
    for shape, shaped in SHAPES.items():
        asked = [shaped(task) for task in tasks]
        served = _tally(bundle, asked, purchases)
        for source, quota in ARMS.items():
            quotas = replace(bundle.settings.quotas, **{source: quota})
            if quotas == bundle.settings.quotas:
                quotas = replace(quotas, **{source: 0})
            other = replace(bundle, settings=replace(bundle.settings, quotas=quotas))
            tally = _tally(other, asked, purchases)
            quota = getattr(quotas, source)
            rows.append({"requests": shape, "source": source, "quota": quota, **ratios(tally, served, boot)})
    return rows


def _tally(bundle: Bundle, tasks: Sequence[Task], purchases: Purchases) -> Tally:
    tally, store = Tally.empty(), MemoryStore()
    recommender = Recommender(bundle, store)
    for task, prepared in prepared_tasks(recommender, store, list(tasks), counts=Nightly(bundle, purchases)):
        _rank(recommender, prepared, task, tally)
    return tally


def map_hidden_items(
    bundle: Bundle, tasks: Sequence[Task], purchases: Purchases
) -> dict[str, dict[str, dict[str, float]]]:
    """Return where the hidden items are: the source that found each first, and its place in the ranked list.

    Shares of all hidden items, of repeated ones, and of those new to the shopper.
    """
    store = MemoryStore()
    recommender = Recommender(bundle, store)
    found, repeated = [], []
    for task, prepared in prepared_tasks(recommender, store, list(tasks), counts=Nightly(bundle, purchases)):
        scores = recommender.rank(prepared.dense, prepared.categorical)
        place = np.argsort(np.argsort(-scores, kind="stable"))
        for item, is_repeat in zip(task.hidden.tolist(), task.bought_before.tolist(), strict=True):
            [at] = np.flatnonzero(prepared.candidates.codes == item)[:1].tolist() or [-1]
            source = "not retrieved" if at < 0 else SOURCES[prepared.candidates.source[at]]
            rank = "not retrieved" if at < 0 else next((f"to {r}" for r in RANKS if place[at] < r), "later")
            found.append((source, rank))
            repeated.append(is_repeat)
    is_repeat = np.array(repeated)
    kinds = {"all": np.ones(len(found), bool), "repeat": is_repeat, "new": ~is_repeat}
    shares: dict[str, dict[str, dict[str, float]]] = {}
    for column, name in enumerate(("first found by", "place in the ranking")):
        values = np.array([row[column] for row in found])
        shares[name] = {
            value: {kind: float((values[mask] == value).mean()) for kind, mask in kinds.items() if mask.any()}
            for value in dict.fromkeys(values.tolist())
        }
    return shares


def _baselines(bundle: Bundle, task: Task, prepared: Prepared) -> dict[str, np.ndarray]:
    statistics, codes = bundle.statistics, prepared.candidates.codes
    row = statistics.store_row.get(task.store_id)
    best, tower = (
        None if row is None else statistics.store_popular[row],
        bundle.profiles[DEFAULT_PROFILE].tower,
    )
    return {name: scored(prepared.query, best, tower)[codes] for name, scored in BASELINES.items()}


def _areas(pairs: Sequence[tuple[np.ndarray, np.ndarray]]) -> dict[str, float]:
    scores, label = (np.concatenate(column) for column in zip(*pairs, strict=True))
    inside = [auc(s, y) for s, y in pairs if 0 < y.sum() < len(y)]
    return {"auc": auc(scores, label), "gauc": float(np.mean(inside or [0.5]))}


def evaluate_new_items(bundle: Bundle, retriever: Path, data: Dataset, folder: Path) -> dict[str, Any]:
    """Return how often items that first sold after the cut are found, once `reco extend` has added them.

    Args:
        bundle: it does not know them.
        retriever: the checkpoint that the bundle was made from.
        data: the weeks after the cut are in it.
        folder: for the extended bundle.
    """
    start, end = window_s(pd.Timestamp(bundle.manifest["cut"]))
    purchases = purchases_of(data.events)
    in_window = (purchases.at >= start) & (purchases.at < end)
    sold = purchases.item_ids[np.unique(purchases.item[in_window])]
    unknown = data.items[data.items["item_id"].isin(set(sold.tolist()) - set(bundle.statistics.code_of))]
    columns = [name for name in ("item_id", *LEVELS, "price") if name in unknown]
    extend_index(bundle.path, retriever, folder, unknown[columns].reset_index(drop=True), [])
    extended = load_bundle(folder)
    store = MemoryStore()
    recommender = Recommender(extended, store)
    first_new = extended.statistics.known_items
    tasks = read_tasks(purchases, extended.statistics, start, end).hidden
    asked = sample([task for task in tasks if (task.hidden >= first_new).any()])
    lines = retrieved = shown = 0
    for task, prepared in prepared_tasks(recommender, store, asked, counts=Nightly(extended, purchases)):
        new = task.hidden[task.hidden >= first_new]
        answer = recommender.finish(prepared, recommender.rank(prepared.dense, prepared.categorical))
        top = extended.statistics.codes([item.item_id for item in answer.items[:20]])
        lines += len(new)
        retrieved += int(np.isin(new, prepared.candidates.codes).sum())
        shown += int(np.isin(new, top).sum())
    return {
        "items": len(unknown),
        "baskets": len(asked),
        "lines": lines,
        "recall_at_500": retrieved / lines if lines else None,
        "recall_at_20": shown / lines if lines else None,
    }
