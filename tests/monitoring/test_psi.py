from collections.abc import Sequence

import numpy as np
import pandas as pd
import pytest

from monitoring.psi import (
    MOST_LEVELS,
    NEW,
    RARE,
    Draws,
    Histogram,
    encode,
    missing_share,
    psi,
    smoothed,
)


def histogram(current: Sequence[object], reference: Sequence[object]) -> Histogram:
    return encode(pd.Series(current), pd.Series(reference)).histogram("x")


def test_psi_and_kl_follow_their_definitions() -> None:
    found = Histogram("x", ("a", "b"), np.array([300, 700]), np.array([500, 500]))
    assert found.psi() == pytest.approx((0.3 - 0.5) * np.log(0.3 / 0.5) + (0.7 - 0.5) * np.log(0.7 / 0.5))
    assert found.kl() == pytest.approx(0.3 * np.log(0.3 / 0.5) + 0.7 * np.log(0.7 / 0.5))


def test_psi_is_zero_for_equal_shares_and_the_same_in_both_directions() -> None:
    a, b = np.array([10, 20, 70]), np.array([300, 100, 100])
    assert psi(a, a * 7) == 0
    assert psi(a, b) == pytest.approx(psi(b, a))


def test_a_level_that_is_absent_counts_a_little_and_never_makes_psi_infinite() -> None:
    assert smoothed(np.array([0, 100_000])).tolist() == [10, 100_000]
    assert smoothed(np.array([0, 50])).tolist() == [1, 50]
    assert psi(np.array([0, 1000]), np.array([100, 900])) < 1


def test_numbers_fall_into_deciles_of_the_reference() -> None:
    codes = encode(pd.Series([1.0, 50.0, 1000.0, -3.0]), pd.Series(np.arange(1, 101.0)))
    assert codes.labels[:3] == ("below 1", "1 to 10", "10 to 20")
    assert codes.current.tolist() == [1, 5, 11, 0]
    assert codes.histogram("x").reference.tolist() == [0, *[10] * 10, 0]


def test_a_bin_of_one_value_is_named_by_it() -> None:
    column = pd.Series([*[0.0] * 40, *range(1, 101)])
    assert encode(column, column).labels[:3] == ("below 0", "0", "0 to 2")


def test_one_outlier_does_not_decide() -> None:
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=5_000), rng.normal(size=5_000)
    calm = encode(pd.Series(a), pd.Series(b)).histogram("x").psi()
    assert encode(pd.Series([*a, 1e12]), pd.Series(b)).histogram("x").psi() == pytest.approx(calm, abs=0.002)


def test_a_number_with_few_values_gets_a_bin_for_each() -> None:
    found = histogram([0.0, 1.0, 1.0, 7.0], [0.0, 1.0, 3.0, 3.0])
    assert found.labels == ("below 0", "0", "1", "3", "above 3")
    assert found.current.tolist() == [0, 1, 2, 0, 1]


def test_a_constant_that_changes_is_detected() -> None:
    assert histogram([2.0] * 500, [1.0] * 500).psi() > 1
    assert histogram([1.0] * 500, [1.0] * 500).psi() == 0


@pytest.mark.parametrize("broken", [np.nan, np.inf, -np.inf, None])
def test_a_number_that_is_not_finite_is_missing(broken: float | None) -> None:
    column = pd.Series([1.0, broken, 2.0, broken])
    assert missing_share(column, pd.Series([1.0])) == 0.5
    assert encode(column, pd.Series([1.0, 2.0])).current.tolist()[1] == -1


def test_levels_are_named_and_empty_text_is_missing() -> None:
    found = histogram(["a", "a", "", "z", None], ["a", "b", "b", "", None])
    counts = dict(zip(found.labels, zip(found.current, found.reference, strict=True), strict=True))
    assert counts == {"b": (0, 2), "a": (2, 1), RARE: (0, 0), NEW: (1, 0)}
    assert missing_share(pd.Series(["a", "", None, pd.NA]), pd.Series(["a"])) == 0.75


def test_levels_beyond_the_limit_count_together() -> None:
    many = [f"level {n}" for n in range(MOST_LEVELS + 100)]
    found = histogram(many, many + many[:MOST_LEVELS])
    assert len(found.labels) == MOST_LEVELS + 1
    assert (found.labels[-1], found.current[-1], found.reference[-1]) == (RARE, 100, 100)
    assert found.psi() < 0.1


def test_true_and_false_are_levels() -> None:
    found = encode(pd.Series([True, False]), pd.Series([True, True])).histogram("x")
    assert set(found.labels) == {"True", RARE, NEW}


def test_the_bins_that_moved_most_come_first() -> None:
    found = histogram(["a"] * 50 + ["b"] * 50, ["a"] * 49 + ["b"] * 31 + ["c"] * 20)
    assert [label for label, _, _ in found.moved(2)] == ["c", "b"]


def test_the_noise_equals_the_psi_of_two_fresh_samples() -> None:
    """Baskets of five equal lines: drawing lines instead of baskets would give a fifth of the noise."""
    rng = np.random.default_rng(3)

    def sample(baskets: int) -> np.ndarray:
        return np.repeat(rng.integers(0, 10, baskets), 5).astype(np.int32)

    reference = sample(4_000)
    mean, spread = Draws.of(np.arange(len(reference)) // 5, 1_000).noise(reference, 10)
    fresh = [
        psi(np.bincount(sample(1_000), minlength=10), np.bincount(reference, minlength=10))
        for _ in range(100)
    ]
    assert mean == pytest.approx(np.mean(fresh), rel=0.25)
    assert spread == pytest.approx(np.std(fresh), rel=0.5)
    # Two independent samples of n and N units differ by (bins - 1) (1/n + 1/N).
    assert mean == pytest.approx(9 * (1 / 1_000 + 1 / 4_000), rel=0.25)
