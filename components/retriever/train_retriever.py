"""Retriever examples -> a trained two-tower checkpoint."""

from __future__ import annotations

import json
import math
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from components.data.examples import RetrieverExamples, read_manifest, read_retriever_examples
from components.home import write_json
from components.hyper_parameters import RetrieverParams
from components.models.two_tower import TwoTower
from components.parameters import read_params
from components.ranker.fitting import descend
from components.ranker.ranker_artefact import MANIFEST, read_weights, write_weights
from feature_repo.schema import BASKET_LENGTH, LEVELS
from feature_repo.statistics import read_statistics, read_vocabulary

LEAST_STEPS = 100  # a small shop's few baskets are passed more often than asked, until so many steps are done


def train_retriever(
    examples: Path, statistics: Path, checkpoint: Path, params: dict[str, Any]
) -> dict[str, Any]:
    """Train by sampled softmax: each epoch hides other items of each basket and asks for them.

    With m negatives drawn uniformly from n items, each one's term counts n/m times, which makes the
    sampled softmax an unbiased estimate of the full one (Jean et al., arXiv 1412.2007).

    Returns:
        The loss of the last epoch, the seconds it took, and the loss of each epoch.

    Raises:
        ContractViolation: the examples are missing or of another schema.
    """
    settings = read_params(RetrieverParams, params)
    torch.manual_seed(settings.seed)
    data = read_retriever_examples(examples)
    table = torch.from_numpy(np.array(read_statistics(statistics).categorical, np.int64))
    vocabulary = read_vocabulary(statistics)
    cardinality = [len(vocabulary[level]) for level in LEVELS]
    model = TwoTower(table, cardinality, settings.dim, settings.hidden)
    optimizer = torch.optim.Adam(model.parameters(), lr=settings.learning_rate, fused=True)
    baskets, began = len(data.basket), time.perf_counter()

    def loss_of(rows: np.ndarray, rng: np.random.Generator) -> torch.Tensor:
        return _loss(model, data, np.sort(rows), len(table), settings, rng)

    curve = descend(optimizer, settings, baskets, loss_of, LEAST_STEPS, 0.1)
    write_retriever(
        checkpoint, model, {"retriever": asdict(settings), "examples": read_manifest(examples)["params"]}
    )
    return {
        "loss": curve[-1]["loss"],
        "seconds": time.perf_counter() - began,
        "baskets": float(baskets),
        "curve": curve,
    }


def _loss(
    model: TwoTower,
    data: RetrieverExamples,
    rows: np.ndarray,
    items: int,
    settings: RetrieverParams,
    rng: np.random.Generator,
) -> torch.Tensor:
    basket, targets = _hide(np.asarray(data.basket[rows]), settings.targets, rng)
    negatives = rng.choice(items, min(settings.negatives, items), replace=False) + 1
    history = data.history[rows].astype(np.int64)
    # Only the items that this batch names go through the towers; the optimiser still visits every row.
    every = np.concatenate([[0], *(part.ravel() for part in (history, basket, targets, negatives))])
    is_named = np.zeros(items + 1, bool)
    is_named[every] = True
    named, places = np.flatnonzero(is_named), (np.cumsum(is_named) - 1)[every]
    sizes = np.cumsum([1, history.size, basket.size, targets.size])
    _, past, now, target, other = (torch.from_numpy(part) for part in np.split(places, sizes))
    codes = torch.from_numpy(named)
    content = model.content(codes)
    weight = torch.from_numpy(data.history_weight[rows].astype(np.float32))
    query = model.query_vectors(content, past.view(history.shape), weight, now.view(basket.shape))
    vectors = model.item_vectors(content, codes)
    target = target.view(targets.shape)  # (b, t), 0 where a target is missing
    positive = (query[:, None, :] * vectors[target]).sum(2)  # (b, t)
    negative = query @ vectors[other].T + math.log(items / len(negatives))  # (b, m)
    rest = torch.logsumexp(negative, dim=1, keepdim=True)
    # The positive itself may be among the negatives; with thousands of them that changes little.
    each = functional.softplus(rest - positive)
    there = (target > 0).to(each.dtype)
    return (each * there).sum() / there.sum().clamp(min=1)


def _hide(basket: np.ndarray, targets: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Split baskets, (b, w) with 0 behind the last item, into visible items and targets.

    A random share of each basket is hidden, at least one item; up to `targets` of the hidden are asked.
    """
    b, width = basket.shape
    filled = basket > 0
    order = np.argsort(np.where(filled, rng.random((b, width)), 2.0), axis=1)
    shuffled = np.take_along_axis(basket, order, axis=1)
    count = filled.sum(1)
    hidden = np.clip((count * rng.uniform(0.1, 1.0, b)).astype(int), 1, np.maximum(count, 1))
    place = np.arange(width)[None, :]
    asked = np.where(place < np.minimum(hidden, targets)[:, None], shuffled, 0)[:, :targets]
    seen = np.where(place >= hidden[:, None], shuffled, 0)
    first = np.argsort(seen == 0, axis=1, kind="stable")
    return np.take_along_axis(seen, first, axis=1)[:, :BASKET_LENGTH].astype(np.int64), asked.astype(np.int64)


def query_inputs(examples: RetrieverExamples, rows: np.ndarray) -> dict[str, torch.Tensor]:
    """Return some baskets, whole, with their shoppers' histories: the inputs of the query tower by name."""
    return {
        "history": torch.from_numpy(examples.history[rows].astype(np.int64)),
        "history_weight": torch.from_numpy(examples.history_weight[rows].astype(np.float32)),
        "basket": torch.from_numpy(examples.basket[rows, :BASKET_LENGTH].astype(np.int64)),
    }


def write_retriever(checkpoint: Path, model: TwoTower, params: dict[str, Any]) -> None:
    """Write a model's weights and the sizes to build it again."""
    checkpoint.mkdir(parents=True, exist_ok=True)
    write_weights(checkpoint, model)
    sizes = {
        "cardinality": [table.num_embeddings for table in model.levels],
        "dim": model.item.embedding_dim,
        "hidden": model.item_mlp[0].out_features,
    }
    write_json(checkpoint / MANIFEST, {"kind": "two_tower", **sizes, "params": params})


def load_retriever(checkpoint: Path) -> TwoTower:
    """Return the trained model of a checkpoint, ready for inference."""
    weights, config = read_weights(checkpoint), json.loads((checkpoint / MANIFEST).read_bytes())
    model = TwoTower(weights["categorical"][1:], config["cardinality"], config["dim"], config["hidden"])
    model.load_state_dict(weights)
    return model.eval()
