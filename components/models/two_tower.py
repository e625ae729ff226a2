"""The retriever: a query tower over user and basket, an item tower, one inner product."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class TwoTower(nn.Module):
    """Item vectors and query vectors whose inner product says how well an item fits the query.

    The item tower adds an id embedding and its type, category and department embeddings; the query tower
    averages the same embeddings over the user's history (weighted) and over the basket as it stands, and
    maps the two bags to a vector. The last dimension holds the item's bias (1 on the query's side), so a
    plain inner-product index knows about popularity.
    """

    categorical: Tensor

    def __init__(self, categorical: Tensor, cardinality: list[int], dim: int = 64, hidden: int = 128) -> None:
        """Take the items' category codes, (n, 3) int64, and how many values each code has."""
        super().__init__()
        n = len(categorical)
        self.register_buffer("categorical", torch.cat([torch.zeros(1, 3, dtype=torch.long), categorical]))
        self.item = nn.Embedding(n + 1, dim, padding_idx=0)
        levels = [nn.Embedding(size, dim) for size in cardinality]
        self.levels = nn.ModuleList(levels)
        self.bias = nn.Embedding(n + 1, 1)
        self.item_mlp = nn.Sequential(nn.Linear(dim, hidden), nn.SiLU(), nn.Linear(hidden, dim))
        self.query_mlp = nn.Sequential(nn.Linear(2 * dim, hidden), nn.SiLU(), nn.Linear(hidden, dim))
        for table in (self.item, *levels):
            nn.init.normal_(table.weight, std=0.05)
        nn.init.zeros_(self.bias.weight)

    @property
    def every(self) -> Tensor:
        """The codes of all items, shifted by one, and 0 for padding, (n + 1,) int64."""
        return torch.arange(len(self.categorical))

    def content(self, items: Tensor) -> Tensor:
        """Return the embeddings of items, (k,) codes shifted by one: (k, dim), zeros for padding."""
        total = self.item(items)
        for table, codes in zip(self.levels, self.categorical[items].unbind(1), strict=True):
            total = total + table(codes)
        return total * (items > 0)[:, None]

    def item_vectors(self, content: Tensor, items: Tensor) -> Tensor:
        """Return the item tower's vectors of items, (k,), from what `content` returned: (k, dim + 1)."""
        return torch.cat([content + self.item_mlp(content), self.bias(items)], dim=1)

    def query_vectors(
        self, content: Tensor, history: Tensor, history_weight: Tensor, basket: Tensor
    ) -> Tensor:
        """Return the query tower's vectors, (b, dim + 1).

        Args:
            content: embeddings that `history` and `basket` count in, row 0 being padding.
            history: rows of `content`, (b, h) int64, 0 is padding.
            history_weight: (b, h) float32, 0 for padding.
            basket: rows of `content`, (b, w) int64, 0 is padding.
        """
        weighted = (content[history] * history_weight[..., None]).sum(1)  # (b, dim)
        past = weighted / (history_weight.sum(1, keepdim=True) + 1e-6)
        filled = (basket > 0).to(content.dtype)
        now = content[basket].sum(1) / (filled.sum(1, keepdim=True) + 1e-6)  # (b, dim)
        vector = past + now + self.query_mlp(torch.cat([past, now], dim=1))
        return torch.cat([vector, torch.ones_like(vector[:, :1])], dim=1)


class QueryTower(nn.Module):
    """The query side alone, with the embeddings folded into one table: the exported and served part."""

    table: Tensor

    def __init__(self, model: TwoTower) -> None:
        """Take a trained model; its content table is computed once and frozen."""
        super().__init__()
        self.model = model
        self.register_buffer("table", model.content(model.every).detach())

    def forward(self, history: Tensor, history_weight: Tensor, basket: Tensor) -> Tensor:
        """Return the query vectors, (b, dim + 1)."""
        return self.model.query_vectors(self.table, history, history_weight, basket)
