"""Candidates' features -> purchase probabilities, through ONNX Runtime."""

from __future__ import annotations

import numpy as np
import onnxruntime as ort


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
