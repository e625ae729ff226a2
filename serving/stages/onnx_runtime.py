"""ONNX Runtime without its telemetry: every other module takes the library from here."""

import os

# On by default, and read when the library is loaded: it looks up and calls a host of its vendor's.
os.environ["ORT_DISABLE_TELEMETRY"] = "1"

import onnxruntime as ort

__all__ = ["ort"]
