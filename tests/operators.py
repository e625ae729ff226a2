"""What PyTorch makes for each export, kept: apart from `conftest`, which would guard a fork server."""

import contextlib
import functools
import importlib

import pytest


def read_operators_once(patch: pytest.MonkeyPatch) -> None:
    """Keep what PyTorch makes for each export: a table of a thousand operators, half of its time."""
    with contextlib.suppress(ImportError, AttributeError):  # a private module: without it, tests take longer
        table = importlib.import_module("torch.onnx._internal.exporter._registration").ONNXRegistry
        patch.setattr(table, "from_torchlib", staticmethod(functools.cache(table.from_torchlib)))
