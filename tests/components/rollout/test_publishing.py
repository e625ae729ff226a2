"""A bundle that is written once, whole, and never over another one."""

import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from components.home import Conflict
from components.rollout.publishing import PlaceRefused, PlaceUnreachable, publish_bundle
from serving.release.bundle import verify_files
from serving.release.manifest import read_manifest


@pytest.fixture
def bundle(evaluated: Callable[..., Path]) -> Path:
    folder = evaluated("one")
    (folder / "bundle.sig").write_text("signed")
    return folder


def files(place: Path) -> set[str]:
    return {file.relative_to(place).as_posix() for file in place.rglob("*") if file.is_file()}


def inodes(place: Path) -> dict[str, int]:
    return {name: (place / name).stat().st_ino for name in files(place)}


def test_a_bundle_is_written_once_with_its_signatures(bundle: Path, tmp_path: Path) -> None:
    place = (tmp_path / "store" / "b1").as_uri()
    publish_bundle(bundle, place)
    assert files(tmp_path / "store" / "b1") == files(bundle)
    written = inodes(tmp_path / "store" / "b1")
    (bundle / "bundle.sig").write_text("signed again")
    (bundle / "provenance.sig").write_text("made")
    publish_bundle(bundle, place)
    again = inodes(tmp_path / "store" / "b1").items() - written.items()
    assert {name for name, _ in again} == {"bundle.sig", "provenance.sig"}
    assert (tmp_path / "store" / "b1" / "bundle.sig").read_text() == "signed again"
    assert (tmp_path / "store" / "b1" / "provenance.sig").read_text() == "made"
    (tmp_path / "store" / "b1" / "manifest.json").write_text("{}")
    with pytest.raises(Conflict, match="another bundle lies at"):
        publish_bundle(bundle, place)


def test_a_copy_that_was_stopped_is_written_again(bundle: Path, tmp_path: Path) -> None:
    half = tmp_path / "store" / "b1" / "evaluation.json"
    half.parent.mkdir(parents=True)
    half.write_text("")
    publish_bundle(bundle, (tmp_path / "store" / "b1").as_uri())
    assert half.read_text() == (bundle / "evaluation.json").read_text()


def test_a_file_that_a_stopped_copy_left_behind_spoils_no_bundle(bundle: Path, tmp_path: Path) -> None:
    place = tmp_path / "store" / "b1"
    (place / "ranker.onnx" / "in the way").mkdir(parents=True)
    with pytest.raises(PlaceUnreachable, match="cannot be written"):
        publish_bundle(bundle, place.as_uri())
    shutil.rmtree(place / "ranker.onnx")
    publish_bundle(bundle, place.as_uri())
    assert len(files(place)) == len(files(bundle)) + 1
    verify_files(place, read_manifest(place))


def test_a_place_that_is_unknown_away_or_cannot_be_written_is_named(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(PlaceRefused, match="expected s3://"):
        publish_bundle(bundle, "ftp://somewhere/b1")

    for said, error, told in (
        ("could not resolve host", PlaceUnreachable, "s3://shop/b1 does not answer"),
        ("bucket not found", PlaceRefused, "make the bucket first"),
    ):
        asked = Mock(side_effect=OSError(f"When resolving region for bucket 'shop': {said}"))
        monkeypatch.setattr("pyarrow.fs.FileSystem", SimpleNamespace(from_uri=asked))
        with pytest.raises(error, match=told):
            publish_bundle(bundle, "s3://shop/b1")
    monkeypatch.undo()
    (tmp_path / "file").write_text("")
    with pytest.raises(PlaceUnreachable, match="cannot be written"):
        publish_bundle(bundle, (tmp_path / "file" / "b1").as_uri())
