"""A table planted so that its head matters, and a linear ranker over it, whose losses are known."""

import itertools
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from components.compression.table_quantization import ROWS_A_BLOCK
from components.data.examples import RankerExamples
from components.ranker.scoring import OnnxRanker, logit
from pipelines.bench.budget_tables import (
    GROUPS,
    SHARED,
    Assignment,
    Option,
    axes_bytes,
    budget_tables,
    frequency_groups,
    option_bytes,
    order_bytes,
    principal_axes,
    read_table,
    reconstruct,
    solve,
    store,
    table_bytes,
    uniform_options,
    uniform_table,
)

ROWS, COLUMNS, HEAD = 9 * ROWS_A_BLOCK + 100, 32, 2 * ROWS_A_BLOCK
FULL = ROWS * COLUMNS * 4
TABLE = "items"


@pytest.fixture(scope="module")
def frequency() -> np.ndarray:
    """Purchases fall with the row's place in an order that is not the table's."""
    return np.random.default_rng(1).permutation(ROWS)[::-1].astype(np.float32)


@pytest.fixture(scope="module")
def model(frequency: np.ndarray) -> onnx.ModelProto:
    """Rows of the head are large, those of the tail noise; the score is sigmoid(row @ ones)."""
    rng = np.random.default_rng(2)
    weight = rng.normal(0, 0.002, (ROWS, COLUMNS)).astype(np.float32)
    head = np.argsort(-frequency)[:HEAD]
    weight[head] = rng.normal(0, 0.5, (HEAD, COLUMNS))
    return graph(weight)


def graph(weight: np.ndarray) -> onnx.ModelProto:
    nodes = [
        helper.make_node("Gather", ["categorical", "first"], ["code"], axis=1),
        helper.make_node("Gather", [TABLE, "code"], ["row"], axis=0),
        helper.make_node("MatMul", ["row", "ones"], ["sum"]),
        helper.make_node("Sigmoid", ["sum"], ["score"]),
    ]
    known = {TABLE: weight, "ones": np.ones(weight.shape[1], np.float32), "first": np.array(0, np.int64)}
    made = helper.make_graph(
        nodes,
        "ranker",
        [helper.make_tensor_value_info("categorical", TensorProto.INT64, ["n", 4])],
        [helper.make_tensor_value_info("score", TensorProto.FLOAT, ["n"])],
        [numpy_helper.from_array(value, name) for name, value in known.items()],
    )
    return helper.make_model(made, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


@pytest.fixture(scope="module")
def held_out(frequency: np.ndarray) -> RankerExamples:
    """Eighty lists of a hundred candidates, drawn by purchases squared."""
    lists, length = 80, 100
    likely = frequency.astype(float) ** 2 + 1
    item = np.random.default_rng(3).choice(ROWS, lists * length, p=likely / likely.sum())
    return RankerExamples(
        dense=np.zeros((lists * length, 1), np.float32),
        categorical=np.stack([item, *[np.zeros_like(item)] * 3], 1).astype(np.int32),
        label=np.zeros(lists * length, np.int8),
        start=np.arange(lists + 1) * length,
        history=np.zeros((lists, 1), np.int32),
        history_weight=np.zeros((lists, 1), np.float16),
        basket=np.zeros((lists, 1), np.int32),
    )


def saved(model: onnx.ModelProto, place: Path) -> OnnxRanker:
    onnx.save(model, place / "ranker.onnx")
    return OnnxRanker(place / "ranker.onnx")


def rows_of(model: onnx.ModelProto, place: Path, codes: np.ndarray) -> np.ndarray:
    onnx.checker.check_model(model)
    seen = onnx.ModelProto()
    seen.CopyFrom(model)
    seen.graph.output.append(helper.make_empty_tensor_value_info("row"))
    feed = np.stack([codes, *[np.zeros_like(codes)] * 3], 1)
    return saved(seen, place).session.run(["row"], {"categorical": feed})[0]


def loss(model: onnx.ModelProto, parent: onnx.ModelProto, held_out: RankerExamples, place: Path) -> float:
    """Compute the documented loss list by list, from the graphs alone."""
    before = logit(saved(parent, place).scores(held_out))
    after = logit(saved(model, place).scores(held_out))
    total = 0.0
    for begin, end in itertools.pairwise(held_out.start):
        gap = np.maximum(np.sort(before[begin:end])[-10] - before[begin:end], 0)
        total += float((np.exp(-gap) * (after[begin:end] - before[begin:end]) ** 2).sum())
    return total / (len(held_out.start) - 1)


@pytest.mark.parametrize("seed", range(30))
def test_the_solver_finds_what_trying_everything_finds(seed: int) -> None:
    rng = np.random.default_rng(seed)
    size, loss = rng.integers(1, 40, (5, 4)), rng.exponential(1, (5, 4))
    budget = int(rng.integers(size.min(1).sum(), size.max(1).sum() + 1))
    every = list(itertools.product(range(4), repeat=5))
    least = min(loss[range(5), c].sum() for c in every if size[range(5), c].sum() <= budget)
    choice = solve(size, loss, budget)
    assert size[range(5), choice].sum() <= budget
    assert loss[range(5), choice].sum() == pytest.approx(least)


def test_the_solver_refuses_what_cannot_be() -> None:
    size = np.array([[5, 9], [4, 8]])
    assert solve(size, np.ones((2, 2)), 9) == [0, 0]
    with pytest.raises(ValueError, match="take 9 bytes, the budget is 8"):
        solve(size, np.ones((2, 2)), 8)


def test_groups_hold_each_row_once_and_the_most_frequent_first(frequency: np.ndarray) -> None:
    groups = frequency_groups(frequency)
    assert sorted(np.concatenate(groups).tolist()) == list(range(ROWS))
    assert [len(rows) % ROWS_A_BLOCK for rows in groups[:-1]] == [0] * (len(groups) - 1)
    assert 1 < len(groups) <= GROUPS
    for above, below in itertools.pairwise(groups):
        assert frequency[above].min() > frequency[below].max()
    assert len(frequency_groups(np.ones(7))) == 1


MIXED = [Option(32, 8), Option(16, 4), SHARED, Option(32, 16), Option(16, 4), Option(8, 8), Option(32, 4)]


@pytest.mark.parametrize(
    "given",
    [
        MIXED,
        [Option(32, bits) for bits in (4, 8, 16)],
        [Option(16, 8), Option(4, 4)],
        [SHARED],
        [SHARED, Option(16, 16)],
    ],
    ids=["mixed", "full width", "reduced", "shared", "shared and reduced"],
)
def test_the_graph_reads_the_rows_that_were_meant(
    given: list[Option], frequency: np.ndarray, tmp_path: Path
) -> None:
    model = graph(np.random.default_rng(4).normal(0.3, 1, (ROWS, COLUMNS)).astype(np.float32))
    groups = frequency_groups(frequency)
    options = list(itertools.islice(itertools.cycle(given), len(groups)))
    weight = read_table(model, TABLE)
    axes = principal_axes(weight, frequency)
    assigned = [
        Assignment(rows, option, option_bytes(len(rows), COLUMNS, option), 0.0)
        for rows, option in zip(groups, options, strict=True)
    ]
    made = store(model, TABLE, axes, assigned)
    meant = reconstruct(weight, axes, assigned).numpy()
    codes = np.random.default_rng(5).permutation(ROWS)
    found = rows_of(made, tmp_path, codes)
    np.testing.assert_allclose(found, meant[codes], atol=2e-5)
    kept = [a.rows for a in assigned if a.option.dim in (0, COLUMNS)]  # not turned: equal to the last bit
    exact = np.isin(codes, np.concatenate([np.empty(0, np.int64), *kept]))
    np.testing.assert_array_equal(found[exact], meant[codes[exact]])
    np.testing.assert_array_equal(
        rows_of(made, tmp_path, codes[:1])[0], found[0]
    )  # whoever else is asked for
    width = max((option.dim for option in options if option.dim < COLUMNS), default=0)
    counted = sum(a.size for a in assigned) + order_bytes(ROWS) + axes_bytes(width, COLUMNS)
    assert table_bytes(made, TABLE) == counted


def test_rows_that_lie_by_frequency_need_no_order(tmp_path: Path) -> None:
    model = graph(np.random.default_rng(6).normal(0, 1, (ROWS, COLUMNS)).astype(np.float32))
    frequency = np.arange(ROWS, 0, -1)
    weight = read_table(model, TABLE)
    axes = principal_axes(weight, frequency)
    first, *rest = frequency_groups(frequency)
    assigned = [
        Assignment(first, Option(32, 16), 0, 0.0),
        Assignment(np.concatenate(rest), Option(8, 8), 0, 0.0),
    ]
    made = store(model, TABLE, axes, assigned)
    assert not [t for t in made.graph.initializer if t.name == f"{TABLE}.order"]
    codes = np.arange(ROWS)
    np.testing.assert_allclose(
        rows_of(made, tmp_path, codes), reconstruct(weight, axes, assigned).numpy(), atol=2e-5
    )


def test_the_principal_axes_are_those_of_the_weighted_rows() -> None:
    rng = np.random.default_rng(7)
    frequency = rng.integers(0, 50, 300).astype(np.float64)
    table = torch.from_numpy(rng.normal(1, [3, 1, 0.1, 0.5], (300, 4)).astype(np.float32))
    repeated = np.repeat(table.numpy(), (frequency + 1).astype(int), axis=0)
    axes = principal_axes(table, frequency).numpy()
    np.testing.assert_allclose(axes[0], repeated.mean(0), atol=2e-3)
    expected = np.linalg.svd(repeated - repeated.mean(0), full_matrices=False)[2]
    np.testing.assert_allclose(np.abs(axes[1:] @ expected.T), np.eye(4), atol=2e-3)


@pytest.mark.parametrize("share", [4, 8, 16, 32, 64])
def test_the_budget_holds_and_the_loss_is_the_one_told(
    share: int, model: onnx.ModelProto, frequency: np.ndarray, held_out: RankerExamples, tmp_path: Path
) -> None:
    made, assigned = budget_tables(model, TABLE, frequency, FULL // share, held_out)
    assert table_bytes(made, TABLE) <= FULL // share
    assert sorted(np.concatenate([a.rows for a in assigned]).tolist()) == list(range(ROWS))
    told = sum(a.loss for a in assigned)
    assert loss(made, model, held_out, tmp_path) == pytest.approx(told, rel=0.01, abs=1e-6)


def test_a_head_that_matters_gets_the_bytes_and_beats_every_uniform_table(
    model: onnx.ModelProto, frequency: np.ndarray, held_out: RankerExamples, tmp_path: Path
) -> None:
    made, assigned = budget_tables(model, TABLE, frequency, FULL // 10, held_out)
    ours = loss(made, model, held_out, tmp_path)
    uniform = [
        loss(uniform_table(model, TABLE, frequency, option), model, held_out, tmp_path)
        for option in uniform_options(ROWS, COLUMNS, FULL // 10)
    ]
    assert len(uniform) == 3
    assert ours < 0.05 * min(uniform)
    bytes_a_row = [a.size / len(a.rows) for a in assigned]
    assert bytes_a_row[0] > 4 * bytes_a_row[-1]


@pytest.mark.parametrize("bits", [16, 8, 4])
def test_uniform_tables_are_the_widest_that_fit(
    bits: int, model: onnx.ModelProto, frequency: np.ndarray, held_out: RankerExamples
) -> None:
    budget = FULL // 11
    (option,) = (o for o in uniform_options(ROWS, COLUMNS, budget) if o.bits == bits)
    wider = uniform_table(model, TABLE, frequency, Option(option.dim + 1, bits))
    assert table_bytes(uniform_table(model, TABLE, frequency, option), TABLE) <= budget
    assert table_bytes(wider, TABLE) > budget


def test_where_all_rows_matter_alike_the_uniform_table_is_kept() -> None:
    rng = np.random.default_rng(8)
    model = graph(rng.normal(0, 0.3, (ROWS, COLUMNS)).astype(np.float32))
    item = rng.integers(0, ROWS, 4_000)
    data = RankerExamples(
        np.zeros((4_000, 1), np.float32),
        np.stack([item] * 4, 1).astype(np.int32),
        np.zeros(4_000, np.int8),
        np.arange(41) * 100,
        *[np.zeros((40, 1), np.int32)] * 3,
    )
    budget = option_bytes(ROWS, COLUMNS, Option(COLUMNS, 8))  # just enough, and nothing left for an order
    _, assigned = budget_tables(model, TABLE, np.ones(ROWS), budget, data)
    assert [a.option for a in assigned] == [Option(COLUMNS, 8)]


def test_an_impossible_budget_says_what_it_would_need(
    model: onnx.ModelProto, frequency: np.ndarray, held_out: RankerExamples
) -> None:
    with pytest.raises(ValueError, match=r"takes [\d,]+ bytes, the budget is 2,000: raise it"):
        budget_tables(model, TABLE, frequency, 2_000, held_out)


def test_what_is_given_must_fit_together(
    model: onnx.ModelProto, frequency: np.ndarray, held_out: RankerExamples
) -> None:
    with pytest.raises(ValueError, match="no float32 matrix nothing"):
        budget_tables(model, "nothing", frequency, FULL, held_out)
    with pytest.raises(ValueError, match="give one number"):
        budget_tables(model, TABLE, frequency[1:], FULL, held_out)
    twice = onnx.ModelProto()
    twice.CopyFrom(model)
    twice.graph.node.append(helper.make_node("Gather", [TABLE, "code"], ["again"], axis=0))
    with pytest.raises(ValueError, match="Gather, Gather"):
        budget_tables(twice, TABLE, frequency, FULL, held_out)
