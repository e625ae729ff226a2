"""A fork server imports this: the modules that each step needs, and shorter trainings."""

import tempfile
from pathlib import Path

import pytest
import torch

import pipelines.bench.scale  # noqa: F401
from components.ranker import fitting, scoring
from components.ranker.onnx_export import export_torch
from components.retriever import train_retriever
from tests.operators import read_operators_once

fitting.LEAST_STEPS, train_retriever.LEAST_STEPS, scoring.REPEATS = 40, 20, 3
read_operators_once(pytest.MonkeyPatch())
with tempfile.TemporaryDirectory() as folder:
    export_torch(torch.nn.Linear(1, 1), {"x": torch.ones(1, 1)}, {"x": {}}, "y", Path(folder) / "line.onnx")
