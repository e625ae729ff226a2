"""A bundle, its data set and a size -> recall, time and bytes of retrieval, for each profile.

Large catalogues are synthetic: no shop of millions of items gives its purchases away. Their vectors lie as
those of the synthetic shop would: items of a type are alike, types of a category, categories of a
department. A query is the mean of a basket: two items of one type and two from anywhere.
"""

from __future__ import annotations

import json
import logging
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from components.data.fit_statistics import purchases_of
from components.evaluation.evaluate_bundle import prepared_tasks, window_s
from components.evaluation.metrics import METRICS, Tally
from components.evaluation.nightly import Nightly
from components.evaluation.protocol import Task, read_tasks
from components.hyper_parameters import IndexParams
from components.measurement import machine_state
from components.retriever.choose_index import KINDS, choose_index, measure_index
from feature_repo.events import Dataset, read_dataset
from pipelines.bench.report import fixed, machine_line, percent, table, write_report
from pipelines.bench.synthetic_shop import CATEGORIES, DEPARTMENTS, TYPES
from serving.answer.recommender import Recommender
from serving.release.bundle import INDEX_REPORT, Bundle, load_bundle
from serving.stores.online_features import MemoryStore

log = logging.getLogger(__name__)

# How far items of one department, category and type, and an item from its type, lie apart, in each
# dimension; a two-tower's own embeddings are of about this proportion.
SPREAD = {"department": 0.3, "category": 0.4, "type": 0.6, "item": 0.5}
TARGET_P99_MS = 2.0
TASKS = 1_000  # test baskets that each profile is asked


def bench_retrieval(bundle: Path, dataset: Path, out_dir: Path, items: int = 2_000_000) -> dict[str, Any]:
    """Measure and write `retrieval.json` and `.md`; return the content of the JSON.

    Args:
        bundle: whose index was measured when it was built, and whose profiles are asked.
        dataset: the weeks after its cut are in it.
        out_dir: the folder of the results.
        items: size of the large catalogue; 2 M need 5 GiB of memory and, on two cores, half an hour.
    """
    before, loaded = machine_state(), load_bundle(bundle)
    sizes = ((items, 64, 500), (min(items, 68_500), 128, 500), (min(items, 68_500), 128, 1_000))
    report = bundle / INDEX_REPORT
    figures: dict[str, Any] = {
        "bundle_id": loaded.bundle_id,
        "champion": json.loads(report.read_bytes()) if report.is_file() else None,
        "profiles": evaluate_profiles(loaded, read_dataset(dataset)),
        "catalogues": [bench_catalogue(*size) for size in sizes],
    }
    return write_report(out_dir, "retrieval", figures, retrieval_table, before)


def bench_catalogue(items: int, width: int, k: int, seed: int = 0) -> dict[str, Any]:
    """Return the curve of every type of index over a synthetic catalogue."""
    log.info("%d items, %d dimensions, k = %d", items, width, k)
    params = IndexParams(k=k)
    vectors, queries = clustered(items, width, params.queries, seed)
    with tempfile.TemporaryDirectory() as scratch:
        curve, _ = measure_index(vectors, queries, params, Path(scratch))
        row = choose_index(curve, params.target, params.margin)
    reached = [p for p in curve if p["recall"] >= params.target and p["p99_ms"] <= TARGET_P99_MS]
    measured = {point["kind"] for point in curve}
    return {
        "items": items,
        "dimension": width,
        "k": min(k, items),
        "queries": len(queries),
        "target_recall": params.target,
        "target_p99_ms": TARGET_P99_MS,
        "reached_by": sorted({point["kind"] for point in reached}),
        "left_out": [kind for kind in KINDS if kind not in measured],
        "chosen": curve[row],
        "curve": curve,
    }


def clustered(items: int, width: int, queries: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Return vectors of a synthetic catalogue, (items, width), and of queries, (queries, width), float32.

    The last dimension is the item's bias, 1 on the query's side, as the two towers have it.
    """
    rng = np.random.default_rng(seed)
    kind = np.arange(items) // 4 % TYPES
    vectors = rng.normal(0, SPREAD["item"], (items, width)).astype(np.float32)
    for name, size in (("department", DEPARTMENTS), ("category", CATEGORIES), ("type", TYPES)):
        centres = rng.normal(0, SPREAD[name], (size, width)).astype(np.float32)
        centres[:, -1] = 0
        vectors += centres[kind % size]
    first = rng.integers(items, size=queries)
    alike = (first + 4 * TYPES * rng.integers(1, max(items // (4 * TYPES), 2), queries)) % items
    basket = np.stack([first, alike, *rng.integers(items, size=(2, queries))])
    asked = vectors[basket].mean(0)
    asked[:, -1] = 1
    return vectors, asked


def evaluate_profiles(bundle: Bundle, data: Dataset) -> dict[str, dict[str, float]]:
    """Return Recall@500 of the candidates and the metrics of the answers for each profile of a bundle.

    A profile can only be right about items that its filter lets pass: of each test basket, the hidden ones
    of those count; baskets without any are left out. Items are counted each night, as in every evaluation.
    """
    start = pd.Timestamp(bundle.manifest["cut"])
    purchases = purchases_of(data.events)
    tasks = read_tasks(purchases, bundle.statistics, *window_s(start)).hidden
    some, counts = tasks[:: max(1, len(tasks) // TASKS)], Nightly(bundle, purchases)
    return {name: _evaluate_profile(bundle, name, some, counts) for name in bundle.profiles}


def _evaluate_profile(bundle: Bundle, name: str, tasks: list[Task], counts: Nightly) -> dict[str, float]:
    tally, recalls = Tally.empty(), []
    recommender, barred = Recommender(bundle, MemoryStore()), bundle.profiles[name].barred
    some = [replace(task, profile=name) for task in tasks if not np.isin(task.hidden, barred).all()]
    hidden, passed = sum(len(task.hidden) for task in tasks), 0
    for task, prepared in prepared_tasks(bundle, some, counts=counts):
        wanted = ~np.isin(task.hidden, barred)
        passed += int(wanted.sum())
        answer = recommender.finish(prepared, recommender.rank(prepared.dense, prepared.categorical))
        ranked = bundle.statistics.codes([item.item_id for item in answer.items])
        tally.add(ranked, task.hidden[wanted], task.bought_before[wanted])
        recalls.append(float(np.isin(task.hidden[wanted], prepared.candidates.codes).mean()))
    means = np.array(tally.rows).mean(0).tolist() if recalls else [0.0] * len(METRICS)
    return {
        "items": len(bundle.statistics.item_ids) - len(barred),
        "baskets": len(recalls),
        "hidden_ratio": round(passed / max(hidden, 1), 4),
        "recall_at_500": round(float(np.mean(recalls or [0.0])), 4),
        **{metric: round(mean, 4) for metric, mean in zip(METRICS, means, strict=True)},
    }


def retrieval_table(results: dict[str, Any]) -> str:
    """Return the measurements as Markdown."""
    metrics = ("recall_at_500", "ndcg_at_10", "recall_at_20")
    head = ["profile", "items that pass", "baskets", "hidden items that pass", "Recall@500", "NDCG@10"]
    profiles = [
        [name, f"{row['items']:,}", row["baskets"], percent(row["hidden_ratio"], 1)]
        + [fixed(row[metric], 4) for metric in metrics]
        for name, row in results["profiles"].items()
    ]
    lines = [
        f"{machine_line(results)}. One query at a time,"
        " one thread, indexes mapped from files; the points take turns.",
        *(_champion(results["champion"]) if results["champion"] else []),
        "",
        *table([*head, "Recall@20"], profiles),
        *(line for catalogue in results["catalogues"] for line in _catalogue(catalogue)),
    ]
    return "\n".join(lines) + "\n"


def _champion(report: dict[str, Any]) -> list[str]:
    return [
        "",
        f"The champion's {report['items']:,} items, d = {report['dimension']}, k = {report['k']}; "
        f"{report['queries']['count']} queries of {report['queries']['of']}. Chosen: "
        f"{report['description']} {_search(report['search'])} (recall {report['target']:g} asked for, "
        f"{report['margin']:.0%} less time than the exact scan).",
        "",
        *_curve(report["curve"]),
    ]


def _catalogue(catalogue: dict[str, Any]) -> list[str]:
    reached = ", ".join(catalogue["reached_by"]) or "none"
    left = ", ".join(catalogue["left_out"]) or "none"
    return [
        "",
        f"A synthetic catalogue of {catalogue['items']:,} items, d = {catalogue['dimension']}, "
        f"k = {catalogue['k']}, {catalogue['queries']} queries. Recall {catalogue['target_recall']:g} with a "
        f"p99 of at most {catalogue['target_p99_ms']:g} ms: {reached}. Left out, too slow to build or too "
        f"few items to train on: {left}.",
        "",
        *_curve(catalogue["curve"]),
    ]


def _curve(curve: list[dict[str, Any]]) -> list[str]:
    flat = next(row["bytes"] for row in curve if row["kind"] == "flat")
    rows = [
        [
            row["description"],
            _search(row["search"]),
            fixed(row["bytes"] / 1e6, 1),
            fixed(flat / row["bytes"], 1, "x"),
            fixed(row["build_s"], 1),
            fixed(row["recall"], 4),
            fixed(row["p50_ms"], 3),
            fixed(row["p99_ms"], 3),
        ]
        for row in curve
    ]
    return table(["type", "searched with", "MB", "smaller", "build s", "recall", "p50 ms", "p99 ms"], rows)


def _search(given: dict[str, int]) -> str:
    return ", ".join(f"{name} {value}" for name, value in given.items())
