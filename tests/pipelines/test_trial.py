"""A trial that is broken, or of other code, is built again; the build itself is in docs/test_tutorial.py."""

from pathlib import Path

import pytest

from pipelines import trial
from pipelines.trial import QUESTION, TRIAL, open_trial
from tests.serving.conftest import build_bundle


def test_a_broken_trial_is_built_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    def build(folder: Path, say: object) -> None:
        build_bundle(folder / "bundle")
        (folder / "features").mkdir()
        rows = pa.table({"user_id": [QUESTION["user_id"]], "history": [b""]})
        pq.write_table(rows, folder / "features" / "user_history")

    monkeypatch.setattr(trial, "build_trial", build)
    said: list[str] = []
    first = open_trial(tmp_path, said.append)
    assert open_trial(tmp_path, said.append).bundle.bundle_id == first.bundle.bundle_id
    assert said == []
    (tmp_path / TRIAL / "bundle" / "golden.jsonl").write_text("")
    assert open_trial(tmp_path, said.append).bundle.bundle_id == first.bundle.bundle_id
    assert "golden.jsonl" in said[0]
    assert not (tmp_path / f"{TRIAL}.part").exists()
