"""The ranker: DLRM (embeddings, bottom MLP, dot interactions, top MLP) over the dense features."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Dlrm(nn.Module):
    """Scores a candidate from its dense features and its category codes.

    Architecture after Naumov et al., "Deep Learning Recommendation Model for Personalization and
    Recommendation Systems" (arXiv 1906.00091), with two departures that this data asks for: no item-id
    embedding (one epoch of it over-fits), and the normalised dense features also reach the top MLP.
    The graph takes raw features: log scaling, normalisation and calibration are inside.
    """

    mean: Tensor
    std: Tensor
    calibration: Tensor
    pairs: Tensor

    def __init__(
        self, dense: int, cardinality: list[int], dim: int = 8, hidden: int = 128, dropout: float = 0.1
    ) -> None:
        """Take the number of dense features and how many values each categorical one has."""
        super().__init__()
        self.register_buffer("mean", torch.zeros(dense))
        self.register_buffer("std", torch.ones(dense))
        self.register_buffer("calibration", torch.tensor([1.0, 0.0]))  # slope, intercept of Platt scaling
        tables = [nn.Embedding(size, dim) for size in cardinality]
        self.embeddings = nn.ModuleList(tables)
        for table in tables:
            nn.init.normal_(table.weight, std=0.05)
        self.bottom = nn.Sequential(nn.Linear(dense, hidden), nn.SiLU(), nn.Linear(hidden, dim))
        vectors = len(cardinality) + 1
        self.register_buffer("pairs", torch.triu_indices(vectors, vectors, offset=1))
        width = dense + vectors * dim + vectors * (vectors - 1) // 2
        self.top = nn.Sequential(
            nn.Linear(width, hidden),
            nn.SiLU(),
            nn.Dropout(dropout),
            nn.Linear(hidden, hidden),
            nn.SiLU(),
            nn.Dropout(dropout),
            nn.Linear(hidden, 1),
        )

    def logits(self, dense: Tensor, categorical: Tensor) -> Tensor:
        """Return one logit per row, (n,), from dense (n, f) float32 and categorical (n, c) int64."""
        x = torch.sign(dense) * torch.log1p(torch.abs(dense))
        x = ((x - self.mean) / self.std).clamp(-6.0, 6.0)
        vectors = [self.bottom(x), *(table(categorical[:, i]) for i, table in enumerate(self.embeddings))]
        stacked = torch.stack(vectors, dim=1)  # (n, vectors, dim)
        dots = torch.bmm(stacked, stacked.transpose(1, 2))[:, self.pairs[0], self.pairs[1]]
        return self.top(torch.cat([x, *vectors, dots], dim=1)).squeeze(1)

    def forward(self, dense: Tensor, categorical: Tensor) -> Tensor:
        """Return the calibrated purchase probability of each row, (n,)."""
        return torch.sigmoid(self.calibration[0] * self.logits(dense, categorical) + self.calibration[1])
