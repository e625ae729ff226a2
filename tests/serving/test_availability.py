"""The file of excluded items: read, read again, and never trusted blindly."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from serving.availability import Availability


@pytest.fixture
def catalogue() -> Any:
    codes = {"a": 0, "b": 1}
    return SimpleNamespace(codes=lambda ids: np.array([codes[i] for i in ids if i in codes], np.int64))


def test_no_file_excludes_nothing(catalogue: Any, tmp_path: Path) -> None:
    assert Availability(None, catalogue).excluded().tolist() == []
    assert Availability(tmp_path / "none.json", catalogue).excluded().tolist() == []


@pytest.mark.parametrize(
    "content",
    [
        "[]",
        '{"banned": [3]}',
        '{"banned": "b"}',
        '{"banned": ["b"]}x',
        "[" * 100_000,
        '{"out_of_stok": ["b"]}',
        "\xff",
    ],
)
def test_a_broken_file_keeps_the_last_good_list(catalogue: Any, tmp_path: Path, content: str) -> None:
    file = tmp_path / "availability.json"
    file.write_text('{"out_of_stock": ["a"], "banned": ["zzz"]}')
    availability = Availability(file, catalogue)
    assert availability.excluded().tolist() == [0]
    file.write_text(content)
    availability._looked_at = -1.0
    assert availability.excluded().tolist() == [0]


def test_what_is_no_regular_file_is_never_opened(catalogue: Any, tmp_path: Path) -> None:
    """Opening a pipe waits for its other end: the endpoint would stand still."""
    file = tmp_path / "availability.json"
    os.mkfifo(file)
    assert Availability(file, catalogue).excluded().tolist() == []
