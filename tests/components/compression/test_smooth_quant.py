"""The same function before and after; activations and weights share the difficulty by the paper's rule."""

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

from components.compression.smooth_quant import smooth

FIRST = np.array([[1.0, 4.0], [-2.0, 1.0], [0.5, -0.25]], np.float32)  # (out, in)
SECOND = np.array([[1.0, -1.0, 0.5]], np.float32)


@pytest.fixture
def model() -> onnx.ModelProto:
    """Two linear layers with a nonlinearity between them, as a ranker's MLP is exported."""
    graph = helper.make_graph(
        [
            helper.make_node("Gemm", ["x", "w1", "b1"], ["z"], transB=1),
            helper.make_node("Sigmoid", ["z"], ["gate"]),
            helper.make_node("Mul", ["z", "gate"], ["a"]),
            helper.make_node("Gemm", ["a", "w2", "b2"], ["y"], transB=1),
        ],
        "mlp",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 2])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 1])],
        [
            numpy_helper.from_array(FIRST, "w1"),
            numpy_helper.from_array(np.array([0.1, 0.2, 0.3], np.float32), "b1"),
            numpy_helper.from_array(SECOND, "w2"),
            numpy_helper.from_array(np.array([0.5], np.float32), "b2"),
        ],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)


def run(model: onnx.ModelProto, x: np.ndarray) -> np.ndarray:
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(["y"], {"x": x})[0]


def initializer(model: onnx.ModelProto, name: str) -> np.ndarray:
    return numpy_helper.to_array(next(t for t in model.graph.initializer if t.name == name))


@pytest.mark.parametrize(
    "measured", [[[1.0, 50.0], [0.25, -100.0]], [[0.0, 3.0]]], ids=["both", "one column"]
)
def test_the_function_stays_the_same(model: onnx.ModelProto, measured: list[list[float]]) -> None:
    """Also where a column was always nought in the sample."""
    x = np.random.default_rng(0).normal(0, 5, (200, 2)).astype(np.float32)
    before = run(model, x)
    made = smooth(model, [{"x": np.array(measured, np.float32)}])
    np.testing.assert_allclose(run(made, x), before, rtol=1e-4, atol=1e-4)


def test_the_scale_by_hand(model: onnx.ModelProto) -> None:
    """s = sqrt(max|x|) / sqrt(max|w|): sqrt(1 / 2) and sqrt(100 / 4)."""
    batches = ([[1.0, 50.0], [-0.5, 10.0]], [[0.25, -100.0]])
    made = smooth(model, [{"x": np.array(batch, np.float32)} for batch in batches])
    scale = np.array([np.sqrt(0.5), 5.0])
    np.testing.assert_allclose(initializer(made, "z.smooth"), 1 / scale, rtol=1e-6)
    np.testing.assert_allclose(initializer(made, "w1"), FIRST * scale, rtol=1e-6)
