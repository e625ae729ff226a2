"""The ensemble speaks with one voice, each teacher counted once; the student says whom it learnt from."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from components.data.examples import ContractViolation, RankerExamples, read_ranker_examples
from components.ranker.certificate import ParityFailed, check_chain
from components.ranker.distill_ranker import TAUGHT, Ensemble, distill_ranker, read_taught
from components.ranker.ranker_artefact import (
    GRAPH,
    RankerArtefact,
    begin_ranker,
    finish_ranker,
    read_ranker,
)
from components.ranker.scoring import OnnxRanker, logit
from tests.components.conftest import SIGNAL, write_opinion


@pytest.fixture
def opinionated(tmp_path: Path) -> Callable[..., RankerArtefact]:
    """Make a teacher whose logit is one feature times a slope."""

    def make(name: str, column: int, slope: float) -> RankerArtefact:
        place = tmp_path / name
        begin_ranker(place)
        write_opinion(place / GRAPH, column, slope)
        finish_ranker(place, [], step="train_ranker", parents=[], model=name, cost={"total_cpu_seconds": 1.0})
        return read_ranker(place)

    return make


@pytest.fixture
def data(plant: Callable[..., RankerExamples]) -> RankerExamples:
    return plant(100, 20, seed=6)


def test_an_ensemble_of_one_is_its_teacher(
    opinionated: Callable[..., RankerArtefact], data: RankerExamples
) -> None:
    teacher = opinionated("one", SIGNAL, 0.5)
    ensemble = Ensemble.of([teacher], data)
    assert (ensemble.slope, ensemble.intercept) == (1.0, 0.0)
    np.testing.assert_allclose(ensemble.logits(data), 0.5 * data.dense[:, SIGNAL], atol=1e-4)


def test_a_teacher_that_is_named_twice_counts_once(
    opinionated: Callable[..., RankerArtefact], data: RankerExamples
) -> None:
    first, second = opinionated("one", SIGNAL, 0.5), opinionated("two", 0, 0.1)
    once, twice = Ensemble.of([first, second], data), Ensemble.of([first, second, first], data)
    assert [teacher.id for teacher in twice.teachers] == [first.id, second.id]
    np.testing.assert_array_equal(twice.logits(data), once.logits(data))
    assert Ensemble.of([first, first], data).teachers == (first,)


def test_the_ensemble_is_the_mean_of_the_logits_calibrated(
    opinionated: Callable[..., RankerArtefact], data: RankerExamples
) -> None:
    ensemble = Ensemble.of([opinionated("one", SIGNAL, 0.5), opinionated("two", 0, 0.1)], data)
    mean = (0.5 * data.dense[:, SIGNAL] + 0.1 * data.dense[:, 0]) / 2
    np.testing.assert_allclose(
        ensemble.logits(data), ensemble.slope * mean + ensemble.intercept, rtol=1e-3, atol=1e-3
    )
    probability = 1 / (1 + np.exp(-ensemble.logits(data).astype(np.float64)))
    assert probability.mean() == pytest.approx(data.label.mean(), rel=1e-2)


@pytest.mark.slow
def test_the_student_ranks_as_its_teacher_does(student: Path, teacher: Path, shop: Path) -> None:
    found, master = read_ranker(student), read_ranker(teacher)
    held_out = read_ranker_examples(shop / "examples", "calibration")
    scores = OnnxRanker(found.graph).scores(held_out).reshape(300, 30)
    signal = np.asarray(held_out.dense)[:, SIGNAL].reshape(300, 30)
    assert (scores.argmax(1) == signal.argmax(1)).mean() > 0.97
    assert found.manifest["parents"] == [master.id]
    cost, before = found.manifest["cost"], master.manifest["cost"]
    assert cost["total_cpu_seconds"] == pytest.approx(cost["cpu_seconds"] + before["total_cpu_seconds"])


@pytest.mark.slow
def test_the_teachers_scores_are_kept_for_later_tuning(student: Path, teacher: Path, shop: Path) -> None:
    data = read_ranker_examples(shop / "examples", "train")
    expected = logit(OnnxRanker(read_ranker(teacher).graph).scores(data))
    np.testing.assert_allclose(np.load(student / TAUGHT), expected, atol=1e-3)


@pytest.mark.slow
def test_a_student_of_two_names_both(
    teacher: Path, opinionated: Callable[..., RankerArtefact], shop: Path, tmp_path: Path, few_repeats: None
) -> None:
    other = opinionated("one", SIGNAL, 0.7)
    certified = {**read_ranker(teacher).certificates[0], "id": other.id}
    fields = {name: value for name, value in other.manifest.items() if name not in ("kind", "id")}
    finish_ranker(other.path, [certified], **fields)
    distill_ranker(
        shop / "examples",
        shop / "statistics",
        [teacher, other.path, teacher],
        tmp_path / "student",
        {"hidden": 32, "epochs": 20, "batch_size": 16, "learning_rate": 0.003, "soft_weight": 0.9},
    )
    found = read_ranker(tmp_path / "student")
    assert found.certificates[-1]["parents"] == [read_ranker(teacher).id, other.id]
    assert found.certificates[-1]["parent_bytes"] == sum(
        file.stat().st_size for file in (teacher / GRAPH, other.graph)
    )
    assert check_chain(found.certificates, found.id) == []


@pytest.mark.slow
def test_a_student_that_has_not_learnt_is_refused(
    teacher: Path, shop: Path, tmp_path: Path, few_repeats: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("components.ranker.fitting.LEAST_STEPS", 1)
    lazy = {"hidden": 8, "epochs": 1, "batch_size": 500, "learning_rate": 1e-9}
    with pytest.raises(ParityFailed, match="too far from its parent"):
        distill_ranker(shop / "examples", shop / "statistics", [teacher], tmp_path / "student", lazy)


def test_a_student_without_teachers_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no teachers are named"):
        distill_ranker(tmp_path, tmp_path, [], tmp_path / "student", {})


def test_opinions_of_other_rows_are_refused(tmp_path: Path, plant: Callable[..., RankerExamples]) -> None:
    np.save(tmp_path / TAUGHT, np.zeros(7, np.float32))
    with pytest.raises(ContractViolation, match="speaks of 7 rows, the examples hold 12"):
        read_taught(tmp_path, plant(3, 4, seed=0))
