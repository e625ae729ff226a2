"""The towers' arithmetic; test_build_index.py compares the query tower that is exported."""

import pytest
import torch

from components.models.two_tower import TwoTower


@pytest.fixture
def model() -> TwoTower:
    torch.manual_seed(0)
    return TwoTower(torch.tensor([[1, 1, 1], [2, 1, 1], [3, 2, 1]]), [4, 3, 2], dim=7).eval()


def test_padding_changes_nothing(model: TwoTower) -> None:
    content = model.content(model.every)
    short = model.query_vectors(content, torch.tensor([[1]]), torch.tensor([[0.7]]), torch.tensor([[2]]))
    long = model.query_vectors(
        content, torch.tensor([[1, 0, 0]]), torch.tensor([[0.7, 0, 0]]), torch.tensor([[2, 0]])
    )
    assert torch.allclose(short, long)


def test_the_last_dimension_carries_the_items_bias(model: TwoTower) -> None:
    model.bias.weight.data[2] = 5.0
    content = model.content(model.every)
    query = model.query_vectors(content, torch.tensor([[1]]), torch.ones(1, 1), torch.tensor([[0]]))
    assert query[0, -1] == 1
    assert model.item_vectors(content, model.every)[2, -1] == 5


def test_some_items_have_the_vectors_that_they_have_among_all(model: TwoTower) -> None:
    some = torch.tensor([0, 3, 1])
    torch.testing.assert_close(model.content(some), model.content(model.every)[some])
    vectors = model.item_vectors(model.content(model.every), model.every)
    torch.testing.assert_close(model.item_vectors(model.content(some), some), vectors[some])
    assert not model.content(some)[0].any()  # padding
