"""A bundle and a size -> recall, time and bytes of each type of index.

Large catalogues are synthetic: no shop of millions of items gives its purchases away. Their vectors lie as
those of the synthetic shop would: items of a type are alike, types of a category, categories of a
department. A query is the mean of a basket: two items of one type and two from anywhere.
"""

from __future__ import annotations

import json
import logging
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from components.hyper_parameters import IndexParams
from components.measurement import machine_state
from components.retriever.choose_index import KINDS, measure_index
from pipelines.bench.report import fixed, machine_line, table, write_report
from pipelines.bench.synthetic_shop import CATEGORIES, DEPARTMENTS, TYPES
from serving.release.bundle import INDEX_REPORT, load_bundle

log = logging.getLogger(__name__)

# How far items of one department, category and type, and an item from its type, lie apart, in each
# dimension; a two-tower's own embeddings are of about this proportion.
SPREAD = {"department": 0.3, "category": 0.4, "type": 0.6, "item": 0.5}
TARGET_P99_MS = 2.0


def bench_retrieval(bundle: Path, out_dir: Path, items: int = 2_000_000) -> dict[str, Any]:
    """Measure and write `retrieval.json` and `.md`; return the content of the JSON.

    Args:
        bundle: whose index was measured when it was built.
        out_dir: of the results.
        items: size of the large catalogue; 2 M need 2 GiB of memory and, on two cores, six minutes.
    """
    before, loaded = machine_state(), load_bundle(bundle)
    sizes = ((items, 64, 500), (min(items, 68_500), 128, 500), (min(items, 68_500), 128, 1_000))
    figures: dict[str, Any] = {
        "bundle_id": loaded.bundle_id,
        "champion": json.loads((bundle / INDEX_REPORT).read_bytes()),
        "catalogues": [bench_catalogue(*size) for size in sizes],
    }
    return write_report(out_dir, "retrieval", figures, retrieval_table, before)


def bench_catalogue(items: int, width: int, k: int) -> dict[str, Any]:
    """Return the curve of every type of index over a synthetic catalogue."""
    log.info("%d items, %d dimensions, k = %d", items, width, k)
    params = IndexParams(k=k)
    vectors, queries = clustered(items, width, params.queries)
    with tempfile.TemporaryDirectory() as scratch:
        curve, _ = measure_index(vectors, queries, params, Path(scratch))
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
        "curve": curve,
    }


def clustered(items: int, width: int, queries: int) -> tuple[np.ndarray, np.ndarray]:
    """Return vectors of a synthetic catalogue, (items, width), and of queries, (queries, width), float32.

    The last dimension is the item's bias, 1 on the query's side, as the two towers have it.
    """
    rng = np.random.default_rng(0)
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


def retrieval_table(results: dict[str, Any]) -> str:
    """Return the measurements as Markdown."""
    lines = [
        f"{machine_line(results)}. One query at a time,"
        " one thread, indexes mapped from files; the points take turns.",
        *_champion(results["champion"]),
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
        f"p99 of at most {catalogue['target_p99_ms']:g} ms: {reached}. Left out, too slow to build or "
        f"without a saving for so few items: {left}.",
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
