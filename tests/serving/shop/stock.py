"""A recommender whose facts say how many units of an item are left."""

from collections.abc import Iterable

from feature_repo.facts import Fact
from serving.answer.recommender import Recommender

AT = 1_700_000_000.0


def set_stock(recommender: Recommender, codes: Iterable[int], units: float | None = 0.0) -> None:
    """Take in the stock of items, by their codes, as if a store had it; None withdraws it."""
    ids = recommender.bundle.statistics.item_ids
    recommender.facts._take([Fact("f", "stock", str(ids[code]), units, AT) for code in codes])
