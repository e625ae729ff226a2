"""What all rankers share: named inputs, scaling of the dense features, calibration, one probability out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn

CANDIDATE = ("dense", "categorical")  # inputs of every ranker, and the only ones at the endpoint
QUERY = ("history", "history_weight", "basket")  # additional inputs of a teacher


CLIP = 6.0  # deviations above the mean at which a feature stops counting


# Beyond this logit (6e-6) ONNX Runtime's sigmoid is no longer exact: all is made equal there.
FLAT = 12.0


class Inputs(NamedTuple):
    """What a ranker may look at: m candidates of each of q requests.

    A ranker that asks for nothing of the request also takes candidates of many requests in one row: (n,).
    """

    dense: Tensor  # (q, m, features) float32, raw
    categorical: Tensor  # (q, m, 4) int64: item, type, category, department; 0 is unknown
    history: Tensor  # (q, HISTORY_LENGTH) int64 items shifted by one, the latest first; 0 is padding
    history_weight: Tensor  # (q, HISTORY_LENGTH) float32
    basket: Tensor  # (q, BASKET_LENGTH) int64 items shifted by one; 0 is padding


@dataclass(frozen=True)
class Shape:
    """What the data says about a ranker's size."""

    dense: int  # features
    cardinality: tuple[int, ...]  # values of item, type, category and department, the unknown one included


class Ranker(nn.Module):
    """Scores candidates; a subclass says how in `logits`.

    The graph takes raw features: log scaling, normalisation and calibration are inside.
    """

    uses: ClassVar[tuple[str, ...]] = CANDIDATE
    offset: Tensor
    most: Tensor
    slope: Tensor
    shift: Tensor
    calibration: Tensor

    def __init__(self, shape: Shape) -> None:
        """Take the shape; normalisation and calibration are the identity until they are fitted."""
        super().__init__()
        self.register_buffer("offset", torch.ones(shape.dense))
        self.register_buffer("most", torch.full((shape.dense,), 1e9))
        self.register_buffer("slope", torch.ones(shape.dense))
        self.register_buffer("shift", torch.zeros(shape.dense))
        self.register_buffer("calibration", torch.tensor([1.0, 0.0]))  # slope, intercept of Platt scaling

    def scale(self, dense: Tensor) -> Tensor:
        """Return the dense features on a log scale, clipped and normalised, same shape.

        `offset` makes every feature at least 1 and `most` is where it stops counting. The operations are
        those that ONNX Runtime has fast kernels for: sign(x) log(1 + |x|), clipped after it is normalised,
        takes twice as long.
        """
        x = torch.minimum(dense + self.offset, self.most).clamp(min=1.0)
        return torch.log(x) * self.slope + self.shift

    def fit_scale(self, sample: Tensor) -> None:
        """Set the scale so that each feature of a sample, (rows, features), has mean 0 and deviation 1.

        A feature that never changes in the sample is 0 from then on, whatever it says.
        """
        self.offset.copy_(1 - sample.amin(0).clamp(max=0.0))
        x = torch.log(sample + self.offset).double()
        mean, deviation = x.mean(0), x.std(0, correction=0)
        constant = deviation < 1e-6  # nothing was learnt from it: its later values must not count either
        deviation = deviation.clamp(min=1e-3)
        self.most.copy_(torch.exp(mean + CLIP * deviation))
        self.slope.copy_(torch.where(constant, 0.0, 1 / deviation))
        self.shift.copy_(torch.where(constant, 0.0, -mean / deviation))

    def calibrate(self, slope: float, intercept: float) -> None:
        """Set how a logit becomes a probability."""
        self.calibration.copy_(torch.tensor([slope, intercept]))

    def logits(self, inputs: Inputs) -> Tensor:
        """Return one logit per candidate, (q, m) or (n,)."""
        raise NotImplementedError

    def forward(
        self,
        dense: Tensor,
        categorical: Tensor,
        history: Tensor | None = None,
        history_weight: Tensor | None = None,
        basket: Tensor | None = None,
    ) -> Tensor:
        """Return the calibrated purchase probability of each candidate, (q, m) or (n,)."""
        logits = self.logits(Inputs(dense, categorical, history, history_weight, basket))  # type: ignore[arg-type]
        return torch.sigmoid((self.calibration[0] * logits + self.calibration[1]).clamp(-FLAT, FLAT))


def mlp(width: int, hidden: int, layers: int, dropout: float, out: int = 1) -> nn.Sequential:
    """Return `layers` hidden layers with SiLU and dropout, and a linear output."""
    modules: list[nn.Module] = []
    for _ in range(layers):
        modules += [nn.Linear(width, hidden), nn.SiLU(), nn.Dropout(dropout)]
        width = hidden
    return nn.Sequential(*modules, nn.Linear(width, out))


def looked_up(tables: nn.ModuleList, codes: Tensor) -> list[Tensor]:
    """Return the rows of each table, (..., dim), for the last columns of the codes, (..., columns)."""
    first = codes.shape[-1] - len(tables)
    return [table(codes[..., first + i]) for i, table in enumerate(tables)]


def tables(cardinality: tuple[int, ...], dim: int) -> nn.ModuleList:
    """Return one small embedding table per categorical input."""
    made = [nn.Embedding(size, dim) for size in cardinality]
    for table in made:
        nn.init.normal_(table.weight, std=0.05)
    return nn.ModuleList(made)
