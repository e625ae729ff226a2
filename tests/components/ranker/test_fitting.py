"""Padding and losses by hand; padded rows teach nothing; a teacher can overrule purchases."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from components.data.examples import RankerExamples
from components.hyper_parameters import RankerParams
from components.models.dlrm import Dlrm
from components.models.ranker import CANDIDATE, QUERY, Shape
from components.ranker.fitting import Soft, fit, hard_loss, inputs_of, sample_rows, soft_loss
from feature_repo.schema import DENSE_NAMES

TRAINING = RankerParams(epochs=4, batch_size=16, learning_rate=1e-2)
SHAPE = Shape(len(DENSE_NAMES), (61, 10, 6, 4))


def test_loss_by_hand() -> None:
    logits = torch.tensor([[0.0, np.log(3.0), 99.0]])
    there = torch.tensor([[True, True, False]])
    label = torch.tensor([[0, 1, 0]])
    listwise = -np.log(3 / 4)
    pointwise = (np.log(2) + np.log(4 / 3)) / 2
    assert hard_loss(logits, label, there, 0.1).item() == pytest.approx(listwise + 0.1 * pointwise)


def test_the_purchases_of_a_list_share_its_target() -> None:
    logits = torch.tensor([[np.log(1.0), np.log(2.0), np.log(5.0)]]).float()
    there = torch.ones(1, 3, dtype=torch.bool)
    found = hard_loss(logits, torch.tensor([[1, 1, 0]]), there, 0.0)
    assert found.item() == pytest.approx(-(np.log(1 / 8) + np.log(2 / 8)) / 2)


def test_soft_loss_by_hand() -> None:
    """Student 1 : 3, teacher 1 : 1; padding counts on neither side."""
    logits = torch.tensor([[0.0, np.log(3.0), 50.0]]).float()
    taught = torch.tensor([[2.0, 2.0, -50.0]])
    there = torch.tensor([[True, True, False]])
    expected = -(np.log(1 / 4) + np.log(3 / 4)) / 2
    assert soft_loss(logits, taught, there, 1.0).item() == pytest.approx(expected)


def test_temperature_softens_both_sides() -> None:
    """At temperature 2 the logits log 9 and log 1 are as log 3 and log 1 were."""
    logits, taught = torch.tensor([[np.log(9.0), 0.0]]).float(), torch.tensor([[0.0, np.log(4.0)]]).float()
    expected = -(1 / 3 * np.log(3 / 4) + 2 / 3 * np.log(1 / 4))
    there = torch.ones(1, 2, dtype=torch.bool)
    assert soft_loss(logits, taught, there, 2.0).item() == pytest.approx(2.0**2 * expected)


def test_an_agreeing_student_has_the_least_soft_loss() -> None:
    taught, there = torch.tensor([[2.0, 0.0, -1.0]]), torch.ones(1, 3, dtype=torch.bool)
    logits = taught.clone().requires_grad_()
    soft_loss(logits, taught, there, 1.0).backward()
    assert logits.grad is not None
    torch.testing.assert_close(logits.grad, torch.zeros(1, 3), atol=1e-6, rtol=0)


def test_inputs_are_those_of_the_lists_asked_for(plant: Callable[..., RankerExamples]) -> None:
    data = replace(plant(3, 4, seed=0), start=np.array([0, 2, 9, 12]))
    inputs, rows, there = inputs_of(data, np.array([2, 0]))
    assert rows.tolist() == [[9, 10, 11], [0, 1, 0]]
    assert there.sum().item() == 5
    np.testing.assert_array_equal(inputs.dense.numpy(), data.dense[rows])
    np.testing.assert_array_equal(inputs.categorical.numpy(), data.categorical[rows])
    np.testing.assert_array_equal(inputs.history.numpy(), data.history[[2, 0]])
    np.testing.assert_array_equal(inputs.basket.numpy(), data.basket[[2, 0]])
    assert inputs.history_weight.dtype == torch.float32
    alone, _, _ = inputs_of(data, np.array([2, 0]), alone=True)
    np.testing.assert_array_equal(alone.dense.numpy(), data.dense[[9, 10, 11, 0, 1]])
    np.testing.assert_array_equal(alone.categorical.numpy(), data.categorical[[9, 10, 11, 0, 1]])


@pytest.mark.parametrize("soft", [False, True])
def test_padded_rows_change_neither_loss_nor_gradient(
    plant: Callable[..., RankerExamples], soft: bool
) -> None:
    """A short list, alone and beside a long one that pads it."""
    torch.manual_seed(0)
    data = replace(plant(2, 8, seed=0, always=True), start=np.array([0, 5, 16]))
    model = Dlrm(SHAPE, hidden=8).eval()
    model.fit_scale(sample_rows(data))

    def gradient(lists: list[int], first_only: bool) -> torch.Tensor:
        inputs, rows, there = inputs_of(data, np.array(lists))
        logits = model.logits(inputs)
        label = torch.from_numpy(data.label[rows]) * there
        if first_only:  # the long list is left out, its padding of the short one stays
            logits, label, there, rows = logits[:1], label[:1], there[:1], rows[:1]
        taught = torch.from_numpy(data.dense[rows][..., 0])
        loss = soft_loss(logits, taught, there, 1.0) if soft else hard_loss(logits, label, there, 0.3)
        model.zero_grad()
        loss.backward()
        grown = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
        return torch.cat([loss.detach().view(1), *grown])

    torch.testing.assert_close(gradient([0, 1], True), gradient([0], False))


def test_a_ranker_learns_the_same_whether_its_batches_are_padded_or_not(
    plant: Callable[..., RankerExamples],
) -> None:
    data = replace(plant(6, 8, seed=0, always=True), start=np.array([0, 5, 16, 20, 31, 48]))
    soft = Soft(data.dense[:, 0].copy(), 0.5, 1.0)

    class Padded(Dlrm):
        uses = CANDIDATE + QUERY  # one that looks at the request gets its lists padded

    def learnt(kind: type[Dlrm]) -> torch.Tensor:
        torch.manual_seed(0)
        model = kind(SHAPE, hidden=8)
        model.fit_scale(sample_rows(data))
        fit(model, data, RankerParams(batch_size=2, epochs=1, learning_rate=1e-2), soft)
        return torch.cat([weight.flatten() for weight in model.parameters()])

    torch.testing.assert_close(learnt(Dlrm), learnt(Padded), rtol=1e-3, atol=1e-4)


def test_few_lists_are_passed_until_the_least_number_of_steps(
    plant: Callable[..., RankerExamples], monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[int] = []
    step = torch.optim.AdamW.step

    def counted(self: torch.optim.AdamW) -> None:
        steps.append(1)
        step(self)

    monkeypatch.setattr(torch.optim.AdamW, "step", counted)
    model, data = Dlrm(SHAPE, hidden=16), plant(300, 15, seed=1, always=True)
    fit(model, data, TRAINING)
    assert len(steps) == 16 * 19  # 4 passes were asked for; 16 are the first with LEAST_STEPS


def test_a_teacher_with_all_the_weight_overrules_purchases(
    plant: Callable[..., RankerExamples],
) -> None:
    torch.manual_seed(0)
    data = plant(300, 15, seed=1, always=True)
    contrary = -4 * data.label.astype(np.float32)
    model = Dlrm(SHAPE, hidden=16)
    model.fit_scale(sample_rows(data))
    fit(model, data, TRAINING, Soft(contrary, 1.0, 1.0))
    inputs, rows, _ = inputs_of(data, np.arange(300))
    with torch.no_grad():
        logits = model.eval().logits(inputs).numpy()
    bought = data.label[rows] == 1
    assert logits[bought].mean() < logits[~bought].mean()


def test_rows_are_sampled_over_all_lists(plant: Callable[..., RankerExamples]) -> None:
    data = plant(4, 5, seed=0)
    np.testing.assert_array_equal(sample_rows(data).numpy(), data.dense)
