"""A torch module -> an ONNX graph that ONNX Runtime is known to run."""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import onnx
import torch
from torch import nn

from serving.stages.onnx_runtime import ort

OPSET = 20


class UnsupportedOperator(Exception):
    """A model holds an operator that cannot be exported, or that the runtime has no kernel for."""


def export_torch(
    model: nn.Module,
    inputs: dict[str, torch.Tensor],
    dynamic: dict[str, dict[int, Any]],
    output: str,
    file: Path,
) -> None:
    """Write the graph of a module in evaluation mode.

    Args:
        model: called with the inputs in their order.
        inputs: real ones by name; the graph's inputs get these names.
        dynamic: for each input, the dimensions whose size may change.
        output: name of the one output.
        file: where to write.

    Raises:
        UnsupportedOperator: naming it.
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
            while cause.__cause__ is not None:
                cause = cause.__cause__
            found = re.search(r"No ONNX function found for \S*op='([\w.]+)'", str(cause))
            if found is None:
                raise
            raise UnsupportedOperator(
                f"{type(model).__name__} uses {found.group(1)}, which ONNX has no form of"
            ) from error
    assert program is not None  # only the old exporter returns nothing
    graph = program.model_proto
    for node in graph.graph.node:
        del node.metadata_props[:]  # where in which source file it came from: a seventh of a small graph
    onnx.save(graph, str(file))
    onnx.checker.check_model(str(file))
    check_operators(file)


def replace_nodes(
    model: onnx.ModelProto, instead: Callable[[onnx.NodeProto], Sequence[onnx.NodeProto]]
) -> None:
    """Put in place of each node of a graph what `instead` returns for it; the node itself to keep it."""
    made = [new for node in model.graph.node for new in instead(node)]
    del model.graph.node[:]
    model.graph.node.extend(made)


def check_operators(file: Path) -> None:
    """Load a graph once, so that an operator without a kernel is found when it is built, not when it serves.

    Raises:
        UnsupportedOperator: naming it.
    """
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 4
    try:
        ort.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # ONNX Runtime's errors share no base class of their own
        found = re.search(
            r"implementation for (?:the node \S*?:)?(\w+)\(|No Op registered for (\w+)"
            r"|(\w+)\(-?\d+\) is not a registered function",
            str(error),
        )
        if found is None:
            raise
        raise UnsupportedOperator(
            f"{file.name} holds the operator {found.group(found.lastindex or 0)}, "
            f"which ONNX Runtime {ort.__version__} cannot run on a CPU"
        ) from error
