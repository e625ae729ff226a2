"""The cross layers as the paper writes them."""

import torch
from torch import nn

from components.models.dcn_v2 import DcnV2
from components.models.ranker import Inputs, Shape

NOTHING = torch.empty(0)


def test_a_cross_layer_by_hand() -> None:
    """One layer with U V = identity and no bias: x * x + x."""
    model = DcnV2(Shape(2, (9, 3, 3, 2)), dim=1, hidden=4, crosses=1, rank=5).eval()
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    with torch.no_grad():
        model.down[0].weight.copy_(torch.eye(5))  # type: ignore[operator]
        model.up[0].weight.copy_(torch.eye(5))  # type: ignore[operator]
        model.last.weight[0, :5] = 1.0
    model.slope.fill_(0.0)
    model.shift.copy_(torch.tensor([3.0, -2.0]))
    given = Inputs(torch.rand(1, 2), torch.zeros(1, 4, dtype=torch.long), NOTHING, NOTHING, NOTHING)
    assert model.logits(given).item() == (9 + 3) + (4 - 2)


def test_it_multiplies_features_of_any_degree() -> None:
    """l layers reach degree l + 1: with two, f(2x) / f(x) of a large x is nearly 8."""
    torch.manual_seed(0)
    model = DcnV2(Shape(1, (9, 3, 3, 2)), dim=1, hidden=4, crosses=2, rank=4).eval()
    with torch.no_grad():
        model.last.weight[0, 4:] = 0.0  # without the deep part
    model.slope.fill_(0.0)
    given = Inputs(torch.rand(1, 1), torch.zeros(1, 4, dtype=torch.long), NOTHING, NOTHING, NOTHING)
    found = []
    for value in (1e4, 2e4):
        model.shift.fill_(value)
        found.append(model.logits(given).item())
    assert 7.5 < found[1] / found[0] < 8.5
