"""The scaling inside the graph and the parts that rankers are built from."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from components.models.ranker import CLIP, Inputs, Ranker, Shape


class Sum(Ranker):
    """The sum of the scaled features, so that everything can be said by hand."""

    def logits(self, inputs: Inputs) -> Tensor:
        return self.scale(inputs.dense).sum(-1)


@pytest.fixture
def sample() -> Tensor:
    rng = np.random.default_rng(0)
    columns = [rng.exponential(5, 4_000), rng.normal(0, 3, 4_000), np.full(4_000, 7.0)]
    return torch.from_numpy(np.column_stack(columns)).float()


@pytest.fixture
def fitted(sample: Tensor) -> Sum:
    model = Sum(Shape(3, (2, 2, 2, 2)))
    model.fit_scale(sample)
    return model


def test_features_are_normalised(fitted: Sum, sample: Tensor) -> None:
    scaled = fitted.scale(sample)
    torch.testing.assert_close(scaled[:, :2].mean(0), torch.zeros(2), atol=0.01, rtol=0)
    torch.testing.assert_close(scaled[:, :2].std(0), torch.ones(2), atol=0.02, rtol=0)


@pytest.mark.parametrize("later", [0.0, -3.0, 7.5, 1e3, 1e9, -1e9])
def test_a_feature_that_was_constant_in_the_sample_counts_for_nothing_later(
    later: float, fitted: Sum, sample: Tensor
) -> None:
    """Without clicks in training, nothing is learnt of them: the first click must not upset the scores."""
    changed = sample[:50].clone()
    changed[:, 2] = later
    codes = torch.zeros(50, 4, dtype=torch.long)
    assert not fitted.scale(sample)[:, 2].any()
    assert torch.equal(fitted.scale(changed), fitted.scale(sample[:50]))
    assert torch.equal(fitted(changed, codes), fitted(sample[:50], codes))


def test_a_feature_that_is_rare_in_the_sample_counts(sample: Tensor) -> None:
    """One click in four thousand is not none."""
    sample[:, 2] = 0
    sample[17, 2] = 1
    model = Sum(Shape(3, (2, 2, 2, 2)))
    model.fit_scale(sample)
    scaled = model.scale(sample)[:, 2]
    assert scaled[17] > scaled[0] + 5
    assert torch.isfinite(scaled).all()


def test_the_scale_by_hand() -> None:
    """exp(1) - 1 and exp(3) - 1: mean 2 and deviation 1 on the log scale."""
    model = Sum(Shape(1, (2, 2, 2, 2)))
    model.fit_scale(torch.tensor([[math.e - 1], [math.e**3 - 1]]).float())
    given = torch.tensor([[math.e**2 - 1], [math.e**3 - 1], [math.e**4 - 1]]).float()
    torch.testing.assert_close(model.scale(given), torch.tensor([[0.0], [1.0], [2.0]]), atol=1e-5, rtol=0)


def test_a_negative_feature_is_moved_up_by_the_least_one() -> None:
    model = Sum(Shape(1, (2, 2, 2, 2)))
    model.fit_scale(torch.tensor([[-4.0], [3.0]]))
    assert model.offset.item() == 5.0
    scaled = model.scale(torch.tensor([[-4.0], [-100.0], [-1e30]]))
    assert torch.isfinite(scaled).all()
    torch.testing.assert_close(scaled[1:], scaled[:1].expand(2, 1))


def test_order_is_kept_and_huge_values_stop_counting(fitted: Sum) -> None:
    values = torch.tensor([0.0, 1.0, 10.0, 100.0])
    scaled = fitted.scale(values[:, None].expand(4, 3))[:, 0]
    assert (scaled.diff() > 0).all()
    huge = fitted.scale(torch.tensor([1e6, 1e9, 3e38])[:, None].expand(3, 3))[:, 0]
    torch.testing.assert_close(huge, torch.full((3,), CLIP), atol=1e-3, rtol=0)


def test_scores_are_calibrated_logits(fitted: Sum) -> None:
    dense, codes = torch.rand(5, 3), torch.zeros(5, 4, dtype=torch.long)
    fitted.calibration.copy_(torch.tensor([2.0, -3.0]))
    expected = torch.sigmoid(2 * fitted.scale(dense).sum(1) - 3)
    torch.testing.assert_close(fitted(dense, codes), expected)
