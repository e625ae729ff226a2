"""An exported graph has the names and free dimensions asked for; nodes are replaced in their places."""

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from onnx import helper
from torch import Tensor, nn

from components.ranker.onnx_export import OPSET, export_torch, replace_nodes


class Doubled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


@pytest.mark.slow
def test_the_graph_has_the_names_and_the_free_dimension_asked_for(tmp_path: Path) -> None:
    rows = torch.export.Dim("rows", min=1, max=100)
    file = tmp_path / "doubled.onnx"
    export_torch(Doubled(), {"x": torch.rand(4, 2)}, {"x": {0: rows}}, "twice", file)
    session = ort.InferenceSession(file, providers=["CPUExecutionProvider"])
    given = np.arange(14, dtype=np.float32).reshape(7, 2)
    (found,) = session.run(["twice"], {"x": given})
    np.testing.assert_array_equal(found, 2 * given)
    model = onnx.load(file)
    assert [known.version for known in model.opset_import if known.domain == ""] == [OPSET]
    assert not any(node.metadata_props for node in model.graph.node), "no file names of this machine"


class Exotic(nn.Module):
    """An integral that ONNX has no operator for."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.special.i1e(x)


@pytest.mark.slow
def test_an_operator_without_a_form_in_onnx_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"Exotic has no form in ONNX: .*bessel_i1e"):
        export_torch(Exotic(), {"x": torch.rand(4)}, {"x": {}}, "y", tmp_path / "exotic.onnx")
    assert not (tmp_path / "exotic.onnx").exists()


def test_nodes_are_replaced_in_their_places() -> None:
    names = ["a", "b", "c", "d"]
    nodes = [helper.make_node("Neg", [i], [o], name=o) for i, o in zip(["x", *names], names, strict=False)]
    model = helper.make_model(helper.make_graph(nodes, "chain", [], []))

    def instead(node: onnx.NodeProto) -> list[onnx.NodeProto]:
        if node.name == "a":
            return []
        if node.name == "c":
            return [helper.make_node("Abs", [node.input[0]], ["c1"]), helper.make_node("Exp", ["c1"], ["c"])]
        return [node]

    replace_nodes(model, instead)
    assert [node.op_type for node in model.graph.node] == ["Neg", "Abs", "Exp", "Neg"]
    assert [list(node.output) for node in model.graph.node] == [["b"], ["c1"], ["c"], ["d"]]
