"""Trained checkpoints -> ONNX graphs, with the difference to PyTorch measured."""

from __future__ import annotations

import json
import logging
import warnings
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import torch
from torch import nn

from components.checkpoint import read_checkpoint
from components.examples import read_ranker_examples, read_retriever_examples
from components.models.two_tower import QueryTower
from components.train_ranker import load_ranker
from components.train_retriever import load_retriever
from feature_repo.schema import BASKET_LENGTH

log = logging.getLogger(__name__)

OPSET = 20
TOLERANCE = 1e-4  # largest difference allowed between PyTorch and ONNX Runtime, both in float32


class ParityFailed(Exception):
    """An exported graph does not say the same as the model it came from."""


def export_onnx(retriever: Path, ranker: Path, examples: Path, graphs: Path) -> dict[str, float]:
    """Write `query_tower.onnx`, `ranker.onnx`, `parity.json` and `params.json`: what they were trained with.

    Args:
        retriever: checkpoint of `train_retriever`.
        ranker: checkpoint of `train_ranker`.
        examples: the examples they were trained on; real inputs for the comparison.
        graphs: the directory to write.

    Returns:
        The largest absolute difference between PyTorch and ONNX Runtime for each graph.

    Raises:
        ParityFailed: a difference is larger than TOLERANCE.
    """
    graphs.mkdir(parents=True, exist_ok=True)
    batch = torch.export.Dim("rows", min=1, max=1 << 20)
    retrieval = read_retriever_examples(examples)
    some = slice(0, min(256, len(retrieval.basket)))
    tower_inputs = (
        torch.from_numpy(retrieval.history[some].astype(np.int64)),
        torch.from_numpy(retrieval.history_weight[some].astype(np.float32)),
        torch.from_numpy(retrieval.basket[some, :BASKET_LENGTH].astype(np.int64)),
    )
    rows = read_ranker_examples(examples, "train")
    many = slice(0, min(4_096, len(rows.label)))
    ranker_inputs = (
        torch.from_numpy(rows.dense[many].copy()),
        torch.from_numpy(rows.categorical[many].astype(np.int64)),
    )
    parity = {
        "query_tower_max_difference": _export(
            QueryTower(load_retriever(retriever)).eval(),
            tower_inputs,
            ["history", "history_weight", "basket"],
            "vector",
            batch,
            graphs / "query_tower.onnx",
        ),
        "ranker_max_difference": _export(
            load_ranker(ranker),
            ranker_inputs,
            ["dense", "categorical"],
            "score",
            batch,
            graphs / "ranker.onnx",
        ),
    }
    (graphs / "parity.json").write_text(json.dumps({"tolerance": TOLERANCE, **parity}, indent=1))
    trained = (read_checkpoint(retriever, "two_tower"), read_checkpoint(ranker, "dlrm"))
    params = {name: given for _, config in trained for name, given in config["params"].items()}
    (graphs / "params.json").write_text(json.dumps(params, indent=1))
    return parity


def _export(
    model: nn.Module,
    inputs: tuple[torch.Tensor, ...],
    names: list[str],
    output: str,
    batch: torch.export.Dim,
    file: Path,
) -> float:
    with torch.no_grad():
        expected = model(*inputs).numpy()
    with warnings.catch_warnings():
        # The exporter warns of its own internals (deprecated pytree calls), nothing a user can mend.
        warnings.simplefilter("ignore")
        program = torch.onnx.export(
            model,
            inputs,
            dynamo=True,
            input_names=names,
            output_names=[output],
            opset_version=OPSET,
            dynamic_shapes=tuple({0: batch} for _ in inputs),
            verbose=False,
        )
    assert program is not None  # only the old exporter returns nothing
    program.save(str(file), external_data=False)
    onnx.checker.check_model(str(file))
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    session = ort.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
    got = session.run([output], {name: tensor.numpy() for name, tensor in zip(names, inputs, strict=True)})[0]
    alone = session.run(
        [output], {name: tensor[:1].numpy() for name, tensor in zip(names, inputs, strict=True)}
    )[0]
    difference = float(max(np.abs(got - expected).max(), np.abs(alone - expected[:1]).max()))
    log.info("%s: largest difference to PyTorch %.2e", file.name, difference)
    if not difference <= TOLERANCE:
        raise ParityFailed(
            f"{file.name} differs from PyTorch by {difference:.2e}, at most {TOLERANCE:.0e} is allowed"
        )
    return difference
