"""Bits and bytes of quantised tables by hand, and that ONNX Runtime reads the same values."""

from itertools import product

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from components.compression.table_quantization import (
    ROWS_A_BLOCK,
    dequantize_table,
    quantize_table,
    quantize_tables,
    table_names,
)


def looked_up(weight: np.ndarray, more: np.ndarray | None = None) -> onnx.ModelProto:
    """A graph that looks rows up in one table; the second one is a matrix, not a lookup table."""
    nodes = [helper.make_node("Gather", ["table", "rows"], ["y"], axis=0)]
    initializers = [numpy_helper.from_array(weight, "table")]
    if more is not None:
        nodes = [
            helper.make_node("Gather", ["table", "rows"], ["found"], axis=0),
            helper.make_node("MatMul", ["found", "matrix"], ["y"]),
        ]
        initializers.append(numpy_helper.from_array(more, "matrix"))
    graph = helper.make_graph(
        nodes,
        "look up",
        [helper.make_tensor_value_info("rows", TensorProto.INT64, ["n"])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", "d"])],
        initializers,
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)


def run(model: onnx.ModelProto, rows: np.ndarray) -> np.ndarray:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return session.run(["y"], {"rows": rows.astype(np.int64)})[0]


def stored_bytes(model: onnx.ModelProto) -> int:
    """What the tables take in the file."""
    return sum(len(tensor.raw_data) for tensor in model.graph.initializer)


def random_table(rows: int, columns: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(0).normal(0, 0.1, (rows, columns)).astype(np.float32))


# ------------------------------------------------------------------------------------------ by hand


def test_eight_bits_by_hand() -> None:
    """Each row's largest value becomes 127; the scale 1 / 64 is one that half precision holds."""
    weight = torch.tensor([[127 / 64, -1.0, 0.0], [0.0, 127 / 256, -127 / 256]])
    whole, scale = quantize_table(weight, 8)
    assert whole.tolist() == [[127, -64, 0], [0, 127, -127]]
    assert scale.tolist() == [[1 / 64], [1 / 256]]
    torch.testing.assert_close(dequantize_table(whole, scale, 8), weight)


def test_four_bits_by_hand() -> None:
    """Each column's largest value becomes 7: scales of a half and an eighth."""
    weight = torch.tensor([[3.5, 0.25], [-1.0, 0.875], [0.5, -0.125]])
    whole, scale = quantize_table(weight, 4)
    assert whole.tolist() == [[7, 2], [-2, 7], [1, -1]]
    assert scale.tolist() == [[0.5, 0.125]]
    torch.testing.assert_close(dequantize_table(whole, scale, 4), weight)


def test_the_packed_nibbles_by_hand() -> None:
    """Two numbers a byte, the first in the lower half; an odd count is filled up with nought."""
    weight = np.array([[3.5], [-1.0], [0.5]], np.float32)
    made = quantize_tables(looked_up(weight), 4)
    packed, scales = made.graph.initializer
    assert packed.data_type == TensorProto.INT4
    assert list(packed.dims) == [3, 1]
    assert packed.raw_data == bytes([0x7 | (0xE << 4), 0x1])
    np.testing.assert_array_equal(numpy_helper.to_array(scales), np.array([[0.5]], np.float16))


def test_one_large_value_does_not_cost_the_others_their_precision() -> None:
    """Clipping to half the range halves the error of all other values, for less than it costs the one."""
    weight = torch.full((ROWS_A_BLOCK, 1), 0.07)
    weight[0] = 1.0
    whole, scale = quantize_table(weight, 4)
    kept = (dequantize_table(whole, scale, 4) - weight).square().sum()
    rounded = ((weight * 7).round() / 7 - weight).square().sum()
    assert scale.item() < 1 / 7
    assert kept < rounded


def test_a_block_of_rows_has_its_own_scales() -> None:
    weight = torch.cat([torch.full((ROWS_A_BLOCK, 2), 7.0), torch.full((3, 2), 0.875)])
    whole, scale = quantize_table(weight, 4)
    assert whole.shape == weight.shape
    assert scale.tolist() == [[1.0, 1.0], [0.125, 0.125]]
    torch.testing.assert_close(dequantize_table(whole, scale, 4), weight)


@pytest.mark.parametrize("bits", [8, 4])
def test_a_table_of_zeros_stays_zero(bits: int) -> None:
    weight = torch.zeros(5, 3)
    whole, scale = quantize_table(weight, bits)
    assert (scale > 0).all()
    assert torch.equal(dequantize_table(whole, scale, bits), weight)


@pytest.mark.parametrize(("bits", "share"), [(8, 0.5 / 127), (4, 0.5 / 7)])
def test_no_value_moves_by_more_than_half_a_step(bits: int, share: float) -> None:
    """Where nothing is clipped, and a step is the largest value of the group / 127 or / 7."""
    rng = np.random.default_rng(0)
    weight = torch.from_numpy(rng.choice([-1.0, 1.0, 0.3, 0.45], (64, 8)).astype(np.float32))
    whole, scale = quantize_table(weight, bits)
    moved = (dequantize_table(whole, scale, bits) - weight).abs().max().item()
    assert moved <= share * 1.01


# ------------------------------------------------------------------------------------------ the graph


@pytest.mark.parametrize(("bits", "rows", "columns"), [*product((16, 8, 4), (1, 7, 1_025), (1, 8, 17, 64))])
def test_the_runtime_reads_the_table_that_was_meant(bits: int, rows: int, columns: int) -> None:
    weight = random_table(rows, columns)
    expected = weight.half().float() if bits == 16 else dequantize_table(*quantize_table(weight, bits), bits)
    found = run(quantize_tables(looked_up(weight.numpy()), bits), np.arange(rows))
    np.testing.assert_allclose(found, expected.numpy(), rtol=1e-3, atol=1e-6)  # the product is in fp16


@pytest.mark.parametrize("bits", [8, 4])
def test_quantised_tables_are_near_the_exact_ones(bits: int) -> None:
    weight = random_table(1_000, 16)
    found = run(quantize_tables(looked_up(weight.numpy()), bits), np.arange(1_000))
    error = np.sqrt(np.mean((found - weight.numpy()) ** 2)) / 0.1
    assert error < {8: 0.01, 4: 0.13}[bits]


@pytest.mark.parametrize(("bits", "a_row"), [(16, 2 * 64), (8, 64 + 2), (4, 64 / 2 + 2 * 64 / ROWS_A_BLOCK)])
def test_the_bytes_are_those_of_the_docstring(bits: int, a_row: float) -> None:
    weight = random_table(4 * ROWS_A_BLOCK, 64).numpy()
    assert stored_bytes(quantize_tables(looked_up(weight), bits)) == 4 * ROWS_A_BLOCK * a_row


@pytest.mark.parametrize("columns", [8, 16, 64])
def test_four_bits_are_eight_times_smaller_in_the_file(columns: int) -> None:
    """Measured on the serialised file, scales included, for a table of a shop's size."""
    model = looked_up(random_table(10_000, columns).numpy())
    made = quantize_tables(model, 4)
    assert stored_bytes(model) / stored_bytes(made) >= 7.9
    assert len(model.SerializeToString()) / len(made.SerializeToString()) >= 7.8


def test_only_tables_that_rows_are_looked_up_in_are_found() -> None:
    model = looked_up(random_table(5, 8).numpy(), more=np.eye(8, dtype=np.float32))
    assert table_names(model) == ["table"]
    made = quantize_tables(model, 4)
    assert "matrix" in {tensor.name for tensor in made.graph.initializer}
    assert "table" not in {tensor.name for tensor in made.graph.initializer}
    assert table_names(model) == ["table"], "the graph that was given is not changed"


def test_a_table_that_is_looked_up_twice_is_stored_once() -> None:
    model = looked_up(random_table(6, 8).numpy())
    model.graph.node.append(helper.make_node("Gather", ["table", "rows"], ["again"], axis=0))
    model.graph.output.append(helper.make_tensor_value_info("again", TensorProto.FLOAT, ["n", "d"]))
    made = quantize_tables(model, 8)
    assert [tensor.name for tensor in made.graph.initializer] == ["table.int8", "table.scale"]
    np.testing.assert_array_equal(run(made, np.array([3, 1])).shape, (2, 8))


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("seed", range(5))
def test_rounding_twice_equals_rounding_once(bits: int, seed: int) -> None:
    """Tables that were tuned with the rounding in the loop are stored as they were tuned."""
    rng = np.random.default_rng(seed)
    weight = torch.from_numpy(rng.standard_t(3, (700, 16)).astype(np.float32))
    once = dequantize_table(*quantize_table(weight, bits), bits)
    twice = dequantize_table(*quantize_table(once, bits), bits)
    torch.testing.assert_close(twice, once, rtol=2e-3, atol=0)
