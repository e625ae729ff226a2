"""The history is read in its order, padding is not read at all, and the basket counts."""

import pytest
import torch

from components.models.ranker import Inputs, Shape
from components.models.sequence import SequenceRanker
from components.parameters import read_arguments
from feature_repo.schema import HISTORY_LENGTH


@pytest.fixture
def model() -> SequenceRanker:
    torch.manual_seed(0)
    return SequenceRanker(Shape(3, (20, 5, 3, 2)), dim=8, hidden=16).eval()


def padded(history: list[list[float]]) -> torch.Tensor:
    rows = torch.tensor(history)
    return torch.nn.functional.pad(rows, (0, HISTORY_LENGTH - rows.shape[1]))


@pytest.fixture
def given() -> Inputs:
    torch.manual_seed(1)
    return Inputs(
        torch.rand(2, 4, 3),
        torch.randint(1, 2, (2, 4, 4)) + torch.tensor([3, 0, 0, 0]) * torch.arange(4)[None, :, None],
        padded([[3, 5, 7], [9, 0, 0]]),
        padded([[1.0, 2.0, 0.5], [1.0, 0, 0]]),
        torch.tensor([[2, 3, 0], [4, 0, 0]]),
    )


def test_the_length_of_the_history_is_no_parameter() -> None:
    """Examples hold HISTORY_LENGTH items: a training with another length would end at its first batch."""
    with pytest.raises(TypeError, match="SequenceRanker has no parameter 'length'"):
        read_arguments(SequenceRanker, {"length": 32})


def test_padding_is_not_read(model: SequenceRanker, given: Inputs) -> None:
    """Whatever the item of code 0 and the positions behind the history hold."""
    before = model.logits(given)
    with torch.no_grad():
        model.items.weight[0] = 1e3
        model.position.weight[4:] = 1e3
    torch.testing.assert_close(model.logits(given), before)


def test_the_order_of_the_history_counts_and_that_of_the_basket_does_not(
    model: SequenceRanker, given: Inputs
) -> None:
    before = model.logits(given)
    history = given.history.clone()
    history[0, :2] = torch.tensor([5, 3])
    turned = model.logits(given._replace(history=history))
    assert not torch.allclose(turned[0], before[0], atol=1e-6)
    torch.testing.assert_close(turned[1], before[1])
    basket = given.basket[:, [1, 0, 2]]
    torch.testing.assert_close(model.logits(given._replace(basket=basket)), before)


@pytest.mark.parametrize("field", ["history", "history_weight", "basket"])
def test_each_of_the_requests_inputs_counts(model: SequenceRanker, given: Inputs, field: str) -> None:
    other = given._replace(**{field: torch.zeros_like(getattr(given, field))})
    assert not torch.allclose(model.logits(other), model.logits(given), atol=1e-6)


def test_nothing_known_is_finite(model: SequenceRanker, given: Inputs) -> None:
    nothing = Inputs(*(torch.zeros_like(tensor) for tensor in given))
    assert torch.isfinite(model.logits(nothing)).all()
