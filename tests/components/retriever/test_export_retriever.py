"""The exported query tower computes the same as the model; a different one is refused."""

import json
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest
import torch

import components.retriever.export_retriever
from components.data.examples import read_retriever_examples
from components.models.two_tower import QueryTower
from components.ranker.certificate import ParityFailed
from components.retriever.export_retriever import TOLERANCE, export_retriever
from components.retriever.train_retriever import load_retriever
from feature_repo.schema import BASKET_LENGTH

pytestmark = pytest.mark.slow


def test_parity_is_measured_and_small(toy_line: Path) -> None:
    parity = json.loads((toy_line / "graphs" / "parity.json").read_text())
    assert 0 <= parity["query_tower_max_difference"] <= TOLERANCE


@pytest.mark.parametrize("rows", [1, 7, 50])
def test_any_number_of_rows_equals_pytorch(toy_line: Path, rows: int) -> None:
    data = read_retriever_examples(toy_line / "examples")
    inputs = {
        "history": data.history[:rows].astype(np.int64),
        "history_weight": data.history_weight[:rows].astype(np.float32),
        "basket": data.basket[:rows, :BASKET_LENGTH].astype(np.int64),
    }
    session = ort.InferenceSession(str(toy_line / "graphs" / "query_tower.onnx"))
    tower = QueryTower(load_retriever(toy_line / "retriever")).eval()
    with torch.no_grad():
        expected = tower(*(torch.from_numpy(array) for array in inputs.values())).numpy()
    np.testing.assert_allclose(session.run(["vector"], inputs)[0], expected, atol=1e-5)


class TwoFaced(torch.nn.Module):
    """Says one thing while it is exported and another when it is asked."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()

    def forward(self, history: torch.Tensor, weight: torch.Tensor, basket: torch.Tensor) -> torch.Tensor:
        return weight + (1.0 if torch.compiler.is_exporting() else 2.0)


def test_a_graph_that_differs_is_refused(
    toy_line: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(components.retriever.export_retriever, "QueryTower", TwoFaced)
    with pytest.raises(ParityFailed, match=r"query_tower\.onnx differs from PyTorch"):
        export_retriever(toy_line / "retriever", toy_line / "examples", tmp_path / "graphs")
