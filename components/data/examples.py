"""CONTRACT training examples on disk: arrays for the retriever and for the ranker, and their manifest."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from components.home import write_json
from feature_repo.errors import RecoError
from feature_repo.schema import schema_hash

GRAPH_DEGREE = 20  # neighbours of an item in the graph that a graph ranker smooths over


class ContractViolation(RecoError):
    """An artefact on disk differs from the form that its reader expects."""


@dataclass(frozen=True)
class RetrieverExamples:
    """One row per basket; item codes are shifted by one, 0 is padding."""

    history: np.ndarray  # (b, HISTORY_LENGTH) int32
    history_weight: np.ndarray  # (b, HISTORY_LENGTH) float16
    basket: np.ndarray  # (b, width) int32, the whole basket; hidden items are drawn while training


@dataclass(frozen=True)
class RankerExamples:
    """Lists of candidates, one list per basket; list i is rows `start[i]:start[i + 1]`."""

    dense: np.ndarray  # (rows, features) float32
    categorical: np.ndarray  # (rows, 4) int32
    label: np.ndarray  # (rows,) int8, 1 where the shopper bought the item
    start: np.ndarray  # (lists + 1,) int64
    history: np.ndarray  # (lists, HISTORY_LENGTH) int32, as the query tower sees it
    history_weight: np.ndarray  # (lists, HISTORY_LENGTH) float16
    basket: np.ndarray  # (lists, BASKET_LENGTH) int32


Examples = TypeVar("Examples", RetrieverExamples, RankerExamples)


def write_arrays(path: Path, examples: RetrieverExamples | RankerExamples) -> None:
    """Write each array of the examples as `<name>.npy`."""
    path.mkdir(parents=True, exist_ok=True)
    for name, array in vars(examples).items():
        np.save(path / f"{name}.npy", array, allow_pickle=False)


def write_manifest(path: Path, **fields: Any) -> None:
    """Write the manifest last: a directory without one is half written."""
    write_json(path / "manifest.json", {"kind": "examples", "schema_hash": schema_hash(), **fields})


def read_manifest(path: Path) -> dict[str, Any]:
    """Return the manifest of an examples directory.

    Raises:
        ContractViolation: the manifest is missing, or was written for other features.
    """
    file = path / "manifest.json"
    if not file.is_file():
        raise ContractViolation(
            f"{path} holds no finished examples (no manifest.json): run build_examples again"
        )
    manifest: dict[str, Any] = json.loads(file.read_text())
    if manifest["schema_hash"] != schema_hash():
        raise ContractViolation(
            f"examples in {path} were built for feature schema {manifest['schema_hash']}, "
            f"this code has {schema_hash()}: run build_examples again"
        )
    return manifest


def read_retriever_examples(path: Path) -> RetrieverExamples:
    """Return the retriever's examples, memory-mapped."""
    return _read(path, "retriever", RetrieverExamples)


def read_ranker_examples(path: Path, part: str) -> RankerExamples:
    """Return the ranker's examples, memory-mapped; `part` is "train" or "calibration"."""
    return _read(path, f"ranker_{part}", RankerExamples)


def read_training_lists(path: Path) -> tuple[RankerExamples, RankerExamples]:
    """Return the lists that train a ranker, and those held out to calibrate it.

    Raises:
        ContractViolation: the examples are missing or of another schema.
        ValueError: no list holds a purchase, or none is held out.
    """
    train, held_out = (read_ranker_examples(path, part) for part in ("train", "calibration"))
    if len(train.start) < 2:
        raise ValueError("no training list holds a purchase: bring more baskets of four items or more")
    if len(held_out.label) == 0:
        raise ValueError("no list is held out to calibrate on: raise calibration_ratio or bring more users")
    return train, held_out


def read_graph(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Return each item's neighbours in the bought-together graph and their weights, (items + 1, degree)."""
    read_manifest(path)
    neighbours, weights = (np.load(path / f"graph_{name}.npy") for name in ("neighbours", "weights"))
    return neighbours, weights


def pad(start: np.ndarray, lists: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the rows of some lists, (lists, longest), and which are real; short ones repeat their first."""
    begin, end = np.asarray(start[lists]), np.asarray(start[lists + 1])
    rows = begin[:, None] + np.arange((end - begin).max())[None, :]
    there = rows < end[:, None]
    return np.where(there, rows, begin[:, None]), there


def _read(path: Path, part: str, kind: type[Examples]) -> Examples:
    read_manifest(path)
    names = kind.__annotations__
    return kind(**{name: np.load(path / part / f"{name}.npy", mmap_mode="r") for name in names})
