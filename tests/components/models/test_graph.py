"""Smoothing by hand on three items, and the lookup at inference."""

import numpy as np
import pytest
import torch

from components.models.graph import GraphRanker
from components.models.ranker import Inputs, Shape


@pytest.fixture
def model() -> GraphRanker:
    """Items 1 and 2 are each other's neighbours, item 3 has none."""
    torch.manual_seed(0)
    made = GraphRanker(Shape(3, (4, 5, 3, 2)), dim=4, hidden=16, layers=2, degree=2)
    neighbours = np.array([[0, 0], [2, 0], [1, 0], [0, 0]])
    weights = np.array([[0, 0], [1, 0], [1, 0], [0, 0]], np.float32)
    made.set_graph(neighbours, weights)
    return made.eval()


@pytest.fixture
def given() -> Inputs:
    return Inputs(
        torch.rand(1, 2, 3),
        torch.tensor([[[1, 1, 1, 1], [2, 1, 1, 1]]]),
        torch.tensor([[3, 0]]),
        torch.tensor([[2.0, 0.0]]),
        torch.tensor([[2, 0]]),
    )


def test_smoothing_is_the_mean_over_the_layers(model: GraphRanker) -> None:
    own = model.items.weight
    expected = torch.stack([own[0], 2 * own[1] + own[2], own[1] + 2 * own[2], own[3]]) / 3
    torch.testing.assert_close(model.smoothed(), expected)


def test_the_lookup_returns_the_smoothed_vectors(model: GraphRanker, given: Inputs) -> None:
    torch.testing.assert_close(model.frozen, model.smoothed())
    used = model.logits(given)
    model.train()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.eval()
    torch.testing.assert_close(model.logits(given), used)


def test_gradients_reach_the_neighbours(model: GraphRanker, given: Inputs) -> None:
    """Item 1 is scored; item 2, its neighbour, learns from it."""
    one = given._replace(
        categorical=given.categorical[:, :1], dense=given.dense[:, :1], basket=torch.zeros(1, 2).long()
    )
    model.train().logits(one).sum().backward()
    gradient = model.items.weight.grad
    assert gradient is not None
    assert gradient[2].abs().max() > 0


def test_a_wider_graph_is_cut_to_the_degree(model: GraphRanker) -> None:
    wide = np.tile(np.array([[1, 2, 3]]), (4, 1))
    model.set_graph(wide, np.full((4, 3), 1 / 3, np.float32))
    assert model.neighbours.tolist() == [[1, 2]] * 4


@pytest.mark.parametrize("field", ["history", "basket"])
def test_each_of_the_requests_inputs_counts(model: GraphRanker, given: Inputs, field: str) -> None:
    other = given._replace(**{field: torch.ones_like(getattr(given, field))})
    assert not torch.allclose(model.logits(other), model.logits(given), atol=1e-7)
