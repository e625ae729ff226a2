"""Shops so small that a peer's scores are worked out by hand."""

import numpy as np

from pipelines.bench.peers.rankers import PeerRequest, Score, Seen


def shop(*shoppers: list[list[int]], items: int) -> Seen:
    lines = [
        (user, own, item)
        for user, baskets in enumerate(shoppers)
        for own, basket in enumerate(baskets)
        for item in basket
    ]
    user, own, item = np.array(lines).T
    number = np.cumsum(np.r_[True, (user[1:] != user[:-1]) | (own[1:] != own[:-1])]) - 1
    return Seen(items, user, number, item, own, len(shoppers))


def asked(visible: list[int], own: list[list[int]] = [], user: int = 0) -> PeerRequest:  # noqa: B006 - not changed
    lines = [(number, item) for number, basket in enumerate(own) for item in basket]
    number, item = np.array(lines, np.int64).reshape(-1, 2).T
    return PeerRequest(user, np.array(visible, np.int64), item, number, 10.0 * (len(own) - number))


def two_worlds() -> Seen:
    """Half of the shoppers buys items 0-4 alone, the other half items 5-9."""
    rng = np.random.default_rng(0)
    worlds = [[(rng.permutation(5)[:3] + 5 * (user % 2)).tolist() for _ in range(12)] for user in range(60)]
    return shop(*worlds, items=10)


def apart(score: Score) -> None:
    """Check that a basket of the second world gets items of it first."""
    scores = score(asked([6, 7]))
    assert scores[[5, 8, 9]].min() > scores[:5].max()
