"""Every type of index is measured against the exact scan, and the rule takes the one that is worth it."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from components.hyper_parameters import IndexParams
from components.retriever.choose_index import choose_index, measure_index
from serving.stages.item_index import Search, read_item_index


def point(kind: str, p50_ms: float, recall: float = 0.98, size: int = 100) -> dict[str, Any]:
    return {"kind": kind, "p50_ms": p50_ms, "recall": recall, "bytes": size}


@pytest.mark.parametrize(
    ("curve", "chosen"),
    [
        ([point("flat", 1.0, 1.0)], 0),
        ([point("flat", 1.0, 1.0), point("ivf_sq8", 0.8)], 0),  # saves a fifth, less than the margin
        ([point("flat", 1.0, 1.0), point("ivf_sq8", 0.7)], 1),
        ([point("flat", 1.0, 1.0), point("ivf_sq8", 0.1, 0.96)], 0),  # fast, but misses the target
        ([point("flat", 1.0, 1.0), point("ivf_sq8", 0.40, size=9), point("hnsw", 0.35, size=90)], 1),
        ([point("flat", 1.0, 1.0), point("ivf_sq8", 0.60, size=9), point("hnsw", 0.35, size=90)], 2),
        ([point("flat", 9.0, 1.0), point("ivf_sq8", 0.4, 0.971), point("ivf_sq8", 0.5, 0.99)], 1),
    ],
)
def test_the_simpler_one_stays_unless_another_wins_by_the_margin(
    curve: list[dict[str, Any]], chosen: int
) -> None:
    assert choose_index(curve, target=0.97, margin=0.25) == chosen


def test_times_that_shake_within_the_margin_do_not_change_the_choice() -> None:
    rng = np.random.default_rng(0)
    sizes = {"ivf_sq8": 70, "ivf_pq_refined": 90, "hnsw": 500}
    for _ in range(200):
        shaken = [point(kind, 0.4 * rng.uniform(0.9, 1.1), size=size) for kind, size in sizes.items()]
        assert choose_index([point("flat", rng.uniform(0.9, 1.1), 1.0), *shaken], 0.97, 0.25) == 1


def test_nothing_good_enough_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"the best index finds 0\.9000"):
        choose_index([point("ivf_pq", 0.1, 0.9)], 0.97, 0.25)


@pytest.mark.slow
def test_parts_are_not_quantised_in_a_catalogue_of_thousands(tmp_path: Path) -> None:
    vectors = np.random.default_rng(1).normal(size=(5_000, 8)).astype(np.float32)
    curve, _ = measure_index(vectors, vectors[:4], IndexParams(k=5), tmp_path)
    assert {row["kind"] for row in curve} == {"flat", "ivf_sq8", "hnsw"}


@pytest.mark.slow
def test_points_that_find_no_more_than_others_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Numbers of eight bits miss a few of the nearest in each list, and parts miss many."""
    monkeypatch.setattr("components.retriever.choose_index.PQ_LEAST", 20_000)
    rng = np.random.default_rng(1)
    centres = rng.normal(size=(100, 16))
    vectors = (centres[rng.integers(100, size=20_000)] + 0.2 * rng.normal(size=(20_000, 16))).astype(
        np.float32
    )
    curve, _ = measure_index(vectors, vectors[:30], IndexParams(k=20), tmp_path)
    for kind, factor in (("ivf_pq", None), ("ivf_pq_refined", 2), ("ivf_pq_refined", 4)):
        rows = [row for row in curve if row["kind"] == kind and row["search"].get("k_factor") == factor]
        recalls = [row["recall"] for row in rows]
        gains = np.diff(recalls[:-1])
        assert (gains >= 0.001 - 1e-5).all(), (kind, factor, recalls)
        assert rows[-1]["search"]["nprobe"] < 512, (kind, factor, recalls)


@pytest.mark.slow
def test_every_type_is_measured_with_growing_effort_and_growing_recall(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("components.retriever.choose_index.PQ_LEAST", 6_000)
    monkeypatch.setattr("serving.stages.item_index.FAISS_LEAST", 1)  # as if the catalogue were large
    rng = np.random.default_rng(1)
    centres = rng.normal(size=(100, 16))
    vectors = (centres[rng.integers(100, size=6_000)] + 0.5 * rng.normal(size=(6_000, 16))).astype(np.float32)
    params = IndexParams(k=50, queries=40)
    curve, files = measure_index(vectors, vectors[:40] + 0.1, params, tmp_path)
    kinds = list(dict.fromkeys(row["kind"] for row in curve))
    assert kinds == ["flat", "ivf_sq8", "ivf_pq", "ivf_pq_refined", "hnsw"]
    for row, file in zip(curve, files, strict=True):
        assert row["bytes"] == file.stat().st_size
        assert 0 < row["p50_ms"] <= row["p99_ms"]
        exact = np.argsort(-((vectors[:40] + 0.1) @ vectors.T), axis=1)[:, :50]
        found = read_item_index(file).search(vectors[:40] + 0.1, 50, Search(row["search"]))[1]
        shared = np.mean([np.isin(a, b).mean() for a, b in zip(exact, found, strict=True)])
        assert row["recall"] == pytest.approx(shared, abs=2e-3)
    lists = [row["recall"] for row in curve if row["kind"] == "ivf_sq8"]
    assert lists == sorted(lists)
    size = {row["kind"]: row["bytes"] for row in curve}
    assert size["ivf_pq"] < size["ivf_sq8"] < size["flat"] < size["hnsw"]
