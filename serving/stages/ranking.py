"""Candidates' features -> purchase probabilities, through ONNX Runtime."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnxruntime as ort

from serving.errors import ScoresInvalid

Inputs = tuple[np.ndarray, np.ndarray]  # of one request: (n, features) float32, (n, 4) int64


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


def rank_joined(session: ort.InferenceSession, requests: Sequence[Inputs]) -> list[np.ndarray | Exception]:
    """Return the scores of each request, (n_i,) float32, out of one call for the rows of all.

    Whose scores are not finite gets `ScoresInvalid` in their place; the others' are their own.

    Args:
        session: the bundle's ranker.
        requests: dense and categorical rows of each, as `rank` takes them; any of them may have none.
    """
    if len(requests) == 1:
        return [_checked(rank(session, *requests[0]))]  # nothing to copy
    dense, categorical = (np.concatenate(columns) for columns in zip(*requests, strict=True))
    ends = np.cumsum([len(dense) for dense, _ in requests])[:-1]
    return [_checked(scores) for scores in np.split(rank(session, dense, categorical), ends)]


def _checked(scores: np.ndarray) -> np.ndarray | Exception:
    if np.isfinite(scores).all():
        return scores
    return ScoresInvalid(
        f"{int((~np.isfinite(scores)).sum())} of {len(scores)} scores are not finite: look at the request's "
        "features, and at the bundle if other requests fail alike"
    )
