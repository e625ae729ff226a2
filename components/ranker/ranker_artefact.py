"""CONTRACT a ranker on disk: its ONNX graph, its origin, and a certificate for every step so far.

ranker.onnx         the scorer, everywhere: leaderboard, distillation, certificates, endpoint
weights.npz         torch weights, if any: pruning and tuning start from them
certificates.json   one per step, from the teachers to this file
manifest.json       written last: id (hash of the graph), step, parents, model, size, parameters, cost
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from components.data.examples import ContractViolation
from components.home import write_json
from feature_repo.atomic_files import sha256_of

if TYPE_CHECKING:  # a release reads hashes and certificates, and PyTorch takes seconds to import
    import torch
    from torch import nn

GRAPH = "ranker.onnx"
CERTIFICATES = "certificates.json"
MANIFEST = "manifest.json"
WEIGHTS = "weights.npz"
ENGINES = "engines.json"  # beside a compiled one: how fast every variant is on every engine


@dataclass(frozen=True)
class RankerArtefact:
    """A finished ranker on disk."""

    path: Path
    manifest: dict[str, Any]
    certificates: list[dict[str, Any]]

    @property
    def id(self) -> str:
        """The hash of its graph."""
        return str(self.manifest["id"])

    @property
    def graph(self) -> Path:
        """The ONNX file."""
        return self.path / GRAPH

    def weights(self) -> dict[str, torch.Tensor]:
        """Return the torch weights.

        Raises:
            ContractViolation: this ranker has none, because it is no torch model.
        """
        if not (self.path / WEIGHTS).is_file():
            raise ContractViolation(
                f"{self.path} holds a {self.manifest['model']} without torch weights: "
                "only a torch ranker can be tuned further"
            )
        return read_weights(self.path)


def graph_id(file: Path) -> str:
    """Return the id of an ONNX file: the first 16 digits of its SHA-256."""
    return sha256_of(file)[:16]


class Cost:
    """Measures what making a ranker takes, from its construction on, in this process."""

    def __init__(self, parents: Iterable[RankerArtefact] = ()) -> None:
        """Start the clock; the cost of the parents is part of the total."""
        self._before = sum(float(parent.manifest["cost"]["total_cpu_seconds"]) for parent in parents)
        self._began, self._cpu = time.perf_counter(), time.process_time()

    def spent(self) -> dict[str, float]:
        """Return wall-clock and CPU seconds of this step, and CPU seconds with all steps before it."""
        cpu = time.process_time() - self._cpu
        return {
            "seconds": time.perf_counter() - self._began,
            "cpu_seconds": cpu,
            "total_cpu_seconds": self._before + cpu,
        }


def begin_ranker(path: Path) -> None:
    """Make an empty directory for a ranker; what lay there before is gone."""
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)


def write_weights(path: Path, model: nn.Module) -> None:
    """Write a torch model's weights without pickle."""
    np.savez(path / WEIGHTS, **{name: tensor.numpy() for name, tensor in model.state_dict().items()})


def read_weights(path: Path) -> dict[str, torch.Tensor]:
    """Return what `write_weights` wrote."""
    import torch

    with np.load(path / WEIGHTS, allow_pickle=False) as stored:
        return {name: torch.from_numpy(stored[name]) for name in stored.files}


def finish_ranker(path: Path, certificates: list[dict[str, Any]], **fields: Any) -> None:
    """Write certificates, of this step the last, and the manifest beside a graph.

    The fields are step, parents (ids), model, shape, size, params and cost.
    """
    write_json(path / CERTIFICATES, certificates)
    write_json(path / MANIFEST, {"kind": "ranker", "id": graph_id(path / GRAPH), **fields})


def read_ranker(path: Path) -> RankerArtefact:
    """Return a ranker.

    Raises:
        ContractViolation: there is no finished one, or its graph is not the one that was certified.
    """
    if not (path / MANIFEST).is_file():
        raise ContractViolation(f"{path} holds no finished ranker (no {MANIFEST}): run its step again")
    manifest = json.loads((path / MANIFEST).read_bytes())
    if (found := graph_id(path / GRAPH)) != manifest["id"]:
        raise ContractViolation(
            f"{path / GRAPH} is {found}, its manifest says {manifest['id']}: run its step again"
        )
    return RankerArtefact(path, manifest, json.loads((path / CERTIFICATES).read_bytes()))
