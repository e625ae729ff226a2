"""Ranker examples -> a trained, calibrated DLRM checkpoint."""

from __future__ import annotations

import logging
import math
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from components.checkpoint import read_checkpoint, write_checkpoint
from components.examples import RankerExamples, read_manifest, read_ranker_examples
from components.models.dlrm import Dlrm
from components.parameters import read_params
from feature_repo.statistics import read_vocabulary

log = logging.getLogger(__name__)

MIN_SLOPE = 1e-3


@dataclass(frozen=True)
class RankerParams:
    """Hyper-parameters of the ranker."""

    dim: int = 8
    hidden: int = 128
    dropout: float = 0.1
    epochs: int = 2
    batch_size: int = 64  # lists
    learning_rate: float = 2e-3
    pointwise_weight: float = 0.1
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse a training of nothing."""
        for name in ("epochs", "batch_size", "dim", "hidden"):
            if getattr(self, name) < 1:
                raise TypeError(f"RankerParams.{name} is {getattr(self, name)}, expected 1 or more")


def train_ranker(
    examples: Path, statistics: Path, checkpoint: Path, params: dict[str, Any]
) -> dict[str, float]:
    """Train the ranker on lists, then calibrate it on whole lists of users whose last weeks it has not seen.

    The loss is a softmax over each list plus a little binary cross-entropy, which keeps scores of
    different lists comparable. Training sees a sample of the negatives; Platt scaling on complete lists
    turns the logits into purchase probabilities (Platt 1999).

    Returns:
        Last training loss, calibration slope and intercept, and the mean probability against the
        purchase rate on the calibration lists.

    Raises:
        ContractViolation: the examples are missing or of another schema.
        ValueError: no list holds a purchase.
    """
    settings = read_params(RankerParams, params)
    torch.manual_seed(settings.seed)
    data = read_ranker_examples(examples, "train")
    if len(data.start) < 2:
        raise ValueError("no training list holds a purchase: bring more baskets of four items or more")
    vocabulary = read_vocabulary(statistics)
    cardinality = [len(vocabulary[level]) for level in ("type", "category", "department")]
    model = Dlrm(data.dense.shape[1], cardinality, settings.dim, settings.hidden, settings.dropout)
    _fit_normalisation(model, data)
    began = time.perf_counter()
    loss = _fit(model, data, settings)
    model.eval()
    calibration = read_ranker_examples(examples, "calibration")
    scores = _calibrate(model, calibration)
    write_checkpoint(
        checkpoint,
        "dlrm",
        model,
        dense=data.dense.shape[1],
        cardinality=cardinality,
        dim=settings.dim,
        hidden=settings.hidden,
        params={"ranker": asdict(settings), "examples": read_manifest(examples)["params"]},
    )
    return {"loss": loss, "seconds": time.perf_counter() - began, **scores}


def _fit_normalisation(model: Dlrm, data: RankerExamples) -> None:
    rows = np.linspace(0, len(data.label) - 1, min(len(data.label), 200_000)).astype(int)
    sample = data.dense[rows].astype(np.float64)
    scaled = np.sign(sample) * np.log1p(np.abs(sample))
    model.mean.copy_(torch.from_numpy(scaled.mean(0)))
    model.std.copy_(torch.from_numpy(np.maximum(scaled.std(0), 1e-3)))


def _fit(model: Dlrm, data: RankerExamples, settings: RankerParams) -> float:
    rng = np.random.default_rng(settings.seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=settings.learning_rate)
    lists = len(data.start) - 1
    batches = max(1, math.ceil(lists / settings.batch_size))
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, settings.learning_rate, total_steps=batches * settings.epochs, pct_start=0.2
    )
    dense, categorical = np.asarray(data.dense), np.asarray(data.categorical)
    label = np.asarray(data.label)
    began, mean_loss = time.perf_counter(), math.nan
    for epoch in range(settings.epochs):
        losses = []
        for chosen in np.array_split(rng.permutation(lists), batches):
            rows, there = _pad(data.start, chosen)
            logits = model.logits(
                torch.from_numpy(dense[rows.ravel()]),
                torch.from_numpy(categorical[rows.ravel()].astype(np.int64)),
            ).view(rows.shape)
            loss = _loss(logits, torch.from_numpy(label[rows]) * there, there, settings.pointwise_weight)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            losses.append(loss.item())
        mean_loss = float(np.mean(losses))
        took = time.perf_counter() - began
        left = took / (epoch + 1) * (settings.epochs - epoch - 1)
        log.info(
            "epoch %d of %d: loss %.4f, %.0f s so far, %.0f s to go",
            epoch + 1,
            settings.epochs,
            mean_loss,
            took,
            left,
        )
    return mean_loss


def _pad(start: np.ndarray, lists: np.ndarray) -> tuple[np.ndarray, Tensor]:
    """Return row numbers, (lists, longest), and which of them are real, same shape."""
    begin, end = np.asarray(start[lists]), np.asarray(start[lists + 1])
    rows = begin[:, None] + np.arange((end - begin).max())[None, :]
    there = rows < end[:, None]
    return np.where(there, rows, begin[:, None]), torch.from_numpy(there)


def _loss(logits: Tensor, label: Tensor, there: Tensor, pointwise_weight: float) -> Tensor:
    """Return the softmax loss over each list, its purchases sharing the target, plus weighted BCE."""
    log_p = functional.log_softmax(logits.masked_fill(~there, -1e9), dim=1)
    label = label.to(logits.dtype)
    listwise = -(log_p * label).sum(1) / label.sum(1).clamp(min=1)
    pointwise = functional.binary_cross_entropy_with_logits(logits[there], label[there])
    return listwise.mean() + pointwise_weight * pointwise


def _calibrate(model: Dlrm, data: RankerExamples) -> dict[str, float]:
    """Fit slope and intercept by Newton's method on the calibration lists, and set them in the model."""
    if len(data.label) == 0 or not data.label.any():
        log.warning("no purchases to calibrate on: probabilities stay as trained")
        return {"calibration_slope": 1.0, "calibration_intercept": 0.0}
    with torch.no_grad():
        logits = model.logits(
            torch.from_numpy(np.array(data.dense)), torch.from_numpy(data.categorical.astype(np.int64))
        )
    z = logits.double().numpy()
    x = np.stack([z, np.ones(len(z))], axis=1)
    y = data.label.astype(np.float64)
    weights = np.array([1.0, np.log(y.mean()) - np.log(np.exp(z).mean())])
    for _ in range(50):
        p = 1 / (1 + np.exp(-x @ weights))
        hessian = (x * (p * (1 - p))[:, None]).T @ x + 1e-6 * np.eye(2)
        step = np.linalg.solve(hessian, x.T @ (p - y))
        weights = weights - np.clip(step, -1, 1)
        if np.abs(step).max() < 1e-8:
            break
    if weights[0] < MIN_SLOPE:  # a falling slope would turn the ranking round: all that is known is the rate
        weights = np.array([MIN_SLOPE, np.log(y.mean() / (1 - y.mean())) - MIN_SLOPE * z.mean()])
    model.calibration.copy_(torch.from_numpy(weights))
    p = 1 / (1 + np.exp(-x @ weights))
    return {
        "calibration_slope": float(weights[0]),
        "calibration_intercept": float(weights[1]),
        "calibration_mean_probability": float(p.mean()),
        "calibration_purchase_rate": float(y.mean()),
    }


def load_ranker(checkpoint: Path) -> Dlrm:
    """Return the trained model of a checkpoint, ready for inference."""
    weights, config = read_checkpoint(checkpoint, "dlrm")
    model = Dlrm(config["dense"], config["cardinality"], config["dim"], config["hidden"])
    model.load_state_dict(weights)
    return model.eval()
