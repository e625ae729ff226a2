"""Dead units go first without changing a score, and the pruned graph is really smaller."""

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from torch import Tensor, nn

from components.compression.prune_ranker import MULTIPLE, prune_ranker, smaller
from components.data.examples import RankerExamples, read_ranker_examples
from components.models.dlrm import Dlrm
from components.models.ranker import Shape
from components.ranker.certificate import check_chain
from components.ranker.distill_ranker import TAUGHT
from components.ranker.fitting import inputs_of, sample_rows
from components.ranker.ranker_artefact import RankerArtefact, read_ranker
from components.ranker.scoring import OnnxRanker
from components.ranker.train_ranker import load_ranker
from feature_repo.schema import DENSE_NAMES

SHAPE = Shape(len(DENSE_NAMES), (61, 10, 6, 4))
TUNING = {"ratios": [0.25, 0.5], "batch_size": 16, "learning_rate": 0.005}


def artefact_of(hidden: int) -> RankerArtefact:
    """What a student of this width says of itself."""
    shape = {"dense": SHAPE.dense, "cardinality": list(SHAPE.cardinality)}
    return RankerArtefact(Path(), {"model": "dlrm", "size": {"hidden": hidden}, "shape": shape}, [])


def layers(model: nn.Module) -> list[tuple[int, int]]:
    return [(m.in_features, m.out_features) for m in model.modules() if isinstance(m, nn.Linear)]


def logits(model: Dlrm, data: RankerExamples) -> Tensor:
    with torch.no_grad():
        return model.eval().logits(inputs_of(data, np.arange(len(data.start) - 1))[0])


@pytest.fixture
def model(plant: Callable[..., RankerExamples]) -> Dlrm:
    torch.manual_seed(0)
    made = Dlrm(SHAPE, hidden=32)
    made.fit_scale(sample_rows(plant(20, 10, seed=7)))
    return made


@pytest.mark.parametrize("side", ["in", "out"])
def test_dead_units_go_and_the_function_stays(
    model: Dlrm, plant: Callable[..., RankerExamples], side: str
) -> None:
    """Half the units of each layer have zero inputs, so SiLU(0) = 0, or zero outputs."""
    data = plant(20, 10, seed=7)
    silent = torch.randperm(32)[:16]
    with torch.no_grad():
        for block in (model.bottom, model.top):
            linear = [layer for layer in block if isinstance(layer, nn.Linear)]
            for first, second in pairwise(linear):
                if side == "in":
                    first.weight[silent] = 0.0
                    first.bias[silent] = 0.0
                else:
                    second.weight[:, silent] = 0.0
    before = logits(model, data)
    small, size = smaller(model, artefact_of(32), 0.5)
    assert isinstance(small, Dlrm)
    assert size["hidden"] == 16
    assert layers(small)[0] == (SHAPE.dense, 16)
    torch.testing.assert_close(logits(small, data), before, atol=1e-5, rtol=1e-4)


def test_the_strongest_units_are_kept_in_their_order(model: Dlrm) -> None:
    """The product of incoming and outgoing weights counts, not one of them."""
    with torch.no_grad():
        into, out = model.bottom[0].weight, model.bottom[3].weight
        assert isinstance(into, Tensor)
        assert isinstance(out, Tensor)
        into.fill_(1.0)
        out.fill_(1.0)
        loud_but_unheard, strong = slice(0, 8), [9, 11, 20, 21, 22, 23, 30, 31]
        into[loud_but_unheard], out[:, loud_but_unheard] = 100.0, 1e-6
        into[strong] = torch.arange(2.0, 10.0)[:, None]
    small, _ = smaller(model, artefact_of(32), 0.75)
    assert isinstance(small, Dlrm)
    kept = small.bottom[0].weight
    assert isinstance(kept, Tensor)
    assert kept[:, 0].tolist() == list(range(2, 10))


@pytest.mark.parametrize(
    ("hidden", "ratio", "left"), [(32, 0.5, 16), (128, 0.3, 88), (128, 0.7, 40), (16, 0.9, MULTIPLE)]
)
def test_widths_are_those_that_processors_like(hidden: int, ratio: float, left: int) -> None:
    small, size = smaller(Dlrm(SHAPE, hidden=hidden), artefact_of(hidden), ratio)
    assert size == {"hidden": left}
    assert layers(small) == [
        (SHAPE.dense, left),
        (left, 8),
        (SHAPE.dense + 4 * 8 + 6, left),
        (left, left),
        (left, 1),
    ]


def parameters(artefact: RankerArtefact) -> int:
    """How many numbers the matrices of a graph hold."""
    model = onnx.load(artefact.graph)
    return sum(int(np.prod(t.dims)) for t in model.graph.initializer if len(t.dims) == 2)


@pytest.fixture(scope="module")
def pruned(student: Path, shop: Path, few_repeats: None) -> tuple[Path, dict[str, Any]]:
    place = shop / "pruned"
    return place, prune_ranker(shop / "examples", student, place, TUNING)


@pytest.mark.slow
def test_the_smallest_within_its_tolerance_is_kept(
    pruned: tuple[Path, dict[str, Any]], student: Path
) -> None:
    """No smaller cut is tuned after the first that holds."""
    place, told = pruned
    table = json.loads((place / "table.json").read_text())
    held = [float(ratio) for ratio, row in table.items() if not row["outside_tolerance"]]
    assert held == [told["pruned_ratio"]]
    assert set(table) == ({"0.5"} if told["pruned_ratio"] == 0.5 else {"0.5", "0.25"})
    assert read_ranker(place).manifest["size"]["hidden"] == {0.25: 24, 0.5: 16}[told["pruned_ratio"]]


@pytest.mark.slow
def test_a_pruned_ranker_is_really_smaller_and_can_be_gone_on_from(
    pruned: tuple[Path, dict[str, Any]], student: Path, shop: Path
) -> None:
    whole, small = read_ranker(student), read_ranker(pruned[0])
    assert parameters(small) < 0.8 * parameters(whole)
    assert small.graph.stat().st_size < 0.9 * whole.graph.stat().st_size
    held_out = read_ranker_examples(shop / "examples", "calibration")
    with torch.no_grad():
        inputs, rows, _ = inputs_of(held_out, np.arange(300))
        straight = load_ranker(small)(*inputs).numpy()
    np.testing.assert_allclose(OnnxRanker(small.graph).scores(held_out)[rows], straight, atol=1e-5)
    assert len(np.load(small.path / TAUGHT)) == len(read_ranker_examples(shop / "examples", "train").label)
    assert small.certificates[:-1] == whole.certificates
    assert small.certificates[-1]["parents"] == [whole.id] == small.manifest["parents"]
    assert check_chain(small.certificates, small.id) == []


@pytest.mark.slow
def test_when_no_ratio_holds_the_student_stays_whole(
    student: Path, shop: Path, tmp_path: Path, few_repeats: None
) -> None:
    """Tuning with a step far too long ruins the ranking."""
    ruin = {"ratios": [0.5], "batch_size": 16, "learning_rate": 1000.0}
    told = prune_ranker(shop / "examples", student, tmp_path / "pruned", ruin)
    assert told["pruned_ratio"] == 0.0
    found, parent = read_ranker(tmp_path / "pruned"), read_ranker(student)
    assert found.id == parent.id
    assert found.certificates == parent.certificates
    assert check_chain(found.certificates, found.id) == []
    table = json.loads((tmp_path / "pruned" / "table.json").read_text())
    assert table["0.5"]["outside_tolerance"]
    assert (tmp_path / "pruned" / TAUGHT).exists()
    load_ranker(found)
