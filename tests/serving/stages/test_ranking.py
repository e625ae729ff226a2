"""The ranker's graph gives one probability per row and is not called without rows."""

from pathlib import Path

import numpy as np
import pytest

from feature_repo.schema import CATEGORICAL, DENSE_NAMES
from serving.errors import ScoresInvalid
from serving.release.bundle import load_bundle
from serving.stages.ranking import check_scores, rank


@pytest.mark.slow
def test_each_row_gets_one_probability_independent_of_other_rows(toy_line: Path) -> None:
    ranker = load_bundle(toy_line / "bundle").ranker
    dense = np.random.default_rng(0).random((7, len(DENSE_NAMES)), np.float32)
    categorical = np.ones((7, len(CATEGORICAL)), np.int64)
    together = rank(ranker, dense, categorical)
    assert together.shape == (7,)
    assert together.dtype == np.float32
    assert ((together > 0) & (together < 1)).all()
    alone = np.concatenate([rank(ranker, dense[i : i + 1], categorical[i : i + 1]) for i in range(7)])
    np.testing.assert_allclose(together, alone, atol=1e-6)


@pytest.mark.slow
def test_no_candidates_give_no_scores(toy_line: Path) -> None:
    ranker = load_bundle(toy_line / "bundle").ranker
    dense, categorical = (
        np.empty((0, len(DENSE_NAMES)), np.float32),
        np.empty((0, len(CATEGORICAL)), np.int64),
    )
    scores = rank(ranker, dense, categorical)
    assert scores.shape == (0,)


def test_scores_are_one_finite_number_per_candidate() -> None:
    check_scores(np.zeros(2, np.float32), 2)
    with pytest.raises(ValueError, match="expected \\(3,\\)"):
        check_scores(np.zeros(2, np.float32), 3)
    with pytest.raises(ScoresInvalid, match="1 of 2 scores are not finite"):
        check_scores(np.array([0.5, np.nan], np.float32), 2)
