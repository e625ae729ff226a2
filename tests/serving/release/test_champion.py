"""The pointer of a home: written by a promotion, read by endpoint and commands."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from serving.errors import BundleInvalid, NoChampion
from serving.release.bundle import RankingSettings, seal_bundle
from serving.release.champion import Champion, read_champion, write_champion
from serving.stages.retrieval import Quotas

CHAMPION = Champion("b1", "3", "reco", "bundles/b1", "2024-01-01", "2024-01-02")


def test_a_written_champion_is_read_with_its_bundle_under_the_home(tmp_path: Path) -> None:
    write_champion(tmp_path / "home", CHAMPION)
    assert read_champion(tmp_path / "home") == CHAMPION


def test_a_bundle_other_than_the_named_one_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / CHAMPION.path
    with pytest.raises(BundleInvalid, match=f"{folder} is gone: fetch it with `reco promote champion`"):
        CHAMPION.bundle(tmp_path)
    folder.mkdir(parents=True)
    with pytest.raises(BundleInvalid, match=r"has no manifest\.json"):
        CHAMPION.bundle(tmp_path)
    bundle_id = seal_bundle(folder, cut="2024-01-01", settings=RankingSettings(Quotas(), 1.0), made_from={})
    with pytest.raises(BundleInvalid, match=f"is bundle {bundle_id}, expected b1: promote it again"):
        CHAMPION.bundle(tmp_path)
    assert replace(CHAMPION, bundle_id=bundle_id).bundle(tmp_path) == folder


def test_an_endpoint_needs_id_and_path_alone(tmp_path: Path) -> None:
    content = {"bundle_id": "b1", "path": "bundles/b1", "of_a_later_version": 1}
    (tmp_path / "champion.json").write_text(json.dumps(content))
    assert read_champion(tmp_path) == Champion("b1", "", "", "bundles/b1", "", "")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "has no champion: train one with `reco run`"),
        ("", r"not a champion pointer \(it is no JSON\): write it again with `reco promote champion`"),
        ("[]", "not a champion pointer"),
        ('{"bundle_id": "b1"}', "not a champion pointer"),
        ('{"bundle_id": "b1", "path": 7}', "expected a directory under"),
        ('{"bundle_id": "b1", "path": "' + "[" * 9 + '"}', "expected a directory under"),
        ("[" * 100_000, "not a champion pointer"),
        ('{"bundle_id": "b1", "path": "/etc"}', "expected a directory under"),
        ('{"bundle_id": "b1", "path": "bundles/../../b1"}', "expected a directory under"),
    ],
)
def test_a_pointer_that_names_no_bundle_is_refused(tmp_path: Path, content: str | None, message: str) -> None:
    if content is not None:
        (tmp_path / "champion.json").write_text(content)
    with pytest.raises(NoChampion, match=message.replace("{home}", str(tmp_path))) as error:
        read_champion(tmp_path)
    assert error.value.exit_code == 2


def test_a_pipe_a_link_and_a_huge_file_are_refused_at_once(tmp_path: Path) -> None:
    """Opening a pipe would block the thread that follows the pointer, for ever."""
    pointer, good = tmp_path / "champion.json", tmp_path / "good.json"
    os.mkfifo(pointer)
    with pytest.raises(NoChampion, match="expected a regular file"):
        read_champion(tmp_path)
    pointer.unlink()
    write_champion(tmp_path, CHAMPION)
    pointer.rename(good)
    pointer.symlink_to(good)
    with pytest.raises(NoChampion, match="found a link"):
        read_champion(tmp_path)
    pointer.unlink()
    with pointer.open("wb") as stream:
        stream.truncate(400_000_000)
    with pytest.raises(NoChampion, match="at most 65536 bytes"):
        read_champion(tmp_path)
