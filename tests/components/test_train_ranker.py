"""Loss and calibration by hand; the training itself is judged in tests/test_loop.py."""

import numpy as np
import pytest
import torch

from components.examples import RankerExamples
from components.models.dlrm import Dlrm
from components.train_ranker import _calibrate, _loss, _pad


def test_loss_by_hand() -> None:
    logits = torch.tensor([[0.0, np.log(3.0), 99.0]])
    there = torch.tensor([[True, True, False]])
    label = torch.tensor([[0, 1, 0]])
    listwise = -np.log(3 / 4)
    pointwise = (np.log(2) + np.log(4 / 3)) / 2
    assert _loss(logits, label, there, 0.1).item() == pytest.approx(listwise + 0.1 * pointwise)


def test_lists_of_different_length_are_padded() -> None:
    rows, there = _pad(np.array([0, 2, 5]), np.array([0, 1]))
    assert rows.tolist() == [[0, 1, 0], [2, 3, 4]]
    assert there.tolist() == [[True, True, False], [True, True, True]]


def test_calibration_finds_the_purchase_rate() -> None:
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    model = Dlrm(2, [2, 2, 2]).eval()
    dense = rng.normal(size=(20_000, 2)).astype(np.float32)
    label = (rng.random(20_000) < 0.03).astype(np.int8)
    data = RankerExamples(dense, np.zeros((20_000, 3), np.int32), label, np.array([0, 20_000]))
    result = _calibrate(model, data)
    assert result["calibration_mean_probability"] == pytest.approx(label.mean(), rel=1e-3)
    with torch.no_grad():
        served = model(torch.from_numpy(dense), torch.zeros(20_000, 3, dtype=torch.long))
    assert served.mean().item() == pytest.approx(label.mean(), rel=1e-3)


def test_without_purchases_probabilities_stay_as_trained() -> None:
    model = Dlrm(2, [2, 2, 2])
    empty = RankerExamples(
        np.empty((0, 2), np.float32), np.empty((0, 3), np.int32), np.empty(0, np.int8), np.zeros(1, np.int64)
    )
    assert _calibrate(model, empty)["calibration_slope"] == 1.0
