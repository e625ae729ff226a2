"""Examples -> fitted weights: the loop that trains the retriever, and trains, distils and tunes rankers."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, distributed, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from components.data.examples import RankerExamples, pad
from components.hyper_parameters import (
    PruneParams,
    QuantizeParams,
    RankerParams,
    RetrieverParams,
    StudentParams,
)
from components.models.ranker import CANDIDATE, Inputs, Ranker
from components.progress import with_progress

log = logging.getLogger(__name__)

LEAST_STEPS = 300  # a small shop's few lists are passed more often than asked, until so many steps are done


@dataclass(frozen=True)
class Soft:
    """A teacher's scores to learn from, besides purchases (Hinton et al., arXiv 1503.02531)."""

    logits: np.ndarray  # (rows,) float32
    weight: float  # of the soft loss; the hard one has the rest
    temperature: float


def fit(
    model: Ranker, data: RankerExamples, settings: RankerParams, soft: Soft | None = None
) -> list[dict[str, float]]:
    """Train in place with Adam and one learning-rate cycle; return each epoch's number and mean loss.

    Under `torchrun` each process takes its share of every batch, and DistributedDataParallel averages the
    gradients: the batches and steps of one process, in less time.

    Args:
        model: what to train; left in training mode.
        data: lists, each with a purchase.
        settings: how long and how fast; LEAST_STEPS may ask for more epochs.
        soft: a teacher's logits for every row.
    """
    rank, workers = (
        (distributed.get_rank(), distributed.get_world_size()) if distributed.is_initialized() else (0, 1)
    )
    call: nn.Module = _Logits(model)
    if workers > 1:
        call = DistributedDataParallel(call)
    label, alone = np.asarray(data.label), model.uses == CANDIDATE

    def loss_of(together: np.ndarray, _: np.random.Generator) -> Tensor:
        chosen = together[rank::workers] if len(together) >= workers else together
        inputs, rows, there = inputs_of(data, chosen, alone)
        logits = call(inputs)
        if alone:
            logits = logits.new_zeros(there.shape).masked_scatter(there, logits)
        loss = hard_loss(logits, torch.from_numpy(label[rows]) * there, there, settings.pointwise_weight)
        if soft is None:
            return loss
        taught = torch.from_numpy(soft.logits[rows])
        return (1 - soft.weight) * loss + soft.weight * soft_loss(logits, taught, there, soft.temperature)

    model.train()
    return descend(_optimizer(model, settings), settings, len(data.start) - 1, loss_of, LEAST_STEPS, 0.2)


def descend(
    optimizer: torch.optim.Optimizer,
    settings: RankerParams | RetrieverParams,
    count: int,
    loss_of: Callable[[np.ndarray, np.random.Generator], Tensor],
    least_steps: int,
    rising: float,
) -> list[dict[str, float]]:
    """Step down the loss of shuffled batches, with one learning-rate cycle; return the mean of each epoch.

    Args:
        optimizer: of the weights.
        settings: how long and how fast, and the seed of the shuffling.
        count: how many examples there are.
        loss_of: returns the loss of a batch from the numbers of its examples; it may draw more at random.
        least_steps: epochs are added until there are so many steps.
        rising: share of the steps with a rising learning rate.
    """
    rng = np.random.default_rng(settings.seed)
    batches = max(1, math.ceil(count / settings.batch_size))
    epochs = max(settings.epochs, math.ceil(least_steps / batches))
    steps = batches * epochs
    cycle = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, settings.learning_rate, total_steps=steps, pct_start=rising
    )
    progress = with_progress(range(steps), steps, "batches")
    curve: list[dict[str, float]] = []
    for epoch in range(1, epochs + 1):
        losses = []
        for batch in np.array_split(rng.permutation(count), batches):
            next(progress)
            loss = loss_of(batch, rng)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            cycle.step()
            losses.append(loss.item())
        curve.append({"epoch": epoch, "loss": float(np.mean(losses))})
        log.info("epoch %d of %d: loss %.4f", epoch, epochs, curve[-1]["loss"])
    return curve


def tuning_of(settings: StudentParams | PruneParams | QuantizeParams, **others: Any) -> RankerParams:
    """Return the parameters of a fit that those of a later step name; the rest keep their defaults."""
    named = RankerParams.__annotations__.keys() & vars(settings).keys()
    return RankerParams(**{name: getattr(settings, name) for name in named}, **others)


def _optimizer(model: Ranker, settings: RankerParams) -> torch.optim.Optimizer:
    # All parameters of a table's module: with rounding in the loop, `weight` itself is not a parameter.
    embeddings = (module for module in model.modules() if isinstance(module, nn.Embedding))
    tables = [weight for module in embeddings for weight in module.parameters()]
    others = [weight for weight in model.parameters() if all(weight is not table for table in tables)]
    groups: list[dict[str, Any]] = [
        {"params": others},
        {"params": tables, "weight_decay": settings.table_decay},
    ]
    return torch.optim.AdamW(groups, lr=settings.learning_rate, weight_decay=0.0, fused=True)


class _Logits(nn.Module):
    """Calls `logits`: DistributedDataParallel only sees `forward`."""

    def __init__(self, ranker: Ranker) -> None:
        super().__init__()
        self.ranker = ranker

    def forward(self, inputs: Inputs) -> Tensor:
        return self.ranker.logits(inputs)


def inputs_of(
    data: RankerExamples, lists: np.ndarray, alone: bool = False
) -> tuple[Inputs, np.ndarray, Tensor]:
    """Return some lists, padded to the longest by repeating their first row.

    Args:
        data: the examples.
        lists: their numbers.
        alone: candidates are (real rows, ·): padding, a sixth of the rows in training, is left out.

    Returns:
        The inputs, of candidates (lists, longest, ·); the row numbers, (lists, longest); which are real.
    """
    rows, there = pad(data.start, lists)
    wanted = rows[there] if alone else rows
    return (
        Inputs(
            torch.from_numpy(data.dense[wanted]),
            torch.from_numpy(data.categorical[wanted].astype(np.int64)),
            torch.from_numpy(data.history[lists].astype(np.int64)),
            torch.from_numpy(data.history_weight[lists].astype(np.float32)),
            torch.from_numpy(data.basket[lists].astype(np.int64)),
        ),
        rows,
        torch.from_numpy(there),
    )


def sample_rows(data: RankerExamples) -> Tensor:
    """Return the dense features of some rows, spread over all lists."""
    rows = np.linspace(0, len(data.label) - 1, min(len(data.label), 200_000)).astype(int)
    return torch.from_numpy(data.dense[rows])


def hard_loss(logits: Tensor, label: Tensor, there: Tensor, pointwise_weight: float) -> Tensor:
    """Return the softmax loss over each list, its purchases sharing the target, plus weighted BCE."""
    log_p = functional.log_softmax(logits.masked_fill(~there, -1e9), dim=1)
    label = label.to(logits.dtype)
    listwise = -(log_p * label).sum(1) / label.sum(1).clamp(min=1)
    pointwise = functional.binary_cross_entropy_with_logits(logits[there], label[there])
    return listwise.mean() + pointwise_weight * pointwise


def soft_loss(logits: Tensor, taught: Tensor, there: Tensor, temperature: float) -> Tensor:
    """Return the cross-entropy between the teacher's and the student's softmax over each list.

    Times the temperature squared, so that its gradients weigh the same at any temperature.
    """
    log_p = functional.log_softmax(logits.masked_fill(~there, -1e9) / temperature, dim=1)
    target = functional.softmax(taught.masked_fill(~there, -1e9) / temperature, dim=1)
    return -(log_p * target).sum(1).mean() * temperature**2
