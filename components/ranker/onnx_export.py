"""A torch module -> an ONNX graph, and changes of its nodes."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import onnx
import torch
from torch import nn

OPSET = 20


def export_torch(
    model: nn.Module,
    inputs: dict[str, torch.Tensor],
    dynamic: dict[str, dict[int, Any]],
    output: str,
    file: Path,
) -> None:
    """Write the graph of a module in evaluation mode. Its first session finds operators without a kernel.

    Args:
        model: called with the inputs in their order.
        inputs: real ones by name; the graph's inputs get these names.
        dynamic: for each input, the dimensions whose size may change.
        output: name of the one output.
        file: where to write.

    Raises:
        ValueError: ONNX has no form of an operator, which it names.
    """
    for name in ("onnx_ir", "onnxscript", "torch.onnx"):  # they log thirty lines a graph about their clean-up
        logging.getLogger(name).setLevel(logging.ERROR)
    with warnings.catch_warnings():
        # The exporter warns of its own internals (deprecated pytree calls), nothing a user can mend.
        warnings.simplefilter("ignore")
        try:
            program = torch.onnx.export(
                model,
                tuple(inputs.values()),
                dynamo=True,
                input_names=list(inputs),
                output_names=[output],
                opset_version=OPSET,
                dynamic_shapes=tuple(dynamic[name] for name in inputs),
                verbose=False,
            )
        except torch.onnx.OnnxExporterError as error:
            cause: BaseException = error
            while cause.__cause__ is not None:  # the last one names the operator
                cause = cause.__cause__
            raise ValueError(f"{type(model).__name__} has no form in ONNX: {cause}") from error
    assert program is not None  # only the old exporter returns nothing
    graph = program.model_proto
    for node in graph.graph.node:
        del node.metadata_props[:]  # where in which source file it came from: a seventh of a small graph
    onnx.save(graph, str(file))
    onnx.checker.check_model(str(file))


def replace_nodes(
    model: onnx.ModelProto, instead: Callable[[onnx.NodeProto], Sequence[onnx.NodeProto]]
) -> None:
    """Put in place of each node of a graph what `instead` returns for it; the node itself to keep it."""
    made = [new for node in model.graph.node for new in instead(node)]
    del model.graph.node[:]
    model.graph.node.extend(made)
