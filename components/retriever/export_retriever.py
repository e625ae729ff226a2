"""A trained retriever -> its query tower as ONNX, with the difference to PyTorch measured."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import numpy as np
import torch

from components.data.examples import read_retriever_examples
from components.models.two_tower import QueryTower
from components.ranker.certificate import ParityFailed
from components.ranker.onnx_export import export_torch
from components.ranker.ranker_artefact import MANIFEST
from components.retriever.train_retriever import load_retriever, query_inputs
from serving.stages.onnx_runtime import ort

log = logging.getLogger(__name__)

TOLERANCE = 1e-4  # largest difference allowed between PyTorch and ONNX Runtime, both in float32


def export_retriever(retriever: Path, examples: Path, graphs: Path) -> dict[str, float]:
    """Write `query_tower.onnx`, `parity.json` and `params.json` (the training parameters).

    The examples that it was trained on are the inputs of the comparison.

    Returns:
        The largest absolute difference between PyTorch and ONNX Runtime.

    Raises:
        ParityFailed: it is larger than TOLERANCE.
    """
    graphs.mkdir(parents=True, exist_ok=True)
    rows = read_retriever_examples(examples)
    # PyTorch takes a dimension of 1 for a constant: a single basket is repeated.
    some = np.resize(np.arange(len(rows.basket)), min(max(len(rows.basket), 2), 256))
    inputs = query_inputs(rows, some)
    batch = torch.export.Dim("rows", min=1, max=1 << 20)
    tower, file = QueryTower(load_retriever(retriever)).eval(), graphs / "query_tower.onnx"
    export_torch(tower, inputs, {name: {0: batch} for name in inputs}, "vector", file)
    with torch.no_grad():
        expected = tower(*inputs.values()).numpy()
    session = ort.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    got = session.run(["vector"], {name: tensor.numpy() for name, tensor in inputs.items()})[0]
    alone = session.run(["vector"], {name: tensor[:1].numpy() for name, tensor in inputs.items()})[0]
    difference = float(max(np.abs(got - expected).max(), np.abs(alone - expected[:1]).max()))
    log.info("%s: largest difference to PyTorch %.2e", file.name, difference)
    if not difference <= TOLERANCE:
        raise ParityFailed(
            f"{file.name} differs from PyTorch by {difference:.2e}, at most {TOLERANCE:.0e} is allowed"
        )
    parity = {"query_tower_max_difference": difference}
    (graphs / "parity.json").write_text(json.dumps({"tolerance": TOLERANCE, **parity}, indent=1))
    params = json.loads((retriever / MANIFEST).read_bytes())["params"]
    (graphs / "params.json").write_text(json.dumps(params, indent=1))
    return parity
