"""The DLRM's arithmetic; the properties of all rankers are asserted in test_train_ranker.py."""

import pytest
import torch

from components.models.dlrm import Dlrm
from components.models.ranker import Inputs, Shape

NOTHING = torch.empty(0)


def of(dense: torch.Tensor, categorical: torch.Tensor) -> Inputs:
    return Inputs(dense, categorical, NOTHING, NOTHING, NOTHING)


@pytest.fixture
def model() -> Dlrm:
    torch.manual_seed(0)
    return Dlrm(Shape(4, (9, 5, 3, 2)), hidden=16).eval()


def test_interactions_are_the_dot_products_of_each_pair(model: Dlrm) -> None:
    """Written the long way round: each pair of vectors, multiplied and added up."""
    dense, codes = torch.rand(6, 4), torch.tensor([[3, 1, 2, 1]] * 6)
    x = model.scale(dense)
    vectors = [
        model.bottom(x),
        *(table(codes[:, 1 + i]) for i, table in enumerate(model.embeddings)),
    ]
    dots = [(vectors[i] * vectors[j]).sum(1) for i in range(4) for j in range(i + 1, 4)]
    expected = model.top(torch.cat([x, *vectors, torch.stack(dots, 1)], dim=1)).squeeze(1)
    torch.testing.assert_close(model.logits(of(dense, codes)), expected)


@pytest.mark.parametrize("items", [False, True])
def test_items_have_a_table_only_when_asked_for(items: bool) -> None:
    torch.manual_seed(0)
    model = Dlrm(Shape(4, (9, 5, 3, 2)), hidden=16, items=items).eval()
    assert len(model.embeddings) == 3 + items
    dense, codes = torch.rand(1, 4).repeat(2, 1), torch.tensor([[1, 1, 1, 1], [8, 1, 1, 1]])
    scores = model.logits(of(dense, codes))
    assert torch.equal(scores[0], scores[1]) is not items
