"""A trained ranker -> its ONNX graph, and the certificate that the graph says the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from components.data.examples import RankerExamples
from components.models.gradient_boosting import GradientBoosting
from components.models.ranker import CANDIDATE, QUERY, Inputs, Ranker
from components.ranker.certificate import certify, enforce
from components.ranker.fitting import inputs_of
from components.ranker.onnx_export import export_torch
from components.ranker.ranker_artefact import GRAPH, graph_id, write_weights
from components.ranker.scoring import OnnxRanker, batches, measure

SAMPLE_LISTS = 4  # real lists that the exporter traces the graph with


def export_ranker(ranker: Ranker | GradientBoosting, path: Path, held_out: RankerExamples) -> dict[str, Any]:
    """Write `ranker.onnx` and the weights into `path` and return the certificate of the graph.

    Its parent is the trained model in its own framework, which has no id. The certificate says that the
    graph computes the same as the weights, and nothing about their origin.

    Raises:
        ParityFailed: the graph answers differently.
        BundleInvalid: the runtime cannot run the graph.
    """
    file = path / GRAPH
    if isinstance(ranker, GradientBoosting):
        ranker.save(path)
        ranker.export(file)
        expected = ranker.probabilities(held_out)
    else:
        write_weights(path, ranker)
        export_torch(ranker, *sample_inputs(ranker, held_out), output="score", file=file)
        expected = said_of_rows(lambda inputs: ranker(*inputs), held_out)
    graph = OnnxRanker(file)
    certificate = certify(
        "export_ranker",
        "train",
        (graph_id(file), graph.scores(held_out)),
        [],
        expected,
        held_out,
        bytes=file.stat().st_size,
        latency_ms=measure([graph], held_out)[0],
    )
    enforce(certificate)
    return certificate


def sample_inputs(
    ranker: Ranker, data: RankerExamples
) -> tuple[dict[str, torch.Tensor], dict[str, dict[int, Any]]]:
    """Return a few real lists as the graph's inputs by name, and which of their dimensions may change."""
    lists = np.flatnonzero(np.diff(data.start))[:SAMPLE_LISTS]
    lists = np.resize(lists, max(len(lists), 2))  # PyTorch takes a dimension of 1 for a constant
    found = inputs_of(data, lists)[0]._asdict()
    if ranker.uses == CANDIDATE:
        rows = torch.export.Dim("rows", min=1, max=1 << 20)
        return {name: found[name].flatten(0, 1) for name in CANDIDATE}, {
            name: {0: rows} for name in CANDIDATE
        }
    requests = torch.export.Dim("requests", min=1, max=1 << 12)
    candidates = torch.export.Dim("candidates", min=1, max=1 << 14)
    shapes = {name: {0: requests, 1: candidates} for name in CANDIDATE} | {
        name: {0: requests} for name in QUERY
    }
    return {name: found[name] for name in ranker.uses}, {name: shapes[name] for name in ranker.uses}


def said_of_rows(ask: Callable[[Inputs], Tensor], data: RankerExamples) -> np.ndarray:
    """Return the answer of a torch ranker for each row, (rows,) float32, asking for some lists at a time."""
    found = np.empty(len(data.label), np.float32)
    with torch.no_grad():
        for lists in batches(data.start):
            inputs, rows, there = inputs_of(data, lists)
            found[rows[there.numpy()]] = ask(inputs)[there].numpy()
    return found
