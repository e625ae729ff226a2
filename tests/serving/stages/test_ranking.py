"""The ranker's graph is not called without rows, and its scores are checked."""

import numpy as np
import pytest

from feature_repo.schema import CATEGORICAL, DENSE_NAMES
from serving.errors import ScoresInvalid
from serving.release.bundle import Bundle
from serving.stages.ranking import check_scores, rank


def test_no_candidates_give_no_scores(toy_opened: Bundle) -> None:
    dense = np.empty((0, len(DENSE_NAMES)), np.float32)
    assert rank(toy_opened.ranker, dense, np.empty((0, len(CATEGORICAL)), np.int64)).shape == (0,)


def test_scores_are_one_finite_number_per_candidate() -> None:
    check_scores(np.zeros(2, np.float32), 2)
    with pytest.raises(ValueError, match="expected \\(3,\\)"):
        check_scores(np.zeros(2, np.float32), 3)
    with pytest.raises(ScoresInvalid, match="1 of 2 scores are not finite"):
        check_scores(np.array([0.5, np.nan], np.float32), 2)
