"""A bundle and the weeks after its cut -> quality through the served path, beside the baselines.

The baskets are those of `components.evaluation.protocol`. The whole catalogue minus the basket is ranked,
never a sample. Answers come from `serving.answer.recommender`: the served path itself is measured.
Intervals are a bootstrap over users.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from components.data.build_examples import MIN_BASKET_ITEMS
from components.data.fit_statistics import Purchases, fit, purchases_of
from components.data.ingest_events import TEST_WINDOW
from components.evaluation.baselines import BASELINES
from components.evaluation.metrics import METRICS, Bootstrap, Pair, Tally, calibration, ratios, summary
from components.evaluation.nightly import Nightly
from components.evaluation.protocol import (
    PROTOCOL_SEED,
    Task,
    Tasks,
    last_baskets,
    purchases_in,
    read_tasks,
)
from components.progress import with_progress
from feature_repo.aggregates import UserEvents, no_events, pack
from feature_repo.events import Dataset, lines_bought, read_dataset
from feature_repo.schema import DENSE_NAMES
from feature_repo.statistics import Statistics, read_vocabulary
from serving.answer.recommender import Prepared, Recommender
from serving.prediction_log import Record, records_to_table
from serving.release.bundle import INDEX_REPORT, Bundle, load_bundle, seal_bundle
from serving.release.golden import read_golden, write_golden
from serving.schemas import DEFAULT_K, DEFAULT_PROFILE, MAX_K
from serving.stages.item_index import FaissTower
from serving.stages.retrieval import SOURCES, Quotas, retrieve
from serving.stores.online_features import MemoryStore, UserRow

log = logging.getLogger(__name__)

REFERENCE_WINDOW = pd.Timedelta(weeks=9)
COLD_RATIO = 0.2
INDEX = ("kind", "recall", "k", "target", "p50_ms", "bytes")  # of its build's measurements
ALONE = 1_000  # baskets: fewer are answered sooner than a second process has started
REPORTED = ("ndcg_at_10", "recall_at_20", "hit_ratio_at_10", "mrr")  # metrics by which runs are compared


def evaluate_bundle(bundle: Path, dataset: Path, evaluated: Path) -> dict[str, Any]:
    """Evaluate a bundle and write a sealed copy with results and drift reference.

    The data set includes the weeks after the bundle's cut.

    Returns:
        The id of the sealed copy; the headline metrics of the served path with their intervals; those of the
        baselines, with the ratio to each.

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
    users = {None, *data.events["user_id"]}  # not one who was forgotten since the bundle was assembled
    write_golden(evaluated, [one for one in read_golden(evaluated) if one.request.get("user_id") in users])
    bundle_id = seal_bundle(
        evaluated,
        cut=loaded.manifest["cut"],
        settings=loaded.settings,
        made_from={**loaded.manifest["made_from"], "parent": loaded.bundle_id},
    )
    return {"bundle_id": bundle_id, **headline(results)}


def headline(results: dict[str, Any]) -> dict[str, Any]:
    """Return the means by which evaluations are compared, of the served path and of the baselines."""
    served, baselines = results["served"], results["baselines"]
    return {
        **{name: served[name] for name in REPORTED},
        "interval": {name: _ends(served["interval"][name]) for name in REPORTED},
        "baselines": {
            name: {metric: row[metric] for metric in REPORTED}
            | {"served_is_times": ratio["ndcg_at_10"], "interval": _ends(ratio["ndcg_at_10_interval"])}
            for (name, row), ratio in zip(baselines.items(), results["ratios"].values(), strict=True)
        },
    }


def _ends(interval: list[float | None]) -> dict[str, float | None]:
    return {"low": interval[0], "high": interval[1]}


def evaluate(bundle: Bundle, data: Dataset) -> tuple[dict[str, Any], list[Record]]:
    """Return the evaluation of a bundle on the five weeks after its cut, and the served answers' records.

    Raises:
        ValueError: no basket of the test window can be asked.
    """
    began = time.perf_counter()
    purchases = purchases_of(data.events)
    start = pd.Timestamp(bundle.manifest["cut"])
    end = start + TEST_WINDOW
    found = tasks_after(purchases, bundle.statistics, start)
    tasks = found.hidden
    log.info("%d test baskets from %s to %s", len(tasks), start.date(), end.date())
    boot = Bootstrap([task.user_id for task in tasks])
    size = len(bundle.statistics.item_ids)
    baselines = {name: Tally() for name in BASELINES}
    # The parts share nothing but their inputs, so a second process halves the wait.
    rest = partial(_evaluate_beside, bundle.path, data.items, purchases, found)
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as beside:
        others = beside.submit(rest) if len(tasks) >= ALONE else None
        served, pairs = serve(bundle, tasks, Nightly(bundle, purchases), baselines)
    candidates, cold, records = others.result() if others else rest()
    window = f"{data.manifest['data_hash']} {start.isoformat()}"
    index = json.loads((bundle.path / INDEX_REPORT).read_bytes())
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
        "out_of_catalogue_ratio": found.out_of_catalogue_ratio,
        "served": summary(served, boot, size),
        "baselines": {name: summary(tally, boot, size) for name, tally in baselines.items()},
        "ratios": {name: ratios(served, tally, boot) for name, tally in baselines.items()},
        "candidates": candidates,
        "segments": _segments(served, tasks),
        "cold": cold,
        "calibration": calibration(pairs),
        "index": {name: index[name] for name in INDEX if name in index},
    }
    results["seconds"] = round(time.perf_counter() - began, 1)
    return results, records


def tasks_after(
    purchases: Purchases, statistics: Statistics, start: pd.Timestamp, window: pd.Timedelta = TEST_WINDOW
) -> Tasks:
    """Return the test baskets of the weeks after a cut.

    Raises:
        ValueError: none of them can be asked.
    """
    found = read_tasks(purchases, statistics, start.timestamp(), (start + window).timestamp())
    if not found.hidden:
        raise ValueError(
            f"no basket of {MIN_BASKET_ITEMS} catalogue items between {start} and {start + window}: "
            "choose an earlier --train-until, so that some weeks are left to test on"
        )
    return found


def window_s(start: pd.Timestamp) -> tuple[float, float]:
    """Return begin and end of the test window after a cut, in seconds since the epoch."""
    return start.timestamp(), (start + TEST_WINDOW).timestamp()


def _evaluate_beside(
    bundle_path: Path, items: pd.DataFrame, purchases: Purchases, found: Tasks
) -> tuple[dict[str, dict[str, float]], dict[str, Any], list[Record]]:
    """Return the recall of each source, the metrics of cold users, and the served answers' records."""
    bundle = load_bundle(bundle_path)
    counts = Nightly(bundle, purchases)
    cold = _cold(bundle, items, purchases, found.hidden)
    return _source_recall(bundle, found.hidden, counts), cold, _records(bundle, found.whole, counts)


def serve(
    bundle: Bundle,
    tasks: Sequence[Task],
    counts: Nightly | None = None,
    baselines: dict[str, Tally] | None = None,
) -> tuple[Tally, list[Pair]]:
    """Ask every task through the served path, and the baselines beside it; k is the largest one may ask.

    Returns:
        The tally of the served path; beside baselines, also scores and hits of each task's candidates.
    """
    tally, pairs = Tally(), []
    recommender = Recommender(bundle, MemoryStore())
    tower = bundle.profiles[DEFAULT_PROFILE].tower
    prepared_each = prepared_tasks(bundle, tasks, counts=counts)
    for task, prepared in with_progress(prepared_each, len(tasks), "baskets answered"):
        scores = recommender.rank(prepared.dense, prepared.categorical)
        response = recommender.finish(prepared, scores)
        ranked = np.array([bundle.statistics.code_of[item.item_id] for item in response.items], np.int64)
        tally.add(ranked, task.hidden, task.bought_before)
        if baselines:
            _rank_baselines(baselines, bundle, tower, task, prepared)
            pairs.append((scores, np.isin(prepared.candidates.codes, task.hidden)))
    return tally, pairs


def _records(bundle: Bundle, tasks: list[Task], counts: Nightly) -> list[Record]:
    """Return the records that the prediction log would hold if these tasks had arrived at their own time."""
    records: list[Record] = []
    recommender = Recommender(bundle, MemoryStore(), records)
    for _, prepared in prepared_tasks(bundle, tasks, DEFAULT_K, counts):
        recommender.finish(prepared, recommender.rank(prepared.dense, prepared.categorical))
    return [replace(record, answered_at=record.request.at) for record in records]


def _rank_baselines(
    tallies: dict[str, Tally], bundle: Bundle, tower: FaissTower, task: Task, prepared: Prepared
) -> None:
    """Rank the catalogue by each baseline that has a tally, and count its hits."""
    best = bundle.statistics.best_of_store(task.store_id)
    for name, tally in tallies.items():
        scores = BASELINES[name](prepared.query, best, tower)
        scores[prepared.query.basket] = -np.inf
        tally.add_best(scores, task.hidden, task.bought_before)


def prepared_tasks(
    bundle: Bundle, tasks: Sequence[Task], k: int = MAX_K, counts: Nightly | None = None
) -> Iterator[tuple[Task, Prepared]]:
    """Yield each task, prepared for ranking by the request path from a store that holds its history.

    With `counts`, items are counted each night; without, as at the cut.
    """
    store = MemoryStore()
    recommender = Recommender(bundle, store)
    for task in tasks:
        store.write(task.user_id, UserRow(pack(task.history), float(task.at)))
        own = recommender if counts is None else counts.recommender(recommender, task.at)
        yield task, own.prepare(task.request(k))


def _source_recall(bundle: Bundle, tasks: list[Task], counts: Nightly) -> dict[str, dict[str, float]]:
    """Return Recall@500 of each source alone and of the union as served, on a sample of the tasks."""
    nothing = Quotas(history=0, together=0, week=0, tower=0, store=0)
    alone: dict[str, Quotas] = {
        "served": bundle.settings.quotas,
        **{name: replace(nothing, **{name: 500}) for name in vars(nothing) if name != "total"},
        "popular": nothing,
    }
    tower = bundle.profiles[DEFAULT_PROFILE].tower
    found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in alone}
    some = tasks[:: max(1, len(tasks) // 2_000)]
    for task, prepared in prepared_tasks(bundle, some, counts=counts):
        best = bundle.statistics.best_of_store(task.store_id)
        for name, quotas in alone.items():
            near = tower.search(prepared.query, quotas.tower)
            candidates = retrieve(prepared.query, best, quotas, near)
            own = candidates.codes
            if name == "popular":
                own = bundle.statistics.popular
            elif name != "served":  # `retrieve` fills up: a source alone counts only its own candidates
                own = own[candidates.source == SOURCES.index(name)]
            hit = np.isin(task.hidden, own)
            before = task.bought_before
            found[name].append(
                (
                    hit.mean(),
                    hit[before].mean() if before.any() else np.nan,
                    hit[~before].mean() if (~before).any() else np.nan,
                )
            )
    means = {name: np.ma.masked_invalid(rows).mean(0).filled(0.0).round(4) for name, rows in found.items()}
    return {
        name: dict(zip(("recall", "repeat", "new"), row.tolist(), strict=True)) for name, row in means.items()
    }


def _segments(tally: Tally, tasks: list[Task]) -> dict[str, dict[str, float]]:
    values = np.array(tally.rows)
    visible = np.array([len(task.visible) for task in tasks])
    baskets = np.array([purchases_in(task.history).baskets for task in tasks])
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
    warm = seen.where(~cold[seen.user])
    chosen = [task for task in tasks if cold[task.user]]
    if not chosen or not np.isin(warm.item_ids[warm.item], bundle.statistics.item_ids).any():
        return {}
    stranger = as_known(bundle, items, warm, cut)
    counts = Nightly(stranger, purchases.where(~cold[purchases.user]))
    boot = Bootstrap([task.user_id for task in chosen])
    shapes: dict[str, Callable[[Task], UserEvents]] = {
        "no_history": lambda task: no_events(),
        "last_5_baskets": lambda task: last_baskets(task.history, 5),
        "all_history": lambda task: task.history,
    }
    results: dict[str, Any] = {"users": len({task.user_id for task in chosen}), "baskets": len(chosen)}
    for name, shape in shapes.items():
        asked = [replace(task, history=shape(task)) for task in chosen]
        tally, _ = serve(stranger, asked, counts)
        results[name] = summary(tally, boot, len(stranger.statistics.item_ids))
    return results


def as_known(bundle: Bundle, items: pd.DataFrame, seen: Purchases, moment: pd.Timestamp) -> Bundle:
    """Return a bundle whose tables are fitted on the purchases `seen` before a moment; the models stay.

    Its catalogue stays, too. An item of it may be in no purchase: its buyers were forgotten, or it was not
    sold yet. The models still do not know items that joined after the training.
    """
    catalogue = np.asarray(bundle.statistics.item_ids)
    ids = np.union1d(seen.item_ids, catalogue)
    seen = replace(seen, item_ids=ids, item=np.searchsorted(ids, seen.item_ids)[seen.item])
    vocabulary = read_vocabulary(bundle.path / "statistics")
    fitted = fit(seen, items.set_index("item_id"), vocabulary, moment, catalogue)
    return replace(bundle, statistics=replace(fitted, new_items=bundle.statistics.new_items))


def _reference_events(data: Dataset, cut: pd.Timestamp) -> pa.Table:
    """Return the purchases of the nine weeks before the cut: what later weeks are compared with."""
    inside = data.events["at"].between(cut - REFERENCE_WINDOW, cut, inclusive="left")
    return pa.Table.from_pandas(lines_bought(data, inside.to_numpy()), preserve_index=False)
