"""Wide and deep are added; the wide part memorises levels and is linear in features and squares."""

import torch
from torch import nn

from components.models.ranker import Inputs, Shape
from components.models.wide_deep import WideDeep

NOTHING = torch.empty(0)


def test_the_wide_part_by_hand() -> None:
    model = WideDeep(Shape(2, (9, 3, 3, 2)), hidden=8).eval()
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    with torch.no_grad():
        model.wide.weight.copy_(torch.tensor([[1.0, 2.0, 10.0, 20.0]]))
        model.wide.bias.fill_(0.5)
        model.weights[1].weight[2] = 100.0  # type: ignore[operator]
    model.slope.fill_(0.0)  # the scaled features are the shift
    model.shift.copy_(torch.tensor([3.0, -1.0]))
    given = Inputs(torch.rand(2, 2), torch.tensor([[1, 1, 2, 1], [1, 1, 1, 1]]), NOTHING, NOTHING, NOTHING)
    by_features = 1 * 3 + 2 * -1 + 10 * 9 + 20 * 1 + 0.5
    torch.testing.assert_close(model.logits(given), torch.tensor([by_features + 100, by_features]))
