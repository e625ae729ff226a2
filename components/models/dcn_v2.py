"""DCN-v2: layers that cross every feature with every other one, beside a deep network."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from components.models.ranker import Inputs, Ranker, Shape, looked_up, mlp, tables


class DcnV2(Ranker):
    """Crosses features explicitly.

    Architecture after Wang et al., "DCN V2: Improved Deep & Cross Network" (arXiv 2008.13535), the parallel
    form with low-rank crosses: x_(l+1) = x_0 * (U (V x_l) + b) + x_l.
    """

    def __init__(
        self,
        shape: Shape,
        dim: int = 8,
        hidden: int = 128,
        dropout: float = 0.0,
        crosses: int = 2,
        rank: int = 32,
    ) -> None:
        super().__init__(shape)
        self.embeddings = tables(shape.cardinality[1:], dim)
        width = shape.dense + len(self.embeddings) * dim
        self.down = nn.ModuleList(nn.Linear(width, rank, bias=False) for _ in range(crosses))
        self.up = nn.ModuleList(nn.Linear(rank, width) for _ in range(crosses))
        self.deep = mlp(width, hidden, 2, dropout, out=hidden)
        self.last = nn.Linear(width + hidden, 1)

    def logits(self, inputs: Inputs) -> Tensor:
        """Return one logit per candidate, (q, m) or (n,)."""
        codes = inputs.categorical
        vectors = looked_up(self.embeddings, codes)
        first = torch.cat([self.scale(inputs.dense), *vectors], dim=-1)
        crossed = first
        for down, up in zip(self.down, self.up, strict=True):
            crossed = first * up(down(crossed)) + crossed
        return self.last(torch.cat([crossed, self.deep(first)], dim=-1)).squeeze(-1)
