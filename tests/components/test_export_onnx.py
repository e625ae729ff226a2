"""Exported graphs say what the models say; one that does not is refused."""

import json
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest
import torch

from components.examples import read_ranker_examples
from components.export_onnx import TOLERANCE, ParityFailed, _export
from components.train_ranker import load_ranker

pytestmark = pytest.mark.slow


def test_parity_is_measured_and_small(toy_line: Path) -> None:
    parity = json.loads((toy_line / "graphs" / "parity.json").read_text())
    assert 0 <= parity["ranker_max_difference"] <= TOLERANCE
    assert 0 <= parity["query_tower_max_difference"] <= TOLERANCE


@pytest.mark.parametrize("rows", [1, 7, 500])
def test_any_number_of_rows_scores_like_pytorch(toy_line: Path, rows: int) -> None:
    data = read_ranker_examples(toy_line / "examples", "train")
    dense, categorical = data.dense[:rows].copy(), data.categorical[:rows].astype(np.int64)
    session = ort.InferenceSession(
        str(toy_line / "graphs" / "ranker.onnx"), providers=["CPUExecutionProvider"]
    )
    scores = session.run(["score"], {"dense": dense, "categorical": categorical})[0]
    with torch.no_grad():
        expected = load_ranker(toy_line / "ranker")(
            torch.from_numpy(dense), torch.from_numpy(categorical)
        ).numpy()
    np.testing.assert_allclose(scores, expected, atol=1e-6)


class Drifting(torch.nn.Module):
    """Says something else each time it is asked: no graph can be its equal."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = 0

    def forward(self, dense: torch.Tensor) -> torch.Tensor:
        self.asked += 1
        return dense * float(self.asked)


def test_a_graph_that_differs_is_refused(tmp_path: Path) -> None:
    batch = torch.export.Dim("rows", min=1, max=1024)
    with pytest.raises(ParityFailed, match=r"graph\.onnx differs from PyTorch"):
        _export(Drifting(), (torch.ones(4, 2),), ["dense"], "score", batch, tmp_path / "graph.onnx")
