"""Wide & Deep: a linear model that memorises beside a deep one that generalises."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from components.models.ranker import Inputs, Ranker, Shape, looked_up, mlp, tables


class WideDeep(Ranker):
    """Adds a linear score and a deep one.

    Architecture after Cheng et al., "Wide & Deep Learning for Recommender Systems" (arXiv 1606.07792). The
    wide part is linear in the dense features and their squares, with one weight per type, category and
    department; the deep part sees the same and embeddings.
    """

    def __init__(self, shape: Shape, dim: int = 8, hidden: int = 256, dropout: float = 0.0) -> None:
        super().__init__(shape)
        self.wide = nn.Linear(2 * shape.dense, 1)
        self.weights = tables(shape.cardinality[1:], 1)
        self.embeddings = tables(shape.cardinality[1:], dim)
        self.deep = mlp(shape.dense + len(self.embeddings) * dim, hidden, 2, dropout)

    def logits(self, inputs: Inputs) -> Tensor:
        """Return one logit per candidate, (q, m) or (n,)."""
        x = self.scale(inputs.dense)
        codes = inputs.categorical
        wide = self.wide(torch.cat([x, x * x], dim=-1))
        for weight in looked_up(self.weights, codes):
            wide = wide + weight
        vectors = looked_up(self.embeddings, codes)
        return (wide + self.deep(torch.cat([x, *vectors], dim=-1))).squeeze(-1)
