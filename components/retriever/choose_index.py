"""Item vectors and queries -> the recall and speed of every type of index, and the one that is worth it."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import faiss
import numpy as np

from components.hyper_parameters import IndexParams
from serving.stages.item_index import Search, read_faiss, read_item_index

log = logging.getLogger(__name__)

KINDS = ("flat", "ivf_sq8", "ivf_pq", "ivf_pq_refined", "hnsw")  # the simplest first
LEAST_ITEMS = 5_000  # of fewer a full scan takes tens of microseconds
PQ_LEAST = 100_000  # items: fewer vectors are small whole
HNSW_MOST = 200_000  # items: beyond, one core builds the graph for half an hour and more
ENOUGH_RECALL = 0.995  # a search that looks at more than one with this recall is not measured
LITTLE_RECALL = 0.001  # nor one that looks at more than a search that gained less than this
TRAIN_ROWS = 64  # vectors for each list: more move its centre by little
PQ_ITERATIONS = 6  # of k-means on the parts of a vector: twenty more gain next to nothing
BLOCK = 20  # queries in a row on one point, then another one's turn
CHUNK = 100_000  # vectors that are put into an index at a time

_faiss: Any = faiss  # its stubs know neither keyword parameters nor properties of C++ objects


def measure_index(
    vectors: np.ndarray, queries: np.ndarray, params: IndexParams, scratch: Path
) -> tuple[list[dict[str, Any]], list[Path]]:
    """Build every type of index and measure it as it is served: mapped, one query at a time, one thread.

    A point is a type of index and one way to search it. The points take turns, in another order each time, so
    that a busy moment of the machine is shared. A type is left out where it saves nothing with so few
    vectors, or would take too long to build with so many.

    Args:
        vectors: (n, d) float32, row number = item code.
        queries: (q, d) float32.
        params: k, and the recall that is enough.
        scratch: the folder that the indexes are written to.

    Returns:
        The curve, one row for each point, and the file of each row's index.
    """
    k = min(params.k, len(vectors))
    exact: np.ndarray = _faiss.knn(queries, vectors, k, metric=faiss.METRIC_INNER_PRODUCT)[1]
    curve: list[dict[str, Any]] = []
    for kind in _kinds(len(vectors)):
        log.info("%s of %d vectors", kind, len(vectors))
        curve += _points(kind, vectors, queries, exact, params, scratch)
    files = [scratch / f"{point['kind']}.faiss" for point in curve]
    searches = [Search(point["search"]) for point in curve]
    rng = np.random.default_rng(params.seed)
    for point, ms in zip(curve, _times(files, searches, queries, k, rng), strict=True):
        point["p50_ms"], point["p99_ms"] = np.percentile(ms, [50, 99]).round(4).tolist()
    return curve, files


def _kinds(items: int) -> list[str]:
    """Return the types that are worth a measurement for so many items."""
    if items < LEAST_ITEMS:
        return ["flat"]
    small = [kind for kind in KINDS if "pq" not in kind]
    kinds = small if items < PQ_LEAST else list(KINDS)
    return [kind for kind in kinds if kind != "hnsw" or items <= HNSW_MOST]


def choose_index(curve: Sequence[dict[str, Any]], target: float, margin: float) -> int:
    """Return the row of the curve to serve.

    The exact scan (flat) stays unless another one reaches the target and takes less than `1 - margin` of
    its time. Of the others, those within the margin of the fastest count as equally fast: times differ from
    one measurement to the next, bytes do not, so that the smallest of them is taken.

    Raises:
        ValueError: nothing reaches the target.
    """
    reached = [row for row, point in enumerate(curve) if point["recall"] >= target]
    if not reached:
        best = max(point["recall"] for point in curve)
        raise ValueError(
            f"the best index finds {best:.4f} of the nearest items, expected {target:g}: measure flat"
        )
    fastest = min(curve[row]["p50_ms"] for row in reached)
    flat = [row for row in reached if curve[row]["kind"] == "flat"]
    if flat and fastest > (1 - margin) * curve[flat[0]]["p50_ms"]:
        return flat[0]
    equal = [row for row in reached if curve[row]["p50_ms"] * (1 - margin) <= fastest]
    return min(equal, key=lambda row: (curve[row]["bytes"], curve[row]["p50_ms"]))


def _points(
    kind: str, vectors: np.ndarray, queries: np.ndarray, exact: np.ndarray, params: IndexParams, scratch: Path
) -> Iterator[dict[str, Any]]:
    """Yield one type of index, searched in several ways, with its recall and cost."""
    began = time.perf_counter()
    file = scratch / f"{kind}.faiss"
    description = _write(kind, vectors, params.seed, file)
    built = round(time.perf_counter() - began, 2)
    item_index, k = read_item_index(file), exact.shape[1]
    before: dict[int, float] = {}  # recall of the point that looks at half as many, by `k_factor`
    full: set[int] = set()
    for search in _searches(kind, len(vectors), k):
        if (factor := search.get("k_factor", 1)) in full:
            continue
        found = item_index.search(queries, k, Search(search))[1]
        recall = float(np.mean([np.isin(right, got).mean() for got, right in zip(found, exact, strict=True)]))
        yield {
            "kind": kind,
            "description": description,
            "search": search,
            "bytes": file.stat().st_size,
            "build_s": built,
            "recall": round(recall, 5),
        }
        if recall >= max(ENOUGH_RECALL, params.target):
            break
        may_reach = recall < params.target < recall + LITTLE_RECALL
        if recall < before.get(factor, 0.0) + LITTLE_RECALL and not may_reach:
            full.add(factor)
        before[factor] = recall


def _write(kind: str, vectors: np.ndarray, seed: int, file: Path) -> str:
    """Write an index of the vectors and return Faiss's word for its type."""
    items, width = vectors.shape
    lists = _lists(items)
    parts = next(parts for parts in range(max(width // 4, 1), 0, -1) if width % parts == 0)
    description = {
        "flat": "Flat",
        "ivf_sq8": f"IVF{lists},SQ8",
        "ivf_pq": f"IVF{lists},PQ{parts}",
        "ivf_pq_refined": f"IVF{lists},PQ{parts},Refine(SQ8)",
        "hnsw": "HNSW32",
    }[kind]
    _faiss.omp_set_num_threads(1)  # so that the same vectors give the same index
    if kind == "ivf_pq_refined":
        base = read_faiss(file.with_name("ivf_pq.faiss"))
        finer = _filled(_faiss.index_factory(width, "SQ8", faiss.METRIC_INNER_PRODUCT), vectors, items, seed)
        _faiss.write_index(_faiss.IndexRefine(base, finer), str(file))
        return description
    index = _faiss.index_factory(width, description, faiss.METRIC_INNER_PRODUCT)
    if kind.startswith("ivf"):
        index.cp.max_points_per_centroid = TRAIN_ROWS
        index.cp.seed = seed
    if kind == "ivf_pq":
        index.do_polysemous_training = False  # 25 s, for a search that is not used
        index.pq.cp.niter = PQ_ITERATIONS
        index.pq.cp.max_points_per_centroid = TRAIN_ROWS
        index.pq.cp.seed = seed
    _faiss.write_index(_filled(index, vectors, lists * TRAIN_ROWS, seed), str(file))
    return description


def _filled(index: Any, vectors: np.ndarray, rows: int, seed: int) -> Any:
    """Return the index, trained on some rows, with all vectors in it."""
    if not index.is_trained:
        some = np.random.default_rng(seed).choice(len(vectors), min(len(vectors), rows), replace=False)
        index.train(np.ascontiguousarray(vectors[np.sort(some)]))
    for first in range(0, len(vectors), CHUNK):
        index.add(np.ascontiguousarray(vectors[first : first + CHUNK], np.float32))
    return index


def _lists(items: int) -> int:
    """Return about four times the root of the number of items, a power of two."""
    return int(2 ** np.floor(np.log2(4 * np.sqrt(items))))


def _searches(kind: str, items: int, k: int) -> list[dict[str, int]]:
    """Return ways to search one type, those that look at least first."""
    lists = _lists(items)
    # Fewer lists than hold twice as many items as are asked for say nothing: the search looks at more anyhow.
    probes = [2**power for power in range(3, 12) if 2 * k * lists <= 2**power * items and 2**power <= lists]
    if kind in ("ivf_sq8", "ivf_pq"):
        return [{"nprobe": probe} for probe in probes]
    if kind == "ivf_pq_refined":
        return [{"nprobe": probe, "k_factor": factor} for factor in (2, 4) for probe in probes]
    if kind == "hnsw":
        return [{"efSearch": factor * k} for factor in (1, 2, 4)]
    return [{}]


def _times(
    files: Sequence[Path],
    searches: Sequence[Search],
    queries: np.ndarray,
    k: int,
    rng: np.random.Generator,
) -> list[np.ndarray]:
    """Return milliseconds of each query, for each index and way to search it."""
    opened = {file: read_item_index(file) for file in files}
    ms = [np.empty(len(queries)) for _ in files]
    for first in range(0, len(queries), BLOCK):
        for turn in rng.permutation(len(files)).tolist():
            index, search = opened[files[turn]], searches[turn]
            index.search(queries[first : first + 1], k, search)  # not counted: it finds cold caches
            for row in range(first, min(first + BLOCK, len(queries))):
                began = time.perf_counter()
                index.search(queries[row : row + 1], k, search)
                ms[turn][row] = (time.perf_counter() - began) * 1e3
    return ms
