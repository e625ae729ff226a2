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
from components.evaluation.protocol import Task, last_baskets, purchases_in, read_tasks
from components.retriever.extend_index import extend_index
from feature_repo.aggregates import no_events
from feature_repo.events import Dataset
from feature_repo.queries import Rows
from feature_repo.schema import LEVELS, model_inputs
from serving.answer.recommender import Prepared, Recommender
from serving.release.bundle import Bundle, load_bundle
from serving.schemas import DEFAULT_PROFILE, MAX_K, Response
from serving.stages.retrieval import SOURCES, Candidates
from serving.stores.online_features import MemoryStore

TASKS = 500  # test baskets; ranking a whole catalogue for one takes as long as many answers


def sample(tasks: Sequence[Task], most: int = TASKS) -> list[Task]:
    """Return some tasks, evenly from the first to the last: they are sorted by time."""
    return [tasks[row] for row in np.linspace(0, len(tasks) - 1, min(most, len(tasks))).astype(int)]


def compare_with_whole_catalogue(
    bundle: Bundle, tasks: Sequence[Task], purchases: Purchases
) -> dict[str, Any]:
    """Return quality and time of the funnel beside the same ranker over every item, basket by basket.

    Both read the row, compute features, rank and re-rank. Each has its own pass over the baskets: after
    26,000 items a small answer would find cold caches.

    Also AUC over the served candidates: of the ranker, and of each baseline for the same candidates.
    """
    recommender = Recommender(bundle, MemoryStore())
    funnel, whole = Tally(), Tally()
    funnel_ms, whole_ms = [], []
    judged: dict[str, list[tuple[np.ndarray, np.ndarray]]] = {name: [] for name in ("served", *BASELINES)}
    for task, prepared in prepared_tasks(bundle, tasks, counts=Nightly(bundle, purchases)):
        ranked_ms, scores = _rank(recommender, prepared, task, funnel)
        funnel_ms.append(prepared.stage_ms["features"] + prepared.stage_ms["retrieval"] + ranked_ms)
        label = np.isin(prepared.candidates.codes, task.hidden)
        judged["served"].append((scores, label))
        for name, baseline in _baselines(bundle, task, prepared).items():
            judged[name].append((baseline, label))
    for task, prepared in prepared_tasks(bundle, tasks, counts=Nightly(bundle, purchases)):
        # Of the stage, without the features of the candidates: the row and the query.
        read_ms = prepared.stage_ms["features"] - (prepared.ready_at - prepared.retrieved_at) * 1e3
        began = time.perf_counter()
        everything = _over_all_items(bundle, prepared)
        built_ms = (time.perf_counter() - began) * 1e3
        whole_ms.append(read_ms + built_ms + _rank(recommender, everything, task, whole)[0])
    boot = Bootstrap([task.user_id for task in tasks])
    items = len(bundle.statistics.item_ids)
    return {
        "baskets": len(tasks),
        "items": items,
        "funnel": summary(funnel, boot, items),
        "whole_catalogue": summary(whole, boot, items),
        "kept": ratios(funnel, whole, boot),
        "ms": {"funnel": float(np.median(funnel_ms)), "whole_catalogue": float(np.median(whole_ms))},
        "times_slower": np.percentile(np.divide(whole_ms, funnel_ms), [50, 5, 95]).tolist(),
        "auc": {name: _areas(pairs) for name, pairs in judged.items()},
    }


def _rank(recommender: Recommender, prepared: Prepared, task: Task, tally: Tally) -> tuple[float, np.ndarray]:
    began = time.perf_counter()
    scores = recommender.rank(prepared.dense, prepared.categorical)
    answer = recommender.finish(prepared, scores)
    took_ms = (time.perf_counter() - began) * 1e3
    _count(recommender, answer, task, tally)
    return took_ms, scores


def _count(recommender: Recommender, answer: Response, task: Task, tally: Tally) -> None:
    codes = recommender.bundle.statistics.codes([item.item_id for item in answer.items])
    tally.add(codes, task.hidden, task.bought_before)


def _over_all_items(bundle: Bundle, prepared: Prepared) -> Prepared:
    offered = np.flatnonzero(bundle.profiles[DEFAULT_PROFILE].offers)
    codes = np.setdiff1d(offered, prepared.query.basket)
    dense, categorical = model_inputs(Rows(prepared.query, codes))
    candidates = Candidates(codes, np.full(len(codes), SOURCES.index("popular"), np.int8))
    return replace(prepared, candidates=candidates, dense=dense, categorical=categorical)


TOWER = 60  # candidates that the other arm of an unasked tower gets
THIN = 5  # baskets of a thin history
SHAPES: dict[str, Callable[[Task], Task]] = {
    "as they are": lambda task: task,
    f"last {THIN} baskets": lambda task: replace(task, history=last_baskets(task.history, THIN)),
    "no history": lambda task: replace(task, history=no_events()),
    "no history, one item": lambda task: replace(task, history=no_events(), visible=task.visible[:1]),
}
ARMS = ("history", "together", "week", "store", "tower")
RANKS = (20, 50, 100)  # places in the ranked list, beside "later" and "not retrieved"
LENGTHS = {"under 20": (0, 20), "20 to 59": (20, 60), "60 or more": (60, np.inf)}  # baskets before


def compare_sources(bundle: Bundle, tasks: Sequence[Task], purchases: Purchases) -> list[dict[str, Any]]:
    """Return the ratio of quality without the candidates of one source to the quality as served.

    No other source fills their places: a rank in the served list may stay empty. A tower that is not asked is
    asked instead. A source that brought nothing to any of the requests has no row.
    """
    rows = []
    for shape, asked in _requests(bundle, tasks).items():
        boot = Bootstrap([task.user_id for task in asked])
        served, arms = _without_each(bundle, asked, purchases)
        quota = dict.fromkeys(arms, 0)
        if "tower" not in arms and not bundle.settings.quotas.tower:
            quotas = replace(bundle.settings.quotas, tower=TOWER)
            other = replace(bundle, settings=replace(bundle.settings, quotas=quotas))
            arms["tower"], quota["tower"] = _without_each(other, asked, purchases)[0], TOWER
        for source, tally in arms.items():
            row = {"requests": shape, "source": source, "quota": quota[source]}
            rows.append({**row, **ratios(tally, served, boot)})
    return rows


def _requests(bundle: Bundle, tasks: Sequence[Task]) -> dict[str, list[Task]]:
    """Return the test baskets in each shape, and those that a profile's filter leaves anything of."""
    asked = {shape: [shaped(task) for task in tasks] for shape, shaped in SHAPES.items()}
    filtered = [name for name, profile in bundle.settings.profiles.items() if profile.items is not None]
    for name in filtered:
        offers, some = bundle.profiles[name].offers, []
        for task in tasks:
            stays = offers[task.hidden]
            left = replace(
                task, hidden=task.hidden[stays], bought_before=task.bought_before[stays], profile=name
            )
            some += [left] if stays.any() else []
        asked |= {f"profile {name}": some} if some else {}
    return asked


def _without_each(
    bundle: Bundle, tasks: Sequence[Task], purchases: Purchases
) -> tuple[Tally, dict[str, Tally]]:
    """Return the tally as served, and for each source that brought any candidate the tally without those."""
    served = Tally()
    arms, brought = {source: Tally() for source in ARMS}, set()
    recommender, counts = Recommender(bundle, MemoryStore()), Nightly(bundle, purchases)
    for task, prepared in prepared_tasks(bundle, tasks, counts=counts):
        scores = recommender.rank(prepared.dense, prepared.categorical)
        _count(recommender, recommender.finish(prepared, scores), task, served)
        for source, tally in arms.items():
            keep = prepared.candidates.source != SOURCES.index(source)
            brought |= set() if keep.all() else {source}
            some = recommender.finish(_some(prepared, keep), scores[keep])
            _count(recommender, some, task, tally)
    return served, {source: tally for source, tally in arms.items() if source in brought}


def _some(prepared: Prepared, keep: np.ndarray) -> Prepared:
    """Return a request with some of its candidates, a mask."""
    candidates = Candidates(prepared.candidates.codes[keep], prepared.candidates.source[keep])
    rows = {"dense": prepared.dense[keep], "categorical": prepared.categorical[keep]}
    return replace(prepared, candidates=candidates, **rows)


def map_hidden_items(
    bundle: Bundle, tasks: Sequence[Task], purchases: Purchases
) -> dict[str, dict[str, dict[str, float]]]:
    """Return where the hidden items are: the source that found each first, and its place in the ranked list.

    Shares of all hidden items, of repeated ones, of those new to the shopper, and by the number of baskets in
    the shopper's history.
    """
    recommender = Recommender(bundle, MemoryStore())
    found, repeated, baskets = [], [], []
    for task, prepared in prepared_tasks(bundle, tasks, counts=Nightly(bundle, purchases)):
        scores = recommender.rank(prepared.dense, prepared.categorical)
        place = np.argsort(np.argsort(-scores, kind="stable"))
        baskets += [purchases_in(task.history).baskets] * len(task.hidden)
        for item, is_repeat in zip(task.hidden.tolist(), task.bought_before.tolist(), strict=True):
            [at] = np.flatnonzero(prepared.candidates.codes == item)[:1].tolist() or [-1]
            source = "not retrieved" if at < 0 else SOURCES[prepared.candidates.source[at]]
            rank = "not retrieved" if at < 0 else next((f"to {r}" for r in RANKS if place[at] < r), "later")
            found.append((source, rank))
            repeated.append(is_repeat)
    is_repeat, before = np.array(repeated), np.array(baskets)
    kinds = {"all": np.ones(len(found), bool), "repeat": is_repeat, "new": ~is_repeat}
    kinds |= {f"{name} baskets": (before >= low) & (before < end) for name, (low, end) in LENGTHS.items()}
    shares: dict[str, dict[str, dict[str, float]]] = {}
    for column, name in enumerate(("first found by", "place in the ranking")):
        values = np.array([row[column] for row in found])
        shares[name] = {
            value: {kind: float((values[mask] == value).mean()) for kind, mask in kinds.items() if mask.any()}
            for value in dict.fromkeys(values.tolist())
        }
    return shares


def find_ceiling(bundle: Bundle, tasks: Sequence[Task], purchases: Purchases) -> dict[str, dict[str, Any]]:
    """Return how good the list could be: with the truth among the candidates, and with a perfect ranker.

    Each system has its quality and, beside the ranker's plain order, its ratio.
    """
    boot = Bootstrap([task.user_id for task in tasks])
    names = ("as served", "the ranker's order", "with the truth among the candidates", "a perfect ranker")
    tallies = {name: Tally() for name in names}
    recommender, counts = Recommender(bundle, MemoryStore()), Nightly(bundle, purchases)
    for task, prepared in prepared_tasks(bundle, tasks, counts=counts):
        codes = prepared.candidates.codes
        scores = recommender.rank(prepared.dense, prepared.categorical)
        _count(recommender, recommender.finish(prepared, scores), task, tallies[names[0]])
        missing = np.setdiff1d(task.hidden, codes)
        dense, categorical = model_inputs(Rows(prepared.query, missing))
        more = recommender.rank(dense, categorical) if len(missing) else scores[:0]
        ranked = (
            codes[np.argsort(-scores, kind="stable")],
            np.concatenate([codes, missing])[np.argsort(-np.concatenate([scores, more]), kind="stable")],
            codes[np.argsort(~np.isin(codes, task.hidden), kind="stable")],
        )
        for name, order in zip(names[1:], ranked, strict=True):
            tallies[name].add(order[:MAX_K], task.hidden, task.bought_before)
    items, plain = len(bundle.statistics.item_ids), tallies[names[1]]
    return {
        name: {**summary(tally, boot, items), "ratios": ratios(tally, plain, boot)}
        for name, tally in tallies.items()
    }


def _baselines(bundle: Bundle, task: Task, prepared: Prepared) -> dict[str, np.ndarray]:
    statistics, codes = bundle.statistics, prepared.candidates.codes
    best, tower = statistics.best_of_store(task.store_id), bundle.profiles[DEFAULT_PROFILE].tower
    return {name: scored(prepared.query, best, tower)[codes] for name, scored in BASELINES.items()}


def _areas(pairs: Sequence[tuple[np.ndarray, np.ndarray]]) -> dict[str, float]:
    scores, label = (np.concatenate(column) for column in zip(*pairs, strict=True))
    inside = [auc(s, y) for s, y in pairs if 0 < y.sum() < len(y)]
    return {"auc": auc(scores, label), "gauc": float(np.mean(inside or [0.5]))}


def evaluate_new_items(bundle: Bundle, retriever: Path, data: Dataset, folder: Path) -> dict[str, Any]:
    """Return how often items that the catalogue lacks are found, once `reco extend` has added them.

    They were sold fewer than MIN_BASKETS times before the cut, or not at all.

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
    extend_index(bundle.path, retriever, folder, unknown[["item_id", *LEVELS]].reset_index(drop=True), [])
    extended = load_bundle(folder)
    recommender = Recommender(extended, MemoryStore())
    first_new = len(bundle.statistics.item_ids)  # others may have joined before
    tasks = read_tasks(purchases, extended.statistics, start, end).hidden
    asked = sample([task for task in tasks if (task.hidden >= first_new).any()])
    lines = retrieved = shown = 0
    for task, prepared in prepared_tasks(extended, asked, counts=Nightly(extended, purchases)):
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
