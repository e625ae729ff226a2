"""CONTRACT every ranker: each one in `RANKERS`, and each added later, passes the tests here."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from components.data.examples import (
    ContractViolation,
    RankerExamples,
    read_ranker_examples,
    write_arrays,
    write_manifest,
)
from components.hyper_parameters import RANKERS, read_ranker_params, reads
from components.models.dlrm import Dlrm
from components.models.ranker import Shape
from components.ranker.certificate import check, check_chain
from components.ranker.export_ranker import said_of_rows
from components.ranker.ranker_artefact import RankerArtefact, read_ranker
from components.ranker.scoring import OnnxRanker
from components.ranker.train_ranker import (
    calibrate,
    load_ranker,
    platt,
    read_shape,
    train_ranker,
)
from feature_repo.schema import DENSE_NAMES
from tests.programs import run_python

# What makes each of them small and quick here; a ranker without a line is trained as it usually is.
SMALL: dict[str, dict[str, Any]] = {
    "dlrm": {"size": {"hidden": 32}},
    "wide_deep": {"size": {"hidden": 32}},
    "dcn_v2": {"size": {"hidden": 32, "rank": 8}},
    "sequence": {"size": {"hidden": 32, "dim": 8}, "epochs": 2},
    "graph": {"size": {"hidden": 32, "dim": 8}},
    "gradient_boosting": {"size": {"trees": 30, "leaves": 15}},
}
TRAINING = {"epochs": 4, "batch_size": 16, "learning_rate": 0.01}

slow = pytest.mark.slow  # each export takes seconds


@pytest.fixture(params=RANKERS)
def trained(
    request: pytest.FixtureRequest, shop: Path, few_repeats: None, monkeypatch: pytest.MonkeyPatch
) -> RankerArtefact:
    """Each ranker in turn on the planted shop, trained by the first test that asks, in whatever order."""
    name = request.param
    if name != "dlrm":  # it must equal the teacher, which is trained as usual
        monkeypatch.setattr("components.ranker.fitting.LEAST_STEPS", 1)
    place = shop / f"contract_{name}"
    if not (place / "manifest.json").exists():
        read = {key: value for key, value in TRAINING.items() if key in reads(name)}
        params = {name: {**read, **SMALL.get(name, {})}}
        train_ranker(shop / "examples", shop / "statistics", place, name, params)
    return read_ranker(place)


@pytest.fixture
def graph(trained: RankerArtefact) -> OnnxRanker:
    return OnnxRanker(trained.graph)


@pytest.fixture(scope="module")
def held_out(shop: Path) -> RankerExamples:
    return read_ranker_examples(shop / "examples", "calibration")


def one_list(data: RankerExamples, which: int = 0) -> RankerExamples:
    """One list of the data, its arrays free to change."""
    rows = slice(data.start[which], data.start[which + 1])
    whole = {name: np.array(getattr(data, name)[rows]) for name in ("dense", "categorical", "label")}
    asked = ("history", "history_weight", "basket")
    return RankerExamples(
        **whole,
        start=np.array([0, len(whole["label"])]),
        **{name: np.array(getattr(data, name)[which : which + 1]) for name in asked},
    )


def candidates(given: RankerExamples, rows: np.ndarray) -> RankerExamples:
    """One list with these of its candidates."""
    chosen = {name: getattr(given, name)[rows] for name in ("dense", "categorical", "label")}
    return replace(given, **chosen, start=np.array([0, len(rows)]))


@slow
def test_the_planted_signal_is_found(
    trained: RankerArtefact, graph: OnnxRanker, held_out: RankerExamples
) -> None:
    scores = graph.scores(held_out).reshape(300, 30)
    signal = np.asarray(held_out.dense)[:, DENSE_NAMES.index("together_sum")].reshape(300, 30)
    assert (scores.argmax(1) == signal.argmax(1)).mean() > 0.97
    assert trained.certificates[-1]["ndcg_at_10"]["child"] > 0.9


@slow
def test_probabilities_are_those_of_the_held_out_lists(
    trained: RankerArtefact, graph: OnnxRanker, held_out: RankerExamples
) -> None:
    """The planted candidate is bought nine times in ten, each of the others once in 290."""
    scores = graph.scores(held_out)
    assert scores.mean() == pytest.approx(np.mean(held_out.label), rel=0.05)
    planted = np.asarray(held_out.dense)[:, DENSE_NAMES.index("together_sum")] > 5
    assert scores[planted].mean() == pytest.approx(0.9, abs=0.2)
    assert scores[~planted].mean() == pytest.approx(0.1 / 29, abs=0.006)


@slow
def test_the_certificate_proves_that_graph_and_framework_agree(trained: RankerArtefact) -> None:
    (certificate,) = trained.certificates
    assert certificate["parents"] == []
    assert certificate["difference"]["max"] < 1e-4
    assert certificate["bytes"] == trained.graph.stat().st_size
    assert check(certificate) == []
    assert check_chain(trained.certificates, trained.id) == []
    manifest = trained.manifest
    assert manifest["step"] == "train_ranker"
    assert manifest["params"]["ranker"]["model"] == manifest["model"]
    assert manifest["params"]["examples"] == {"windows": 1}
    assert manifest["size"].items() >= SMALL.get(manifest["model"], {"size": {}})["size"].items()
    assert trained.manifest["cost"]["cpu_seconds"] > 0


@slow
def test_the_graph_scores_like_the_stored_weights(
    trained: RankerArtefact, graph: OnnxRanker, held_out: RankerExamples
) -> None:
    if trained.manifest["model"] == "gradient_boosting":
        with pytest.raises(ContractViolation, match="without torch weights"):
            load_ranker(trained)
        return
    ranker = load_ranker(trained)
    expected = said_of_rows(lambda inputs: ranker(*inputs), held_out)
    np.testing.assert_allclose(graph.scores(held_out), expected, atol=1e-4)


@slow
def test_a_row_scores_the_same_beside_an_outlier(graph: OnnxRanker, held_out: RankerExamples) -> None:
    tame = one_list(held_out)
    before = graph.scores(tame)
    wild = replace(tame, dense=tame.dense.copy(), categorical=tame.categorical.copy())
    wild.dense[1:] = 1e9
    wild.categorical[1:] = 0
    assert graph.scores(wild)[0] == pytest.approx(before[0], abs=1e-6)


@slow
def test_a_request_scores_the_same_beside_a_wild_request(graph: OnnxRanker, held_out: RankerExamples) -> None:
    """Two lists in one call: one shopper's outlier must not move the other one's scores."""
    lists = np.array([1, 2])
    rows = held_out.start[lists][:, None] + np.arange(30)[None, :]
    feed = graph.feed(held_out, rows, lists)
    before = graph.session.run(["score"], feed)[0].reshape(2, 30)
    second = slice(30, None) if graph.is_flat else slice(1, None)
    feed["dense"][second] = -1e9
    if "history_weight" in feed:
        feed["history_weight"][1:] = 1e4
        feed["history"][1:], feed["basket"][1:] = 5, 5
    after = graph.session.run(["score"], feed)[0].reshape(2, 30)
    np.testing.assert_allclose(after[0], before[0], atol=1e-6)


@slow
@pytest.mark.parametrize("count", [1, 2, 30, 700])
def test_any_number_of_candidates_is_scored_in_any_order(
    graph: OnnxRanker, held_out: RankerExamples, count: int
) -> None:
    given = one_list(held_out, 3)
    rows = np.resize(np.random.default_rng(0).permutation(30), count)
    np.testing.assert_allclose(graph.scores(candidates(given, rows)), graph.scores(given)[rows], atol=1e-6)


@slow
@pytest.mark.parametrize("value", [0.0, 1e9, -3e38, 3e38])
def test_nothing_known_and_wild_features_give_a_probability(
    graph: OnnxRanker, held_out: RankerExamples, value: float
) -> None:
    given = one_list(held_out)
    nothing = {name: np.zeros_like(a) for name, a in vars(given).items() if name != "start"}
    scores = graph.scores(replace(given, **nothing | {"dense": np.full_like(given.dense, value)}))
    assert np.isfinite(scores).all()
    np.testing.assert_allclose(scores, scores[0], atol=1e-6)
    assert ((scores >= 0) & (scores <= 1)).all()


# ------------------------------------------------------------------------------------------- the step


@slow
@pytest.mark.parametrize("trained", ["dlrm"], indirect=True)
def test_the_same_seed_gives_the_same_graph(trained: RankerArtefact, teacher: Path) -> None:
    assert trained.path != teacher, "two trainings"
    assert trained.id == read_ranker(teacher).id


@slow
def test_two_processes_train_the_same_as_one(shop: Path, tmp_path: Path, few_repeats: None) -> None:
    """Lists of one length, shared evenly: the averaged gradients are those of the whole batch."""
    params = {"dlrm": {"epochs": 1, "batch_size": 50, "size": {"hidden": 8, "dropout": 0.0}}}
    examples, statistics = shop / "examples", shop / "statistics"
    run_python(
        *("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
        *("-m", "components.ranker.train_ranker", "--model", "dlrm", "--params", json.dumps(params)),
        *("--ranker", tmp_path / "two", "--examples", examples, "--statistics", statistics),
    )
    train_ranker(examples, statistics, tmp_path / "one", "dlrm", params)
    one, two = (read_ranker(tmp_path / name).weights() for name in ("one", "two"))
    assert one.keys() == two.keys()
    for name, weights in one.items():
        np.testing.assert_allclose(two[name], weights, atol=1e-4, err_msg=name)


@pytest.mark.parametrize(("model", "params"), [("dlmr", {}), ("dlrm", {"two_tower": {}})])
def test_an_unknown_ranker_is_named(tmp_path: Path, model: str, params: dict[str, Any]) -> None:
    with pytest.raises((TypeError, ValueError), match=r"no ranker '(dlmr|two_tower)': .* dlrm, wide_deep"):
        train_ranker(tmp_path, tmp_path, tmp_path / "out", model, params)


def test_a_size_travels_as_floats_and_arrives_whole() -> None:
    """Numbers of a JSON parameter travel as protobuf numbers, at every depth."""
    found = read_ranker_params({"dlrm": {"size": {"dim": 32.0, "dropout": 0.0}}})["dlrm"]
    assert found.size == {"items": True, "dim": 32, "dropout": 0.0}
    assert isinstance(found.size["dim"], int)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"dlrm": {"size": {"dims": 32}}}, "Dlrm has no parameter 'dims': did you mean 'dim'"),
        ({"dlrm": {"size": {"dim": 0}}}, "Dlrm.dim is 0, expected `int` >= 1"),
        ({"graph": {"size": {"degree": 21}}}, "GraphRanker.degree is 21, expected `int` <= 20"),
        ({"graph": {"size": {"degree": 0}}}, "GraphRanker.degree is 0, expected `int` >= 1"),
        ({"dlrm": 5}, "dlrm is 5, expected an object"),
        ({"gradient_boosting": {"epochs": 3}}, "is not trained by 'epochs': it reads size and seed"),
    ],
)
def test_a_parameter_that_a_ranker_does_not_read_is_refused(given: dict[str, Any], told: str) -> None:
    with pytest.raises(TypeError, match=told):
        read_ranker_params(given)


@pytest.mark.parametrize(
    ("lacking", "told"),
    [("train", "no training list holds a purchase"), ("calibration", "no list is held out to calibrate on")],
)
def test_without_lists_nothing_is_trained(shop: Path, tmp_path: Path, lacking: str, told: str) -> None:
    for part in ("train", "calibration"):
        data = read_ranker_examples(shop / "examples", part)
        if part == lacking:
            none = {name: array[:0] for name, array in vars(data).items() if name != "start"}
            data = RankerExamples(**none, start=np.zeros(1, np.int64))
        write_arrays(tmp_path / f"ranker_{part}", data)
    write_manifest(tmp_path, params={})
    with pytest.raises(ValueError, match=told):
        train_ranker(tmp_path, shop / "statistics", tmp_path / "out", "dlrm", {})
    assert not (tmp_path / "out").exists()


def test_the_shape_follows_from_the_data(shop: Path) -> None:
    assert read_shape(shop / "examples", shop / "statistics") == Shape(len(DENSE_NAMES), (61, 10, 6, 4))


# -------------------------------------------------------------------------------------- the calibration


@pytest.mark.parametrize("times", [1, 20, 100])
def test_platt_scaling_finds_the_slope_and_intercept_that_made_the_labels(times: int) -> None:
    """Also of a ranker whose logits are far too wide."""
    rng = np.random.default_rng(0)
    logits = rng.normal(0, 2, 200_000).astype(np.float32)
    label = (rng.random(200_000) < 1 / (1 + np.exp(-(0.7 * logits - 2.0)))).astype(np.int8)
    slope, intercept = platt(logits * times, label)
    assert slope * times == pytest.approx(0.7, abs=0.02)
    assert intercept == pytest.approx(-2.0, abs=0.03)


@pytest.mark.parametrize("far", [3.0, 1e3])
def test_platt_scaling_of_few_far_purchases_ends_where_its_loss_has_no_slope(far: float) -> None:
    rng = np.random.default_rng(0)
    logits = np.concatenate([rng.normal(-3, 0.1, 9_990), rng.normal(3, 0.1, 9), [far]])
    label = np.arange(10_000) >= 9_990
    slope, intercept = platt(logits, label)
    said = 1 / (1 + np.exp(-(slope * logits + intercept).clip(-700)))
    target = np.where(label, 11 / 12, 1 / 9_992)
    assert (said - target).sum() == pytest.approx(0, abs=1e-3)
    assert ((said - target) * logits).sum() / np.abs(logits).max() == pytest.approx(0, abs=1e-3)


def test_platt_scaling_of_separable_lists_has_an_end() -> None:
    """Three lists whose purchase has the best score: others keep probabilities of their own."""
    logits = np.random.default_rng(0).normal(-4, 1.5, (3, 60)).clip(max=0.5).astype(np.float32)
    logits[:, 0] = [1, 2, 3]
    slope, intercept = platt(logits.ravel(), (logits >= 1).ravel().astype(np.int8))
    assert 1 < slope < 5
    assert (slope * logits + intercept > -12).mean() > 0.5, "the ranker cuts logits off there"


def test_platt_scaling_never_turns_the_ranking_round() -> None:
    """Scores that contradict the purchases: only the purchase rate is left to learn."""
    logits = np.array([2.0, 1.0, -1.0, -2.0] * 50)
    label = np.array([0, 0, 0, 1] * 50, np.int8)
    slope, intercept = platt(logits, label)
    assert slope > 0
    assert (1 / (1 + np.exp(-(slope * logits + intercept)))).mean() == pytest.approx(0.25, abs=1e-3)


@pytest.mark.parametrize("bought", [0, 50, 200])
def test_platt_scaling_of_logits_that_are_all_alike_gives_the_purchase_rate(bought: int) -> None:
    logits = np.full(200, 0.1, np.float32)
    slope, intercept = platt(logits, np.arange(200) < bought)
    assert slope > 0
    assert 1 / (1 + np.exp(-(slope * 0.1 + intercept))) == pytest.approx(bought / 200, abs=6e-3)


def test_calibration_finds_the_purchase_rate(plant: Callable[..., RankerExamples]) -> None:
    torch.manual_seed(0)
    data = plant(200, 30, seed=3)
    model = Dlrm(Shape(len(DENSE_NAMES), (61, 10, 6, 4)), hidden=8).eval()
    calibrate(model, data)
    with torch.no_grad():
        served = model(torch.from_numpy(data.dense), torch.from_numpy(data.categorical.astype(np.int64)))
    assert served.mean().item() == pytest.approx(data.label.mean(), rel=1e-3)
