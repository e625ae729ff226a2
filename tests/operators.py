"""What PyTorch reads for each export, kept. No program of a test gets the conditions of `conftest` by it."""

import contextlib
import functools
import importlib

import pytest


def read_operators_once(patch: pytest.MonkeyPatch) -> None:
    """Keep what PyTorch reads for each export: the source of a thousand operators, a third of its time."""
    with contextlib.suppress(ImportError, AttributeError):  # a private module: without it, tests take longer
        onnxscript_apis = importlib.import_module("torch.onnx._internal._lazy_import").onnxscript_apis
        patch.setattr(onnxscript_apis, "get_torchlib_ops", functools.cache(onnxscript_apis.get_torchlib_ops))
