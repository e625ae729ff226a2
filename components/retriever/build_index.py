"""Retriever checkpoint and examples -> a Faiss index over the item tower's vectors, chosen by measurement."""

from __future__ import annotations

import json
import logging
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from components.data.examples import read_retriever_examples
from components.hyper_parameters import IndexParams
from components.measurement import measured_on
from components.models.two_tower import TwoTower
from components.parameters import read_params
from components.retriever.choose_index import choose_index, measure_index
from components.retriever.train_retriever import load_retriever, query_inputs

log = logging.getLogger(__name__)


def build_index(retriever: Path, examples: Path, index: Path, params: dict[str, Any]) -> dict[str, Any]:
    """Write `index.faiss` (inner product, row number = item code) and `index.json`: the curve it comes from.

    The queries of the measurement are the query tower's vectors of training baskets, whole, each with its
    shopper's history.

    Returns:
        Items, dimension, the choice (kind, recall, bytes, milliseconds), and the curve that it comes from.
    """
    settings = read_params(IndexParams, params)
    model = load_retriever(retriever)
    vectors, queries = item_vectors(model), query_vectors(model, examples, settings)
    index.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=index) as scratch:
        curve, files = measure_index(vectors, queries, settings, Path(scratch))
        row = choose_index(curve, settings.target, settings.margin)
        shutil.move(files[row], index / "index.faiss")
    chosen = curve[row]
    report = {
        **chosen,
        "k": min(settings.k, len(vectors)),
        "target": settings.target,
        "margin": settings.margin,
        "items": vectors.shape[0],
        "dimension": vectors.shape[1],
        "queries": {"count": len(queries), "of": "the query tower, for baskets of the training window"},
        "curve": curve,
        **measured_on(),
    }
    (index / "index.json").write_text(json.dumps(report, indent=1))
    size = {"items": vectors.shape[0], "dimension": vectors.shape[1]}
    log.info("%s: %s %s", size, chosen["description"], chosen["search"])
    choice = {name: chosen[name] for name in ("kind", "recall", "bytes", "p50_ms", "p99_ms")}
    return {**size, **choice, "curve": curve}


def item_vectors(model: TwoTower) -> np.ndarray:
    """Return the item tower's vectors of the whole catalogue, (n, dim + 1) float32."""
    with torch.no_grad():
        vectors = model.item_vectors(model.content(model.every), model.every)[1:].numpy()
    return np.ascontiguousarray(vectors, np.float32)


def query_vectors(model: TwoTower, examples: Path, params: IndexParams) -> np.ndarray:
    """Return the query tower's vectors of some training baskets, (q, dim + 1) float32."""
    rows = read_retriever_examples(examples)
    baskets = len(rows.basket)
    some = np.random.default_rng(params.seed).choice(baskets, min(params.queries, baskets), replace=False)
    some.sort()
    with torch.no_grad():
        vectors = model.query_vectors(model.content(model.every), **query_inputs(rows, some)).numpy()
    return np.ascontiguousarray(vectors, np.float32)
