"""Imported by a fork server: what each step would import and read again, and less work in each."""

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
