"""The towers' arithmetic."""

import pytest
import torch

from components.models.two_tower import QueryTower, TwoTower


@pytest.fixture
def model() -> TwoTower:
    torch.manual_seed(0)
    return TwoTower(torch.tensor([[1, 1, 1], [2, 1, 1], [3, 2, 1]]), [4, 3, 2], dim=7).eval()


def test_the_folded_query_tower_says_the_same(model: TwoTower) -> None:
    inputs = torch.tensor([[1, 2, 0]]), torch.tensor([[0.5, 1.0, 0.0]]), torch.tensor([[3, 0]])
    assert torch.allclose(QueryTower(model)(*inputs), model.query_vectors(model.content(), *inputs))


def test_padding_changes_nothing(model: TwoTower) -> None:
    content = model.content()
    short = model.query_vectors(content, torch.tensor([[1]]), torch.tensor([[0.7]]), torch.tensor([[2]]))
    long = model.query_vectors(
        content, torch.tensor([[1, 0, 0]]), torch.tensor([[0.7, 0, 0]]), torch.tensor([[2, 0]])
    )
    assert torch.allclose(short, long)


def test_nobody_with_an_empty_basket_still_has_a_vector(model: TwoTower) -> None:
    nothing = torch.zeros(1, 3, dtype=torch.long)
    assert torch.isfinite(model.query_vectors(model.content(), nothing, torch.zeros(1, 3), nothing)).all()


def test_the_last_dimension_carries_the_items_bias(model: TwoTower) -> None:
    model.bias.weight.data[2] = 5.0
    content = model.content()
    query = model.query_vectors(content, torch.tensor([[1]]), torch.ones(1, 1), torch.tensor([[0]]))
    assert query[0, -1] == 1
    assert model.item_vectors(content)[2, -1] == 5
