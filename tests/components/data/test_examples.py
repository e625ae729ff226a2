"""Examples on disk come back as they were written, and foreign ones do not come back at all."""

from pathlib import Path

import numpy as np
import pytest

from components.data.examples import (
    ContractViolation,
    RankerExamples,
    RetrieverExamples,
    pad,
    read_graph,
    read_manifest,
    read_ranker_examples,
    read_retriever_examples,
    write_arrays,
    write_manifest,
)

RANKER = RankerExamples(
    dense=np.arange(6, dtype=np.float32).reshape(3, 2),
    categorical=np.array([[7, 1, 2, 3]] * 3, np.int32),
    label=np.array([1, 0, 0], np.int8),
    start=np.array([0, 2, 3]),
    history=np.array([[4, 0], [0, 0]], np.int32),
    history_weight=np.array([[0.5, 0.0], [0.0, 0.0]], np.float16),
    basket=np.array([[7, 8, 0], [0, 0, 0]], np.int32),
)
RETRIEVER = RetrieverExamples(
    history=np.array([[4, 0]], np.int32),
    history_weight=np.array([[0.5, 0.0]], np.float16),
    basket=np.array([[7, 8, 0]], np.int32),
)


def test_examples_come_back_with_their_types(tmp_path: Path) -> None:
    write_arrays(tmp_path / "ranker_train", RANKER)
    write_arrays(tmp_path / "retriever", RETRIEVER)
    write_manifest(tmp_path, cut="2024-06-01", lists=2)
    for written, found in (
        (RANKER, read_ranker_examples(tmp_path, "train")),
        (RETRIEVER, read_retriever_examples(tmp_path)),
    ):
        for name, array in vars(written).items():
            assert getattr(found, name).dtype == array.dtype
            np.testing.assert_array_equal(getattr(found, name), array)
            assert isinstance(getattr(found, name), np.memmap), "a step reads only the rows that it needs"
    assert read_manifest(tmp_path)["cut"] == "2024-06-01"


def test_half_written_examples_are_refused(tmp_path: Path) -> None:
    write_arrays(tmp_path / "ranker_train", RANKER)
    with pytest.raises(ContractViolation, match=r"no finished examples \(no manifest.json\)"):
        read_ranker_examples(tmp_path, "train")


def test_examples_of_other_features_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_arrays(tmp_path / "retriever", RETRIEVER)
    write_manifest(tmp_path)
    monkeypatch.setattr("components.data.examples.schema_hash", lambda: "other")
    with pytest.raises(ContractViolation, match="this code has other: run build_examples again"):
        read_retriever_examples(tmp_path)


def test_the_graph_comes_back_and_not_from_half_written_examples(tmp_path: Path) -> None:
    neighbours, weights = np.array([[0, 0], [2, 1]], np.int32), np.array([[0, 0], [0.75, 0.25]], np.float32)
    np.save(tmp_path / "graph_neighbours.npy", neighbours)
    np.save(tmp_path / "graph_weights.npy", weights)
    with pytest.raises(ContractViolation, match="no finished examples"):
        read_graph(tmp_path)
    write_manifest(tmp_path)
    for written, found in zip((neighbours, weights), read_graph(tmp_path), strict=True):
        np.testing.assert_array_equal(found, written)


def test_lists_of_different_length_are_padded() -> None:
    rows, there = pad(np.array([0, 2, 5]), np.array([0, 1]))
    assert rows.tolist() == [[0, 1, 0], [2, 3, 4]]
    assert there.tolist() == [[True, True, False], [True, True, True]]
