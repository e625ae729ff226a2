"""The fitted tables of a toy shop."""

import pandas as pd
import pytest

from components.data.fit_statistics import fit, fit_vocabulary, purchases_of
from feature_repo.statistics import Statistics
from feature_repo.toy_shop import toy_dataset


@pytest.fixture(scope="module")
def statistics() -> Statistics:
    data = toy_dataset(users=12, weeks=20)
    purchases, items = purchases_of(data.events), data.items.set_index("item_id")
    return fit(purchases, items, fit_vocabulary(purchases, items), pd.Timestamp("2024-06-01", tz="UTC"))
