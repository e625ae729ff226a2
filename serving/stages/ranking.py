"""Candidates' features -> purchase probabilities, through ONNX Runtime."""

from __future__ import annotations

import math

import numpy as np

from serving.errors import ScoresInvalid
from serving.stages.onnx_runtime import ort


def rank(session: ort.InferenceSession, dense: np.ndarray, categorical: np.ndarray) -> np.ndarray:
    """Return one purchase probability per row, (n,) float32.

    Args:
        session: the bundle's ranker.
        dense: (n, features) float32.
        categorical: (n, 4) int64, every code inside its vocabulary.
    """
    if len(dense) == 0:
        return np.empty(0, np.float32)
    scores: np.ndarray = session.run(["score"], {"dense": dense, "categorical": categorical})[0]
    return scores


def check_scores(scores: np.ndarray, candidates: int) -> None:
    """Check that there is one finite score per candidate, from whichever ranker.

    Raises:
        ScoresInvalid: a score is not finite.
        ValueError: there are more or fewer scores than candidates.
    """
    if scores.shape != (candidates,):
        raise ValueError(f"scores of shape {scores.shape}, expected {(candidates,)}")
    # One number that is not finite makes the sum so, and a sum costs half of a test of each.
    if not math.isfinite(scores.sum()):
        raise ScoresInvalid(
            f"{int((~np.isfinite(scores)).sum())} of {len(scores)} scores are not finite: look at the "
            "request's features, and at the bundle if other requests fail alike"
        )
