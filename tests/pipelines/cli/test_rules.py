"""`reco rules init`; check and preview are in tests/pipelines/inspect/test_preview_rules.py."""

import errno
import os
from pathlib import Path

import pytest

from tests.pipelines.cli.conftest import reco


def test_a_first_file_is_written_once_and_is_valid(shop: Path, tmp_path: Path) -> None:
    file = tmp_path / "rules.yaml"
    done = reco(shop, "rules", "init", str(file))
    assert done.exit_code == 0
    assert f"then: reco --home {shop} rules check {file}" in done.stdout
    again = reco(shop, "rules", "init", str(file))
    assert (again.exit_code, f"{file} exists: edit it" in again.output) == (2, True)
    checked = reco(shop, "rules", "check", str(file))
    assert (checked.exit_code, "0 rules" in checked.stdout) == (0, True)


def test_without_a_file_it_is_written_where_the_endpoint_reads(tmp_path: Path) -> None:
    assert reco(tmp_path, "rules", "init").exit_code == 0
    assert "No champion is here yet" in (tmp_path / "rules.yaml").read_text()


def test_a_full_disk_leaves_no_empty_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With an empty one no endpoint would start."""

    def write(self: Path, content: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self))

    monkeypatch.setattr(Path, "write_bytes", write)
    done = reco(tmp_path, "rules", "init")
    assert (done.exit_code, "No space left" in done.output) == (3, True)
    assert not list(tmp_path.glob("*rules*"))


def test_an_unknown_item_is_refused(shop: Path, tmp_path: Path) -> None:
    (tmp_path / "rules.yaml").write_text("{}")
    done = reco(shop, "rules", "preview", "--file", str(tmp_path / "rules.yaml"), "--basket", "type 4")
    assert (done.exit_code, "did you mean 1000004 type 4?" in done.output) == (2, True)
