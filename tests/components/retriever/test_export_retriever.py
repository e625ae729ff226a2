"""A graph that differs from the model is refused; test_build_index.py proves that the real one is equal."""

from pathlib import Path

import pytest
import torch

import components.retriever.export_retriever
from components.ranker.certificate import ParityFailed
from components.retriever.export_retriever import export_retriever


class TwoFaced(torch.nn.Module):
    """Says one thing while it is exported and another when it is asked."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()

    def forward(self, history: torch.Tensor, weight: torch.Tensor, basket: torch.Tensor) -> torch.Tensor:
        return weight + (1.0 if torch.compiler.is_exporting() else 2.0)


@pytest.mark.slow
def test_a_graph_that_differs_is_refused(
    toy_line: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(components.retriever.export_retriever, "QueryTower", TwoFaced)
    with pytest.raises(ParityFailed, match=r"query_tower\.onnx differs from PyTorch"):
        export_retriever(toy_line / "retriever", toy_line / "examples", tmp_path / "graphs")
