"""A result names where it comes from and is never half written."""

import json
from pathlib import Path

import pytest

from serving.measurement import measured_on, write_result


@pytest.mark.slow
def test_where_a_measurement_comes_from() -> None:
    told = measured_on()
    assert told["machine"]["cores"] >= 1
    assert told["machine"]["cpu"]
    assert told["software"]["numpy"]
    json.dumps(told)


def test_a_result_replaces_the_old_one(tmp_path: Path) -> None:
    for content in (b"one", b"two"):
        write_result(tmp_path / "out" / "r.json", content)
    assert [f.name for f in (tmp_path / "out").iterdir()] == ["r.json"]
    assert (tmp_path / "out" / "r.json").read_bytes() == b"two"
