"""A checkpoint comes back as it was written, or is refused with its fault."""

from pathlib import Path

import pytest
import torch

from components.data.examples import ContractViolation
from components.retriever.checkpoint import read_checkpoint, write_checkpoint


def test_weights_and_config_come_back(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 2)
    write_checkpoint(tmp_path, "linear", model, width=3)
    weights, config = read_checkpoint(tmp_path, "linear")
    assert config == {"kind": "linear", "width": 3}
    assert all(torch.equal(weights[name], tensor) for name, tensor in model.state_dict().items())


def test_a_half_written_one_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ContractViolation, match="no finished checkpoint"):
        read_checkpoint(tmp_path, "dlrm")


def test_another_kind_is_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "two_tower", torch.nn.Linear(1, 1))
    with pytest.raises(ContractViolation, match="holds a two_tower, expected a dlrm"):
        read_checkpoint(tmp_path, "dlrm")
