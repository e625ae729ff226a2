"""A graph that answers otherwise than its model is refused; the inputs that trace a ranker."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from components.data.examples import RankerExamples
from components.models.dlrm import Dlrm
from components.models.ranker import CANDIDATE, QUERY, Inputs, Shape
from components.models.sequence import SequenceRanker
from components.ranker.certificate import ParityFailed
from components.ranker.export_ranker import SAMPLE_LISTS, export_ranker, said_of_rows, sample_inputs
from components.ranker.fitting import sample_rows
from feature_repo.schema import DENSE_NAMES

SHAPE = Shape(len(DENSE_NAMES), (61, 10, 6, 4))


class Wavering(Dlrm):
    """Answers otherwise when it is traced: what an exporter that gets something wrong looks like."""

    def logits(self, inputs: Inputs) -> Tensor:
        found = super().logits(inputs)
        return -found if torch.compiler.is_exporting() else found


@pytest.fixture
def data(plant: Callable[..., RankerExamples]) -> RankerExamples:
    return plant(50, 10, seed=4)


def untrained(kind: type[Dlrm], data: RankerExamples) -> Dlrm:
    torch.manual_seed(0)
    model = kind(SHAPE, hidden=8)
    model.fit_scale(sample_rows(data))
    return model.eval()


@pytest.mark.slow
def test_a_graph_that_answers_otherwise_is_refused(
    data: RankerExamples, tmp_path: Path, few_repeats: None
) -> None:
    with pytest.raises(ParityFailed, match=r"export_ranker made .* too far from its parent"):
        export_ranker(untrained(Wavering, data), tmp_path, data)


def test_a_ranker_of_candidates_is_traced_with_rows(data: RankerExamples) -> None:
    inputs, dynamic = sample_inputs(untrained(Dlrm, data), data)
    assert list(inputs) == list(CANDIDATE)
    assert inputs["dense"].shape == (SAMPLE_LISTS * 10, len(DENSE_NAMES))
    assert all(list(dimensions) == [0] for dimensions in dynamic.values())


def test_a_ranker_that_looks_at_the_request_is_traced_with_lists(data: RankerExamples) -> None:
    inputs, dynamic = sample_inputs(SequenceRanker(SHAPE), data)
    assert list(inputs) == [*CANDIDATE, *QUERY]
    assert inputs["dense"].shape == (SAMPLE_LISTS, 10, len(DENSE_NAMES))
    assert {name: list(dimensions) for name, dimensions in dynamic.items()} == {
        **{name: [0, 1] for name in CANDIDATE},
        **{name: [0] for name in QUERY},
    }


def test_one_list_is_traced_as_two(plant: Callable[..., RankerExamples]) -> None:
    """PyTorch takes a dimension of 1 for a constant."""
    inputs, _ = sample_inputs(SequenceRanker(SHAPE), plant(1, 10, seed=4))
    assert inputs["dense"].shape == (2, 10, len(DENSE_NAMES))


def test_what_is_said_of_lists_of_unequal_length_lies_where_their_rows_are(data: RankerExamples) -> None:
    data = replace(data, start=np.array([0, 4, 4, 30, 500]))
    model = untrained(Dlrm, data)
    nothing, codes = torch.empty(0), torch.from_numpy(data.categorical.astype(np.int64))
    with torch.no_grad():
        straight = model.logits(Inputs(torch.from_numpy(data.dense), codes, nothing, nothing, nothing))
    np.testing.assert_allclose(said_of_rows(model.logits, data), straight.numpy(), atol=1e-6)
