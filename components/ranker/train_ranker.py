"""Ranker examples -> a trained, calibrated ranker: its ONNX graph, and the weights to go on from."""

from __future__ import annotations

import argparse
import json
import logging
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import distributed

from components.data.examples import (
    RankerExamples,
    read_graph,
    read_manifest,
    read_ranker_examples,
    read_training_lists,
)
from components.hyper_parameters import RANKERS, ranker_class, read_ranker_params, reads
from components.measurement import cores
from components.models.gradient_boosting import GradientBoosting
from components.models.graph import GraphRanker
from components.models.ranker import Ranker, Shape
from components.ranker.export_ranker import export_ranker, said_of_rows
from components.ranker.fitting import fit, sample_rows
from components.ranker.ranker_artefact import Cost, RankerArtefact, begin_ranker, finish_ranker
from feature_repo.schema import LEVELS
from feature_repo.statistics import read_statistics, read_vocabulary

log = logging.getLogger(__name__)

MIN_SLOPE = 1e-3


def train_ranker(
    examples: Path, statistics: Path, checkpoint: Path, model: str, params: dict[str, Any]
) -> dict[str, Any]:
    """Train a ranker on lists, then calibrate it on whole lists of users whose last weeks it has not seen.

    The torch rankers' loss is a softmax over each list plus a little binary cross-entropy, which keeps
    scores of different lists comparable. Training sees a sample of the negatives; Platt scaling on
    complete lists turns the logits into purchase probabilities (Platt 1999).

    Under `torchrun` each process takes its share of every batch (DistributedDataParallel) and the first
    one writes. Trees use all cores of one machine instead.

    Examples and statistics are of the same cut; `model` is a key of `RANKERS`. `params` has fields of
    `RankerParams` for each model, by its name; others' are passed over.

    Returns:
        Calibration slope and intercept, NDCG@10 on the calibration lists, the seconds used, and the loss of
        each epoch; trees have none.

    Raises:
        ContractViolation: the examples are missing or of another schema.
        ValueError: no list holds a purchase or none is held out, or there is no ranker of that name.
    """
    settings = read_ranker_params(params).get(model)
    leads = join_workers()
    if settings is None:
        raise ValueError(f"no ranker {model!r}: choose one of {', '.join(RANKERS)}")
    kind = ranker_class(model)
    if kind is GradientBoosting and not leads:  # trees take all cores of one process
        return {"model": model}
    data, held_out = read_training_lists(examples)
    shape = read_shape(examples, statistics)
    cost = Cost()
    torch.manual_seed(settings.seed)
    ranker = kind(shape, **settings.size)
    curve: list[dict[str, float]] = []
    if isinstance(ranker, GradientBoosting):
        ranker.fit(data, settings.seed, min(torch.get_num_threads(), cores()))
    else:
        if isinstance(ranker, GraphRanker):
            ranker.set_graph(*read_graph(examples))
        ranker.fit_scale(sample_rows(data))
        curve = fit(ranker, data, settings)
        ranker.eval()
    if not leads:  # all processes hold the same weights: one writes them
        return {"model": model}
    scores = calibrate(ranker, held_out)
    spent = cost.spent()
    begin_ranker(checkpoint)
    certificate = {**export_ranker(ranker, checkpoint, held_out), "step": "train_ranker", "model": model}
    finish_ranker(
        checkpoint,
        [certificate],
        step="train_ranker",
        parents=[],
        model=model,
        shape=asdict(shape),
        size=settings.size,
        params={
            "ranker": {"model": model, **{name: getattr(settings, name) for name in reads(model)}},
            "examples": read_manifest(examples)["params"],
        },
        cost=spent,
    )
    report = {"model": model, **scores, **spent, "ndcg_at_10": certificate["ndcg_at_10"]["child"]}
    return report | {"curve": curve} if curve else report


def join_workers() -> bool:
    """Join the other processes when `torchrun` started this one; return whether this one leads."""
    if distributed.is_torchelastic_launched() and not distributed.is_initialized():
        distributed.init_process_group("gloo")
    return not distributed.is_initialized() or distributed.get_rank() == 0


def read_shape(examples: Path, statistics: Path) -> Shape:
    """Return the sizes of a ranker that follow from the data."""
    vocabulary = read_vocabulary(statistics)
    levels = (len(vocabulary[level]) for level in LEVELS)
    dense = read_ranker_examples(examples, "train").dense.shape[1]
    return Shape(dense, (len(read_statistics(statistics).item_ids) + 1, *levels))


def calibrate(model: Ranker | GradientBoosting, data: RankerExamples) -> dict[str, float]:
    """Fit slope and intercept by Newton's method on whole lists, and set them in the model."""
    logits = said_of_rows(model.logits, data) if isinstance(model, Ranker) else model.logits_of(data)
    slope, intercept = platt(logits, data.label)
    model.calibrate(slope, intercept)
    return {"calibration_slope": slope, "calibration_intercept": intercept}


def platt(logits: np.ndarray, label: np.ndarray) -> tuple[float, float]:
    """Return the slope and intercept that turn logits, (rows,), into purchase probabilities (Platt 1999).

    His targets lie a little inside 0 and 1: without it the slope has no end where logits separate the labels.
    """
    z, bought = logits.astype(np.float64), int(label.sum())
    y = np.where(label > 0, (bought + 1) / (bought + 2), 1 / (len(label) - bought + 2))
    mean, spread = z.mean(), max(z.std(), 1e-6)
    x = np.stack([(z - mean) / spread, np.ones(len(z))], axis=1)
    rate = np.log(y.mean() / (1 - y.mean()))
    weights = np.array([0.0, rate])

    def loss(weights: np.ndarray) -> float:
        found = x @ weights
        return float((np.logaddexp(0, found) - y * found).sum())

    for _ in range(200):
        p = 1 / (1 + np.exp(-x @ weights))
        hessian = (x * (p * (1 - p))[:, None]).T @ x + 1e-6 * np.eye(2)
        step = np.linalg.solve(hessian, x.T @ (p - y))
        while np.abs(step).max() > 1e-8 and loss(weights - step) > loss(weights):
            step /= 2  # a whole step may go past the end, to and fro
        weights = weights - step
        if np.abs(step).max() < 1e-8:
            break
    slope, at_mean = weights[0] / spread, weights[1]
    if slope < MIN_SLOPE:  # a falling slope would turn the ranking round: all that is known is the rate
        slope, at_mean = MIN_SLOPE, rate
    return float(slope), float(at_mean - slope * mean)


def shape_of(artefact: RankerArtefact) -> Shape:
    """Return the shape a ranker was made for."""
    shape = artefact.manifest["shape"]
    return Shape(shape["dense"], tuple(shape["cardinality"]))


def load_ranker(artefact: RankerArtefact) -> Ranker:
    """Return a torch ranker with its weights, ready for inference.

    Raises:
        ContractViolation: it is no torch model.
    """
    weights, manifest = artefact.weights(), artefact.manifest
    model = ranker_class(manifest["model"])(shape_of(artefact), **manifest["size"])
    assert isinstance(model, Ranker)  # GradientBoosting writes no weights
    model.load_state_dict(weights)
    return model.eval()


def main() -> None:
    """Train one ranker from the command line: what `torchrun` starts, once for each process."""
    parser = argparse.ArgumentParser(description="Train one ranker; under torchrun, in several processes.")
    parser.add_argument("--model", choices=list(RANKERS), required=True)
    parser.add_argument("--params", type=json.loads, default={}, help="JSON, as in ranker_params")
    for name, what in (
        ("examples", "what build_examples wrote"),
        ("statistics", "what fit_statistics wrote"),
        ("ranker", "the directory to write"),
    ):
        parser.add_argument(f"--{name}", type=Path, required=True, help=what)
    given = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    result = train_ranker(given.examples, given.statistics, given.ranker, given.model, given.params)
    if join_workers():
        log.info("%s", json.dumps(result))
    if distributed.is_initialized():
        distributed.destroy_process_group()


if __name__ == "__main__":
    main()
