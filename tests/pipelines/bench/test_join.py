"""Both joins are asked for the same moments and know the same of them."""

from pathlib import Path

import pytest

from feature_repo.toy_shop import toy_dataset
from pipelines.bench.join import bench_join


@pytest.mark.slow
def test_ours_and_feasts_join_agree(tmp_path: Path) -> None:
    events = toy_dataset(users=6, weeks=8).events
    found = bench_join(events, tmp_path)
    baskets = events.groupby(["user_id", "at"]).ngroups
    assert found["rows"] == baskets
    assert found["compared"] == baskets - 6, "of a first basket Feast knows no row"
    assert found["differences"] == 0
    assert found["ours"]["seconds"] > 0
    assert found["ours"]["mib"] > 0
    assert found["feast"]["seconds"] > 0
