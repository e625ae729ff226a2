"""SmoothQuant on an ONNX graph: outliers of activations move into the weights before INT8."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx
from onnx import helper, numpy_helper

from serving.stages.onnx_runtime import ort

ALPHA = 0.5  # how much of the difficulty the weights take, as in the paper


def smooth(model: onnx.ModelProto, feeds: Sequence[dict[str, np.ndarray]]) -> onnx.ModelProto:
    """Return the graph with each linear layer's inputs divided, and its weights multiplied, column by column.

    Xiao et al., "SmoothQuant" (arXiv 2211.10438): with s = max|x|^ALPHA / max|w|^(1 - ALPHA) for each input
    column, (x / s) @ (s w) is the same product, but neither side has a column far larger than the others.
    Here a nonlinearity stands before each layer, so that the division stays a node of its own.

    Args:
        model: the graph; it is changed.
        feeds: inputs of the graph, to see how large activations get.
    """
    layers = [node for node in model.graph.node if node.op_type == "Gemm"]
    largest = _largest(model, [node.input[0] for node in layers], feeds)
    known = {tensor.name: tensor for tensor in model.graph.initializer}
    for node in layers:
        x, w = node.input[0], node.input[1]
        weight = numpy_helper.to_array(known[w])  # (out, in)
        over = np.maximum(np.abs(weight).max(0), 1e-5)
        scale = np.maximum(largest[x], 1e-5) ** ALPHA / over ** (1 - ALPHA)
        scale = np.clip(scale, 1e-3, 1e3).astype(np.float32)
        known[w].CopyFrom(numpy_helper.from_array(weight * scale, w))
        divisor = numpy_helper.from_array(1 / scale, f"{node.output[0]}.smooth")
        model.graph.initializer.append(divisor)
        smoothed = f"{node.output[0]}.smoothed"
        place = list(model.graph.node).index(node)
        model.graph.node.insert(place, helper.make_node("Mul", [x, divisor.name], [smoothed]))
        node.input[0] = smoothed
    return model


def _largest(
    model: onnx.ModelProto, names: Sequence[str], feeds: Sequence[dict[str, np.ndarray]]
) -> dict[str, np.ndarray]:
    """Return the largest magnitude of each column of some tensors inside the graph."""
    seen = onnx.ModelProto()
    seen.CopyFrom(model)
    wanted = list(dict.fromkeys(names))
    seen.graph.output.extend(helper.make_empty_tensor_value_info(name) for name in wanted)
    session = ort.InferenceSession(seen.SerializeToString(), providers=["CPUExecutionProvider"])
    found = {name: np.zeros(1, np.float32) for name in wanted}
    for feed in feeds:
        for name, value in zip(wanted, session.run(wanted, feed), strict=True):
            found[name] = np.maximum(found[name], np.abs(value).max(0))
    return found
