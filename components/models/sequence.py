"""A transformer over the user's latest purchases, queried with each candidate."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from components.models.ranker import CANDIDATE, QUERY, Inputs, Ranker, Shape, looked_up, mlp, tables
from feature_repo.schema import HISTORY_LENGTH


class SequenceRanker(Ranker):
    """Attends from each candidate to the user's encoded history and to the basket.

    After Kang & McAuley, "Self-Attentive Sequential Recommendation" (arXiv 1808.09781) for the encoder and
    Chen et al., "Behavior Sequence Transformer" (arXiv 1905.06874) for asking it about a target. The
    history is encoded once per request, whatever the number of candidates.
    """

    uses = CANDIDATE + QUERY

    def __init__(
        self, shape: Shape, dim: int = 24, hidden: int = 128, heads: int = 2, dropout: float = 0.0
    ) -> None:
        super().__init__(shape)
        self.items = nn.Embedding(shape.cardinality[0], dim)
        self.position = nn.Embedding(HISTORY_LENGTH, dim)
        self.weight = nn.Linear(1, dim)
        for table in (self.items, self.position):
            nn.init.normal_(table.weight, std=0.05)
        self.encoder = nn.TransformerEncoderLayer(
            dim, heads, 2 * dim, dropout, activation=nn.functional.silu, batch_first=True, norm_first=True
        )
        self.embeddings = tables(shape.cardinality[1:], 8)
        self.top = mlp(shape.dense + 8 * len(self.embeddings) + 3 * dim + 2, hidden, 2, dropout)

    def logits(self, inputs: Inputs) -> Tensor:
        """Return one logit per candidate, (q, m)."""
        tokens = self.items(inputs.history) + self.position.weight
        tokens = tokens + self.weight(inputs.history_weight[..., None])
        empty = inputs.history == 0
        empty = torch.cat([torch.zeros_like(empty[:, :1]), empty[:, 1:]], dim=1)  # attention needs one token
        encoded = self.encoder(tokens, src_key_padding_mask=empty)  # (q, HISTORY_LENGTH, dim)
        codes = inputs.categorical
        asked = self.items(codes[..., 0])  # (q, m, dim)
        scores = asked @ encoded.transpose(1, 2) / asked.shape[2] ** 0.5
        scores = scores.masked_fill(empty[:, None, :], -1e4)
        interest = torch.softmax(scores, dim=2) @ encoded  # (q, m, dim)
        filled = (inputs.basket > 0).to(asked.dtype)
        basket = (self.items(inputs.basket) * filled[..., None]).sum(1) / (filled.sum(1, keepdim=True) + 1e-6)
        basket = basket[:, None, :].expand_as(asked)
        dots = torch.stack([(asked * interest).sum(2), (asked * basket).sum(2)], dim=2)
        vectors = looked_up(self.embeddings, codes)
        seen = [self.scale(inputs.dense), *vectors, asked, interest, basket, dots]
        return self.top(torch.cat(seen, dim=2)).squeeze(2)
