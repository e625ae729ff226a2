"""DLRM: embeddings, bottom MLP, dot interactions, top MLP, over the dense features."""

from __future__ import annotations

import torch
from torch import Tensor

from components.models.ranker import Inputs, Ranker, Shape, looked_up, mlp, tables


class Dlrm(Ranker):
    """Scores a candidate from its dense features and its category codes.

    Architecture after Naumov et al., "Deep Learning Recommendation Model for Personalization and
    Recommendation Systems" (arXiv 1906.00091), with two departures that this data asks for: the item-id
    table is optional (more than one epoch of it over-fits), and the normalised dense features also reach
    the top MLP.
    """

    sums: Tensor

    def __init__(
        self, shape: Shape, dim: int = 8, hidden: int = 128, dropout: float = 0.0, items: bool = False
    ) -> None:
        super().__init__(shape)
        self.embeddings = tables(shape.cardinality if items else shape.cardinality[1:], dim)
        self.bottom = mlp(shape.dense, hidden, 1, 0.0, out=dim)
        vectors = len(self.embeddings) + 1
        self.pairs = [(i, j) for i in range(vectors) for j in range(i + 1, vectors)]
        sums = torch.eye(len(self.pairs)).repeat_interleave(dim, 0)  # adds up the products of each pair
        self.register_buffer("sums", sums, persistent=False)
        self.top = mlp(shape.dense + vectors * dim + vectors * (vectors - 1) // 2, hidden, 2, dropout)

    def logits(self, inputs: Inputs) -> Tensor:
        """Return one logit per candidate, (q, m) or (n,)."""
        x = self.scale(inputs.dense)
        vectors = [self.bottom(x), *looked_up(self.embeddings, inputs.categorical)]
        left = torch.cat([vectors[i] for i, _ in self.pairs], dim=-1)
        right = torch.cat([vectors[j] for _, j in self.pairs], dim=-1)
        dots = (left * right) @ self.sums  # four times as fast as a product of small matrices for each row
        return self.top(torch.cat([x, *vectors, dots], dim=-1)).squeeze(-1)
