"""The retrieval bench measures a catalogue of known structure."""

import json
from pathlib import Path

import numpy as np
import pytest

from pipelines.bench.retrieval import bench_retrieval, clustered
from pipelines.bench.synthetic_shop import TYPES


def test_vectors_of_a_type_form_a_cluster_with_their_queries() -> None:
    vectors, queries = clustered(8_000, 32, 50)
    assert vectors.shape == (8_000, 32)
    assert (queries[:, -1] == 1).all()
    kind = np.arange(8_000) // 4 % TYPES
    alike = vectors[:40, :-1] @ vectors[:, :-1].T
    distance = (vectors[:, :-1] ** 2).sum(1) - 2 * alike
    distance[np.arange(40), np.arange(40)] = np.inf
    assert (kind[distance.argmin(1)] == kind[:40]).mean() > 0.9
    assert np.array_equal(vectors, clustered(8_000, 32, 50)[0])


@pytest.mark.slow
def test_every_part_is_measured_and_written(toy_line: Path, tmp_path: Path) -> None:
    results = bench_retrieval(toy_line / "evaluated", tmp_path, items=1_200)
    assert results["champion"]["kind"] == "flat"
    assert [c["dimension"] for c in results["catalogues"]] == [64, 128, 128]
    for catalogue in results["catalogues"]:
        assert [(row["kind"], row["recall"]) for row in catalogue["curve"]] == [("flat", 1.0)]
        assert set(catalogue["left_out"]) == {"ivf_sq8", "ivf_pq", "ivf_pq_refined", "hnsw"}
    assert json.loads((tmp_path / "retrieval.json").read_text())["bundle_id"] == results["bundle_id"]
    report = (tmp_path / "retrieval.md").read_text()
    assert "A synthetic catalogue of 1,200 items" in report
    assert "Left out, too slow to build or without a saving for so few items: ivf_sq8, ivf_pq" in report
