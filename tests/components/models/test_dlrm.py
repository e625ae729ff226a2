"""The ranker's arithmetic."""

import pytest
import torch

from components.models.dlrm import Dlrm


@pytest.fixture
def model() -> Dlrm:
    torch.manual_seed(0)
    return Dlrm(dense=4, cardinality=[5, 3, 2]).eval()


def test_scores_are_calibrated_logits(model: Dlrm) -> None:
    dense, categorical = torch.randn(6, 4), torch.tensor([[1, 2, 1]] * 6)
    model.calibration.copy_(torch.tensor([2.0, -3.0]))
    expected = torch.sigmoid(2 * model.logits(dense, categorical) - 3)
    assert torch.allclose(model(dense, categorical), expected)


def test_a_row_scores_the_same_alone_and_beside_a_wild_one(model: Dlrm) -> None:
    dense, categorical = torch.randn(8, 4), torch.randint(0, 2, (8, 3))
    alone = model(dense[:1], categorical[:1])
    dense[1:] = 1e9
    assert torch.allclose(model(dense, categorical)[:1], alone, atol=1e-6)


def test_a_huge_feature_is_clipped(model: Dlrm) -> None:
    zeros = torch.zeros(1, 3, dtype=torch.long)
    scores = [model(torch.full((1, 4), value), zeros) for value in (1e6, 1e9)]
    assert torch.equal(*scores)
