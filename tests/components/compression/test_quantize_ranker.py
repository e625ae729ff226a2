"""CONTRACT every variant: in its tolerance or said not to be, and no row moves because of another one."""

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from torch import nn

from components.compression.quantize_ranker import (
    VARIANTS,
    quantize_dense,
    quantize_ranker,
    round_blocks,
    tune,
)
from components.compression.table_quantization import quantize_tables
from components.data.examples import RankerExamples, read_ranker_examples, write_arrays, write_manifest
from components.hyper_parameters import QuantizeParams, RankerParams
from components.models.dlrm import Dlrm
from components.ranker.certificate import certify, check, check_chain
from components.ranker.distill_ranker import TAUGHT
from components.ranker.export_ranker import export_ranker
from components.ranker.fitting import fit, sample_rows
from components.ranker.ranker_artefact import GRAPH, RankerArtefact, begin_ranker, finish_ranker, read_ranker
from components.ranker.scoring import OnnxRanker, logit
from components.ranker.train_ranker import shape_of
from feature_repo.schema import DENSE_NAMES

EXACT = 1e-6

pytestmark = pytest.mark.slow  # the student is trained and exported first


@pytest.fixture(scope="module")
def variants(student: Path, shop: Path, few_repeats: None) -> Path:
    """Every variant of the student."""
    quantize_ranker(shop / "examples", student, shop / "variants", {"batch_size": 16})
    return shop / "variants"


@pytest.fixture(scope="module")
def held_out(shop: Path) -> RankerExamples:
    return read_ranker_examples(shop / "examples", "calibration")


@pytest.fixture(params=VARIANTS)
def variant(request: pytest.FixtureRequest, variants: Path) -> RankerArtefact:
    return read_ranker(variants / request.param)


def table_of(variants: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((variants / "table.json").read_text())
    return found


def test_each_variant_is_a_ranker_with_its_chain(
    variant: RankerArtefact, student: Path, variants: Path
) -> None:
    parent = read_ranker(student)
    assert variant.certificates[:-1] == parent.certificates
    last = variant.certificates[-1]
    assert (last["step"], last["parents"]) == ("quantize_ranker", [parent.id])
    assert last["variant"] == variant.manifest["variant"] == variant.path.name
    assert last["tolerance"] == VARIANTS[variant.path.name].tolerance
    assert last["bytes"] == variant.graph.stat().st_size
    assert last["ndcg_at_10"]["ratio"] > 0.98, "the planted signal is still found"
    told = table_of(variants)[variant.path.name]["outside_tolerance"]
    assert check_chain(variant.certificates, variant.id) == [
        f"quantize_ranker -> {variant.id}: {reason}" for reason in told
    ]


@pytest.mark.parametrize("wild", [1e6, -1e6, 1e9])
def test_no_row_changes_the_score_of_another(
    variant: RankerArtefact, held_out: RankerExamples, wild: float
) -> None:
    ranker = OnnxRanker(variant.graph)
    rows = np.arange(60).reshape(2, 30)
    feed = ranker.feed(held_out, rows, np.array([0, 1]))
    before = ranker.session.run(["score"], feed)[0]
    feed["dense"][17] = wild
    feed["categorical"][17] = 0
    after = ranker.session.run(["score"], feed)[0]
    alone = ranker.session.run(["score"], ranker.feed(held_out, np.array([[5]]), np.array([0])))[0]
    assert alone[0] == pytest.approx(before[5], abs=EXACT)
    others = np.arange(60) != 17
    assert np.abs(after - before)[others].max() <= EXACT
    assert np.isfinite(after).all()
    assert 0 <= after[17] <= 1


def stored(graph: Path, *endings: str) -> dict[str, int]:
    """The element types of the tensors with these name endings."""
    return {
        tensor.name: tensor.data_type
        for tensor in onnx.load(graph).graph.initializer
        if tensor.name.endswith(endings)
    }


@pytest.mark.parametrize(
    ("name", "ending", "kind"),
    [
        ("fp16", ".fp16", onnx.TensorProto.FLOAT16),
        ("int8", ".int8", onnx.TensorProto.UINT8),
        ("int4", ".int4", onnx.TensorProto.INT4),
        ("int8_static", ".int8", onnx.TensorProto.UINT8),
    ],
)
def test_every_table_is_stored_in_its_bits(variants: Path, name: str, ending: str, kind: int) -> None:
    found = stored(variants / name / GRAPH, ending)
    assert list(found.values()) == [kind] * 3


@pytest.mark.parametrize(
    ("name", "operators"),
    [
        ("fp16_dense", {"Gemm", "Cast"}),
        ("int4_weights", {"MatMulNBits"}),
        ("int8_weights", {"MatMulNBits"}),
        ("int8_static", {"QuantizeLinear", "DequantizeLinear"}),
        ("int8_smooth", {"QuantizeLinear", "DequantizeLinear"}),
    ],
)
def test_linear_layers_are_quantised_too(variants: Path, name: str, operators: set[str]) -> None:
    graph = onnx.load(variants / name / GRAPH).graph
    assert operators <= {node.op_type for node in graph.node}
    floats = {tensor.name for tensor in graph.initializer if tensor.data_type == onnx.TensorProto.FLOAT}
    assert not [node for node in graph.node if node.op_type == "Gemm" and node.input[1] in floats]


def test_fewer_bits_are_fewer_bytes(variants: Path, student: Path) -> None:
    size = {name: (variants / name / GRAPH).stat().st_size for name in VARIANTS}
    assert size["int4_weights"] < size["int8_weights"] < (student / GRAPH).stat().st_size


def test_the_table_tells_of_every_variant(variants: Path) -> None:
    table = table_of(variants)
    assert set(table) == set(VARIANTS)
    for row in table.values():
        assert row["outside_tolerance"] == check(row)
        assert {"bytes", "parent_bytes", "latency_ms", "parent_latency_ms", "tuned"} <= set(row)


# ------------------------------------------------------------------------------------------ the tuning


@pytest.fixture(scope="module")
def few_steps(student: Path, variants: Path) -> Iterator[None]:
    """As many epochs as asked, after what all tests share was trained as usual."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("components.ranker.fitting.LEAST_STEPS", 1)
        yield


@pytest.fixture(scope="module")
def fragile(shop: Path, teacher: Path, few_repeats: None, few_steps: None) -> Path:
    """A ranker whose tables four bits cannot hold: examples/, and ranker/ that was trained on them.

    What is bought is said by the type alone. The unknown code, which no candidate has, has rows so large
    that four bits leave next to nothing of the others: in float32 they have no effect.
    """
    root, like = shop / "fragile", read_ranker(teacher)
    for part in ("train", "calibration"):
        data = read_ranker_examples(shop / "examples", part)
        write_arrays(root / "examples" / f"ranker_{part}", said_by_the_type(data))
    write_manifest(root / "examples", params={})
    train, held_out = (read_ranker_examples(root / "examples", part) for part in ("train", "calibration"))
    torch.manual_seed(0)
    model = Dlrm(shape_of(like), **like.manifest["size"])
    model.fit_scale(sample_rows(train))
    fit(model, train, RankerParams(epochs=4, batch_size=16, learning_rate=0.01))
    model.eval()
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.Embedding):
                module.weight[0] = 28 * module.weight[1:].std()
    begin_ranker(root / "ranker")
    certificate = export_ranker(model, root / "ranker", held_out)
    assert certificate["ndcg_at_10"]["child"] > 0.9
    fields = {name: value for name, value in like.manifest.items() if name not in ("kind", "id")}
    finish_ranker(root / "ranker", [certificate], **fields)
    np.save(root / "ranker" / TAUGHT, logit(OnnxRanker(root / "ranker" / GRAPH).scores(train)))
    return root


def said_by_the_type(data: RankerExamples) -> RankerExamples:
    """The same lists with the planted feature gone: the candidate that had it is the only one of type 3."""
    signal = DENSE_NAMES.index("together_sum")
    dense, categorical = np.array(data.dense), np.array(data.categorical)
    planted = dense[:, signal] > 5
    dense[:, signal] = 0.5
    categorical[:, 1] = np.where(planted, 3, np.where(categorical[:, 1] == 3, 4, categorical[:, 1]))
    return replace(data, dense=dense, categorical=categorical)


TUNING = {"tune_epochs": 5, "batch_size": 16, "learning_rate": 0.02}


def in_four_bits(fragile: Path, graph: Path) -> float:
    """NDCG@10 of a graph whose tables are rounded, as a share of the fragile ranker's."""
    held_out = read_ranker_examples(fragile / "examples", "calibration")
    onnx.save(quantize_tables(onnx.load(graph), 4), graph.with_name("int4.onnx"))
    parent, ours = (
        OnnxRanker(file).scores(held_out)
        for file in (fragile / "ranker" / GRAPH, graph.with_name("int4.onnx"))
    )
    ratio: float = certify("test", "int4", ("", ours), [], parent, held_out)["ndcg_at_10"]["ratio"]
    return ratio


def test_a_ranker_without_teachers_is_tuned_on_purchases(fragile: Path, tmp_path: Path) -> None:
    train, held_out = (read_ranker_examples(fragile / "examples", part) for part in ("train", "calibration"))
    shutil.copytree(fragile / "ranker", tmp_path / "ranker", ignore=shutil.ignore_patterns(TAUGHT))
    ranker, settings = read_ranker(tmp_path / "ranker"), QuantizeParams(**TUNING)  # type: ignore[arg-type]
    tuned = tune(ranker, VARIANTS["int4"], tmp_path / "tuned", train, held_out, settings)
    assert in_four_bits(fragile, ranker.graph) < 0.9
    assert in_four_bits(fragile, tuned) > 0.97


@pytest.fixture
def some_variants(monkeypatch: pytest.MonkeyPatch) -> None:
    """One variant for each size of tables: the others are made in `variants`."""
    some = {name: VARIANTS[name] for name in ("fp16", "int8", "int4")}
    monkeypatch.setattr("components.compression.quantize_ranker.VARIANTS", some)


@pytest.mark.usefixtures("some_variants")
def test_tables_that_rounding_ruins_are_tuned(fragile: Path, tmp_path: Path) -> None:
    quantize_ranker(fragile / "examples", fragile / "ranker", tmp_path / "variants", TUNING)
    table = table_of(tmp_path / "variants")
    assert table["int4"]["tuned"]
    assert not table["fp16"]["tuned"]
    assert not table["int8"]["tuned"]
    assert table["int4"]["ndcg_at_10"]["ratio"] > 0.97
    found = read_ranker(tmp_path / "variants" / "int4")
    assert found.certificates[-1]["parents"] == [read_ranker(fragile / "ranker").id]
    assert stored(found.graph, ".int4")


@pytest.mark.usefixtures("some_variants")
def test_a_tuning_that_diverges_leaves_the_rounded_ranker(fragile: Path, tmp_path: Path) -> None:
    """The other variants still serve: a release does not end because one of them cannot be tuned."""
    wild = {**TUNING, "learning_rate": 1e30, "tune_epochs": 1}
    quantize_ranker(fragile / "examples", fragile / "ranker", tmp_path / "variants", wild)
    row = table_of(tmp_path / "variants")["int4"]
    assert not row["tuned"]
    assert row["outside_tolerance"]
    assert read_ranker(tmp_path / "variants" / "int4").id == row["id"]


@pytest.mark.usefixtures("some_variants")
def test_without_tuning_epochs_only_rounding_is_left(fragile: Path, tmp_path: Path) -> None:
    quantize_ranker(fragile / "examples", fragile / "ranker", tmp_path / "variants", {"tune_epochs": 0})
    four = table_of(tmp_path / "variants")["int4"]
    assert not four["tuned"]
    assert four["outside_tolerance"]


@pytest.mark.parametrize(("name", "atol"), [("int4", 5e-3), ("int4_weights", 1e-3), ("int8_weights", 1e-3)])
def test_tables_and_weights_are_rounded_in_training_as_they_are_stored(
    fragile: Path, tmp_path: Path, name: str, atol: float
) -> None:
    """Tuned numbers lie on the grid of the rounding: rounding them again changes nothing."""
    train, held_out = (read_ranker_examples(fragile / "examples", part) for part in ("train", "calibration"))
    parent, settings = read_ranker(fragile / "ranker"), QuantizeParams(**{**TUNING, "tune_epochs": 1})  # type: ignore[arg-type]
    tuned = tune(parent, VARIANTS[name], tmp_path / "tuned", train, held_out, settings)
    if name == "int4":
        model = quantize_tables(onnx.load(tuned), 4)
    else:
        model = quantize_dense(onnx.load(tuned), VARIANTS[name].dense, tuned, train)
    onnx.save(model, tmp_path / "rounded.onnx")
    found, expected = (OnnxRanker(graph).scores(held_out) for graph in (tmp_path / "rounded.onnx", tuned))
    np.testing.assert_allclose(found, expected, atol=atol)


def test_a_block_of_weights_by_hand() -> None:
    weight = torch.zeros(1, 40)
    weight[0, :3] = torch.tensor([-0.8, 0.31, 0.8])  # scale 0.1: -8, 3.1 and 8, of which 7 is the most
    weight[0, 32] = 0.5  # a block of its own, that padding fills: it is its lowest level
    rounded = round_blocks(weight, 4)
    torch.testing.assert_close(rounded[0, :3], torch.tensor([-0.8, 0.3, 0.7]))
    assert rounded[0, 32] == 0.5
    assert rounded.count_nonzero() == 4
