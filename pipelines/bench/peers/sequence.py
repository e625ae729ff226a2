"""Purchases in the order of time -> the next item, by a causal transformer in the manner of SASRec."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from components.progress import with_progress

if TYPE_CHECKING:
    from pipelines.bench.peers.rankers import PeerRequest, Score, Seen

LENGTH, WIDTH, LAYERS, HEADS = 100, 64, 2, 2
NEGATIVES, BATCH, LEARNING_RATE = 1_024, 64, 2e-3


class SasRec(nn.Module):
    """Kang and McAuley, arXiv 1808.09781: item and position vectors, causal attention, tied output."""

    def __init__(self, items: int) -> None:
        super().__init__()
        self.items = nn.Embedding(items + 1, WIDTH, padding_idx=0)  # 0 fills up
        self.position = nn.Embedding(LENGTH, WIDTH)
        nn.init.normal_(self.items.weight, std=0.05)
        layer = nn.TransformerEncoderLayer(
            WIDTH, HEADS, 2 * WIDTH, 0.2, nn.functional.gelu, batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, LAYERS, nn.LayerNorm(WIDTH), enable_nested_tensor=False)
        self.bias = nn.Parameter(torch.zeros(items + 1))

    def forward(self, sequence: Tensor) -> Tensor:
        """Return a vector at each place of (b, l) codes from 1, padded with 0 at the end; (b, l, WIDTH)."""
        length = sequence.shape[1]
        tokens = self.items(sequence) * WIDTH**0.5 + self.position.weight[:length]
        mask = torch.ones(length, length, dtype=torch.bool).triu(1)
        encoded: Tensor = self.encoder(tokens, mask=mask)
        return encoded


def fit_sasrec(seen: Seen, epochs: int) -> Score:
    """Score by the next item of a shopper's sequence; the basket is its end.

    The loss is the softmax over the right item and shared negatives, drawn by popularity, with their
    log-probability taken off.
    """
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    model = SasRec(seen.items)
    sequences = _sequences(seen)
    share = np.bincount(seen.item + 1, minlength=seen.items + 1).astype(np.float64)
    share /= share.sum()
    correction = torch.from_numpy(np.log(np.maximum(share * NEGATIVES, 1e-12)).astype(np.float32))
    steps = epochs * -(-len(sequences) // BATCH)
    optimiser = torch.optim.AdamW(model.parameters(), LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, LEARNING_RATE, total_steps=steps)
    for _ in with_progress(range(epochs), epochs, "epochs of SASRec"):
        order = rng.permutation(len(sequences))
        for start in range(0, len(order), BATCH):
            batch = torch.from_numpy(sequences[order[start : start + BATCH]])
            negatives = torch.from_numpy(rng.choice(len(share), NEGATIVES, p=share))
            loss = _loss(model, batch, negatives, correction)
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            schedule.step()
    model.eval()

    def score(asked: PeerRequest) -> np.ndarray:
        codes = np.concatenate([asked.item, asked.visible])[-LENGTH:] + 1
        if not len(codes):
            return share[1:]
        with torch.inference_mode():
            last = model(torch.from_numpy(codes)[None])[0, -1]
            return np.asarray((model.items.weight @ last + model.bias)[1:], np.float64)

    return score


def _loss(model: SasRec, batch: Tensor, negatives: Tensor, correction: Tensor) -> Tensor:
    given, wanted = batch[:, :-1], batch[:, 1:]
    real = wanted > 0
    vectors, right = model(given)[real], wanted[real]  # (t, WIDTH), (t,)
    positive = (vectors * model.items(right)).sum(1) + model.bias[right] - correction[right]
    others = vectors @ model.items(negatives).T + model.bias[negatives] - correction[negatives]
    others = others.masked_fill(negatives[None] == right[:, None], -1e9)
    return -(positive - torch.logsumexp(torch.cat([positive[:, None], others], 1), 1)).mean()


def _sequences(seen: Seen) -> np.ndarray:
    """Return each shopper's items in pieces of LENGTH + 1, codes from 1; the order inside a basket varies."""
    rng = np.random.default_rng(0)
    order = np.lexsort((rng.random(len(seen.item)), seen.basket))
    user, item = seen.user[order], seen.item[order] + 1
    pieces = []
    for lines in np.split(item, np.flatnonzero(user[1:] != user[:-1]) + 1):
        for start in range(0, len(lines), LENGTH):
            piece = lines[start : start + LENGTH + 1]
            pieces.append(np.pad(piece, (0, LENGTH + 1 - len(piece))))
    return np.array(pieces)
