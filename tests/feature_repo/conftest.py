"""A shop of five items with one request, and the fitted tables of a toy shop."""

from collections.abc import Callable

import numpy as np
import pandas as pd
import pytest

from components.data.fit_statistics import fit, fit_vocabulary, purchases_of
from feature_repo.aggregates import DAY_S, UserEvents
from feature_repo.queries import Query, Rows, User
from feature_repo.schema import FRESH
from feature_repo.statistics import Statistics
from feature_repo.toy_shop import toy_dataset

NOW = 1_511_740_800
BREAD, BUTTER, JAM, MILK, TEA = range(5)
UNKNOWN = -1  # an item that the catalogue lacks

Fitted = tuple[Statistics, dict[str, list[str]]]  # the tables, and the names behind their codes


@pytest.fixture(scope="session")
def fitted() -> Fitted:
    """The fitted tables of a toy shop; read-only."""
    data = toy_dataset(users=12, weeks=20)
    purchases, items = purchases_of(data.events), data.items.set_index("item_id")
    vocabulary = fit_vocabulary(purchases, items)
    return fit(purchases, items, vocabulary, pd.Timestamp("2024-06-01", tz="UTC")), vocabulary


@pytest.fixture(scope="session")
def toy_tables(fitted: Fitted) -> Statistics:
    return fitted[0]


@pytest.fixture
def statistics() -> Statistics:
    """Bread and butter share 4 baskets, bread and jam 2, milk and tea 0."""
    n = 5
    neighbours = np.full((n, 2), -1, np.int32)
    together = np.zeros((n, 2), np.float32)
    neighbours[BREAD], together[BREAD] = [BUTTER, JAM], [4, 2]
    neighbours[BUTTER, 0], together[BUTTER, 0] = BREAD, 4
    neighbours[JAM, 0], together[JAM, 0] = BREAD, 2
    return Statistics(
        item_ids=np.array(["bread", "butter", "jam", "milk", "tea"]),
        categorical=np.array([[1, 1, 1], [2, 2, 1], [2, 2, 1], [3, 3, 2], [4, 4, 2]], np.int32),
        is_private=np.array([0, 1, 0, 0, 1], np.float32),
        price=np.array([2, 3, 4, 1, 5], np.float32),
        discount_ratio=np.zeros(n, np.float32),
        purchases_4w=np.array([8, 4, 2, 6, 1], np.float32),
        purchases_13w=np.full(n, 13, np.float32),
        basket_count=np.array([16, 4, 4, 9, 1], np.float32),
        buyer_count=np.full(n, 3, np.float32),
        repeat_ratio=np.full(n, 0.5, np.float32),
        interval_days=np.full(n, 7, np.float32),
        age_days=np.full(n, 100, np.float32),
        neighbours=neighbours,
        together_count=together,
        type_lift=np.zeros((5, 5), np.float16),
        popular=np.array([BREAD, MILK, BUTTER, JAM, TEA], np.int32),
        store_ids=np.empty(0, "U1"),
        store_popular=np.empty((0, 5), np.int32),
        total_baskets=np.array(20.0),
        fresh=np.arange(n * len(FRESH), dtype=np.float32).reshape(n, -1),
        manufacturer=np.zeros(n, np.int32),
    )


@pytest.fixture
def rows(statistics: Statistics, row_of: Callable[..., UserEvents]) -> Rows:
    """A shopper who bought milk 30 and 10 days ago and tea 10 days ago has bread in the basket."""
    row = row_of([(NOW - 30 * DAY_S, [MILK], 1.0, 0.0), (NOW - 10 * DAY_S, [MILK, TEA], 6.0, 2.0)])
    query = Query(statistics, float(NOW), np.array([BREAD]), 1, User(row, NOW))
    return Rows(query, np.array([BUTTER, JAM, MILK, TEA]))
