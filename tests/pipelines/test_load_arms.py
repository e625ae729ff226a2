"""Which servers there are, and which of them can be started here."""

import json
import shutil
from pathlib import Path

import pytest

from components.home import Champion
from pipelines.load_arms import ARMS, NULL, OURS, Arm, Scene, choose_arms, fill_store, student_of
from pipelines.runs import new_run
from serving.online_features import RedisStore
from serving.settings import Settings


def scene(student: Path | None = None) -> Scene:
    return Scene(Path("bundle"), Settings(), Path("feast"), student)


def test_ours_is_always_among_them() -> None:
    assert [arm.name for arm in choose_arms(["fastapi", NULL])] == [OURS, "fastapi", NULL]
    assert choose_arms([]) == ARMS
    with pytest.raises(ValueError, match="no arm 'triton': choose among ours"):
        choose_arms(["triton"])


def test_an_arm_says_why_it_is_missing() -> None:
    later = Arm("later", "", lambda _: [], {"RECO_FROM_THE_FUTURE": "1", "RECO_DEADLINE_MS": "50"})
    assert later.missing(scene()) == "this version has no RECO_FROM_THE_FUTURE"
    eager = next(arm for arm in ARMS if arm.name == "eager")
    assert "keeps the torch weights" in eager.missing(scene())
    assert eager.missing(scene(Path("student"))) == ""


def test_each_arm_is_one_command_with_the_scene_in_it() -> None:
    for arm in ARMS:
        command = arm.command(scene(Path("student")))
        assert all(isinstance(word, str) for word in command)
        if command[2].startswith("pipelines.load_arms_") and len(command) > 3:
            given = json.loads(command[3])
            assert given["bundle"] == "bundle"
            assert given.get("student") in (None, "student")
            assert given.get("feast_home") in (None, "feast")
    assert len({arm.name for arm in ARMS}) == len(ARMS)


def test_the_student_is_that_of_the_champions_own_run(tmp_path: Path) -> None:
    champion = Champion("b1", "1", "m", "bundle", "2024-01-01", "2024-01-02")
    assert student_of(tmp_path, champion) is None
    for bundle_id in ("b1", "b2"):
        run = new_run(tmp_path, "training", {}, ["evaluate-bundle", "distill-ranker"])
        evaluated, student = run.artifacts("evaluate-bundle") / "evaluated", run.artifacts("distill-ranker")
        evaluated.mkdir(parents=True)
        (evaluated / "manifest.json").write_text(json.dumps({"bundle_id": bundle_id}))
        (student / "ranker").mkdir(parents=True)
        (student / "ranker" / "weights.npz").touch()
        if bundle_id == "b1":
            expected = student / "ranker"
    assert student_of(tmp_path, champion) == expected
    shutil.rmtree(expected)
    assert student_of(tmp_path, champion) is None


@pytest.mark.slow
def test_the_endpoint_reads_what_was_written_through_feast(
    toy_line: Path, valkey: tuple[str, object], tmp_path: Path
) -> None:
    import pyarrow.parquet as pq

    offline_store = toy_line / "home" / "offline_store"
    counts = fill_store(offline_store, tmp_path / "feast", valkey[0])
    rows = pq.read_table(offline_store / "user_history" / "snapshots.parquet").to_pandas()
    first = rows.sort_values("event_timestamp").drop_duplicates("user_id")
    assert counts["users"] == len(first)
    store = RedisStore(valkey[0], timeout_ms=30_000.0)
    for user, history in zip(first["user_id"], first["history"], strict=True):
        row = store.read(user)
        assert row is not None
        assert row.history == history
    store.close()
