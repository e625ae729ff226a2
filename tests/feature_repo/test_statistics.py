"""The tables on disk: they survive a round trip, and a table of another catalogue is refused."""

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


def test_a_table_of_another_catalogue_is_named(tmp_path: Path, fitted: Fitted) -> None:
    write_statistics(tmp_path, *fitted)
    np.save(tmp_path / "price.npy", np.zeros(3, np.float32))
    with pytest.raises(
        ValueError, match=r"price.npy holds float32 of the shape \(3,\), expected f4 of the axes"
    ):
        read_statistics(tmp_path)


@pytest.mark.parametrize("code", [-1, 5])
def test_best_sellers_that_are_no_items_are_named(tmp_path: Path, statistics: Statistics, code: int) -> None:
    write_statistics(tmp_path, statistics, {})
    np.save(tmp_path / "popular.npy", np.array([0, code], np.int32))
    with pytest.raises(ValueError, match=r"popular.npy holds codes .*, expected 0 to below 5"):
        read_statistics(tmp_path)


def test_a_table_of_lifts_that_lacks_a_type_is_named(tmp_path: Path, fitted: Fitted) -> None:
    statistics, vocabulary = fitted
    write_statistics(tmp_path, statistics, vocabulary)
    np.save(tmp_path / "type_lift.npy", statistics.type_lift[:-1, :-1])
    with pytest.raises(ValueError, match=r"categorical.npy holds codes from 1 to 8, expected 0 to below 8"):
        read_statistics(tmp_path)
