"""Item embeddings smoothed over the bought-together graph, and a ranker that uses them."""

from __future__ import annotations

from typing import Annotated

import numpy as np
import torch
from msgspec import Meta
from torch import Tensor, nn

from components.data.examples import GRAPH_DEGREE
from components.models.ranker import CANDIDATE, QUERY, Inputs, Ranker, Shape, looked_up, mlp, tables


class GraphRanker(Ranker):
    """Compares the candidate with history and basket in a space that the co-purchase graph has smoothed.

    Propagation after He et al., "LightGCN" (arXiv 2002.02126): no weights, no non-linearity, the mean over
    the layers. The graph is item to item as in Ying et al., "PinSage" (arXiv 1806.01973): each item's
    strongest neighbours, weighted by how often they share a basket.
    """

    uses = CANDIDATE + QUERY
    neighbours: Tensor
    weights: Tensor
    frozen: Tensor

    def __init__(
        self,
        shape: Shape,
        dim: int = 32,
        hidden: int = 128,
        dropout: float = 0.0,
        layers: int = 2,
        degree: Annotated[int, Meta(ge=1, le=GRAPH_DEGREE)] = GRAPH_DEGREE,
    ) -> None:
        super().__init__(shape)
        self.layers = layers
        self.items = nn.Embedding(shape.cardinality[0], dim)
        nn.init.normal_(self.items.weight, std=0.05)
        self.register_buffer("neighbours", torch.zeros(shape.cardinality[0], degree, dtype=torch.long))
        self.register_buffer("weights", torch.zeros(shape.cardinality[0], degree))
        self.register_buffer("frozen", torch.zeros(shape.cardinality[0], dim))
        self.embeddings = tables(shape.cardinality[1:], 8)
        self.top = mlp(shape.dense + 8 * len(self.embeddings) + dim + 2, hidden, 2, dropout)

    def set_graph(self, neighbours: np.ndarray, weights: np.ndarray) -> None:
        """Take each item's neighbours and weights, (items, degree); a row of weights adds up to 1 or 0."""
        self.neighbours.copy_(torch.from_numpy(neighbours[:, : self.neighbours.shape[1]]))
        self.weights.copy_(torch.from_numpy(weights[:, : self.weights.shape[1]]))

    def train(self, mode: bool = True) -> GraphRanker:
        """Switch between training, which smooths again for every batch, and inference, which looks up."""
        if not mode:
            with torch.no_grad():
                self.frozen.copy_(self.smoothed())
        return super().train(mode)

    def smoothed(self) -> Tensor:
        """Return the items' embeddings, each mixed with what its neighbours hold, (items, dim)."""
        items, degree = self.neighbours.shape
        ends = torch.stack([torch.arange(items).repeat_interleave(degree), self.neighbours.flatten()])
        graph = torch.sparse_coo_tensor(ends, self.weights.flatten(), (items, items), check_invariants=False)
        layer = total = self.items.weight
        for _ in range(self.layers):
            layer = torch.sparse.mm(graph, layer)
            total = total + layer
        return total / (self.layers + 1)

    def logits(self, inputs: Inputs) -> Tensor:
        """Return one logit per candidate, (q, m)."""
        table = self.smoothed() if self.training else self.frozen
        codes = inputs.categorical
        asked = table[codes[..., 0]]  # (q, m, dim)
        weight = inputs.history_weight / (inputs.history_weight.sum(1, keepdim=True) + 1e-6)
        past = (table[inputs.history] * weight[..., None]).sum(1, keepdim=True)
        filled = (inputs.basket > 0).to(asked.dtype)
        filled = filled / (filled.sum(1, keepdim=True) + 1e-6)
        now = (table[inputs.basket] * filled[..., None]).sum(1, keepdim=True)
        dots = torch.stack([(asked * past).sum(2), (asked * now).sum(2)], dim=2)
        vectors = looked_up(self.embeddings, codes)
        return self.top(torch.cat([self.scale(inputs.dense), *vectors, asked, dots], dim=2)).squeeze(2)
