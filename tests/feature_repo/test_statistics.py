"""The tables on disk: they survive a round trip, and a table of another catalogue is refused."""

from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest

from feature_repo.statistics import Statistics, read_statistics, read_vocabulary, write_statistics
from tests.feature_repo.conftest import Fitted


def test_statistics_survive_a_round_trip(tmp_path: Path, fitted: Fitted) -> None:
    statistics, vocabulary = fitted
    write_statistics(tmp_path, statistics, vocabulary)
    found = read_statistics(tmp_path)
    for name in (field.name for field in fields(Statistics)):
        np.testing.assert_array_equal(getattr(found, name), getattr(statistics, name))
    assert read_vocabulary(tmp_path) == vocabulary


def test_codes_follow_the_request_and_leave_out_unknown_ids(
    fitted: Fitted,
) -> None:
    statistics, _ = fitted
    ids = statistics.item_ids.tolist()
    assert statistics.codes([ids[3], "nothing", ids[0], ids[3]]).tolist() == [3, 0, 3]
    assert statistics.codes(()).dtype == np.int64
    assert statistics.store_row == {store: row for row, store in enumerate(statistics.store_ids.tolist())}


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("price", lambda table: table[:3], r"holds float32 of the shape \(3,\), expected f4 of the axes"),
        ("popular", lambda table: table - 1, "holds codes from -1 .*, expected 0 to below 80"),
        ("popular", lambda table: table + 1, "holds codes .* to 80, expected 0 to below 80"),
        ("categorical", lambda table: table + 1, "holds codes from 2 to 9, expected 0 to below 9"),
    ],
    ids=["another catalogue", "a code below 0", "a code beyond the items", "a type without lifts"],
)
def test_a_table_that_does_not_fit_the_others_is_named(
    tmp_path: Path, fitted: Fitted, name: str, change: Callable[[np.ndarray], np.ndarray], message: str
) -> None:
    write_statistics(tmp_path, *fitted)
    np.save(tmp_path / f"{name}.npy", change(getattr(fitted[0], name)))
    with pytest.raises(ValueError, match=rf"{name}\.npy {message}"):
        read_statistics(tmp_path)
