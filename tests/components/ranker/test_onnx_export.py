"""What cannot be exported, or cannot be run, is named when the graph is built."""

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from onnx import TensorProto, helper
from torch import Tensor, nn

from components.ranker.onnx_export import (
    OPSET,
    UnsupportedOperator,
    check_operators,
    export_torch,
    replace_nodes,
)


class Doubled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


class Exotic(nn.Module):
    """An integral that ONNX has no operator for."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.special.i1e(x)


class Undecided(nn.Module):
    """Its path depends on its values, which is not a matter of any operator."""

    def forward(self, x: Tensor) -> Tensor:
        return x if x.sum() > 0 else -x


def graph_of(
    operator: str, file: Path, domain: str = "", dtype: int = TensorProto.FLOAT, opset: int = 20
) -> Path:
    """Write a graph of one operator; its kernel, or the operator itself, need not exist."""
    graph = helper.make_graph(
        [helper.make_node(operator, ["x"], ["y"], domain=domain, name="only")],
        "one",
        [helper.make_tensor_value_info("x", dtype, [1])],
        [helper.make_tensor_value_info("y", dtype, [1])],
    )
    imports = [helper.make_opsetid("", opset)]
    if domain:
        imports.append(helper.make_opsetid(domain, 1))
    onnx.save(helper.make_model(graph, opset_imports=imports, ir_version=9), file)
    return file


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


@pytest.mark.slow
def test_an_operator_without_a_form_in_onnx_is_named(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedOperator, match=r"Exotic uses prims.bessel_i1e, which ONNX has no form of"):
        export_torch(Exotic(), {"x": torch.rand(4)}, {"x": {}}, "y", tmp_path / "exotic.onnx")
    assert not (tmp_path / "exotic.onnx").exists()


@pytest.mark.slow
def test_another_failure_of_the_exporter_keeps_its_own_words(tmp_path: Path) -> None:
    with pytest.raises(torch.onnx.OnnxExporterError):
        export_torch(Undecided(), {"x": torch.rand(4)}, {"x": {}}, "y", tmp_path / "undecided.onnx")


def test_an_operator_that_onnx_does_not_know_is_named(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedOperator, match=r"odd.onnx holds the operator Frobnicate,"):
        check_operators(graph_of("Frobnicate", tmp_path / "odd.onnx"))


def test_an_operator_of_an_unknown_domain_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        UnsupportedOperator, match=r"odd.onnx holds the operator Frobnicate.*cannot run on a CPU"
    ):
        check_operators(graph_of("Frobnicate", tmp_path / "odd.onnx", domain="example.shop"))


def test_an_operator_without_a_kernel_for_its_type_is_named(tmp_path: Path) -> None:
    """The operator exists and takes this type by its definition; this runtime has no code for it."""
    with pytest.raises(UnsupportedOperator, match="holds the operator Cos,"):
        check_operators(graph_of("Cos", tmp_path / "half.onnx", dtype=TensorProto.BFLOAT16, opset=22))


def test_a_graph_that_runs_is_let_through(tmp_path: Path) -> None:
    check_operators(graph_of("Cos", tmp_path / "cos.onnx"))


def test_a_file_that_is_no_graph_is_another_error(tmp_path: Path) -> None:
    (tmp_path / "broken.onnx").write_bytes(b"no graph")
    with pytest.raises(Exception, match=r"broken.onnx|protobuf") as caught:
        check_operators(tmp_path / "broken.onnx")
    assert not isinstance(caught.value, UnsupportedOperator)


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
