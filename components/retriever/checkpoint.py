"""CONTRACT weights + config on disk, from a training step to the export."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from components.data.examples import ContractViolation
from components.home import write_json


def write_checkpoint(path: Path, kind: str, model: nn.Module, **config: Any) -> None:
    """Write a model's weights (`weights.npz`, no pickle) and the configuration to build it again."""
    path.mkdir(parents=True, exist_ok=True)
    np.savez(path / "weights.npz", **{name: tensor.numpy() for name, tensor in model.state_dict().items()})
    write_json(path / "manifest.json", {"kind": kind, **config})


def read_checkpoint(path: Path, kind: str) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return a checkpoint's weights and config.

    Raises:
        ContractViolation: the checkpoint is missing, or holds another kind of model.
    """
    if not (path / "manifest.json").is_file():
        raise ContractViolation(
            f"{path} holds no finished checkpoint (no manifest.json): train the {kind} again"
        )
    config = json.loads((path / "manifest.json").read_text())
    if config["kind"] != kind:
        raise ContractViolation(
            f"{path} holds a {config['kind']}, expected a {kind}: pass the right artefact"
        )
    with np.load(path / "weights.npz", allow_pickle=False) as stored:
        weights = {name: torch.from_numpy(stored[name]) for name in stored.files}
    return weights, config
