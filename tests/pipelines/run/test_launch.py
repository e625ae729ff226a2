"""Training and retraining without a command line; data sets from runs."""

import json
import os
import shlex
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from components.data.ingest_events import TooManyRefused, ingest_events
from components.home import Conflict
from feature_repo.events import read_dataset
from feature_repo.stream.erasure import Forgotten, forget, microseconds
from monitoring.retraining import COOL_DOWN
from pipelines.run.arguments import ArgumentsInvalid
from pipelines.run.launch import (
    DATA_NAMES,
    absolute,
    champions_items,
    check_champions_data,
    check_data,
    data_to_replay,
    dataset_of,
    evaluated_run,
    newest_data,
    promoted,
    retrain,
    retraining_result,
    run_datasets,
    start_training,
    train_toy_shop,
)
from pipelines.run.local_run import StepFailed
from pipelines.run.runs import Run, RunUnknown, champions_run, list_runs, new_run
from serving.release.bundle import RankingSettings, seal_bundle
from serving.release.champion import Champion, read_champion, write_champion
from serving.release.manifest import read_manifest
from serving.stages.retrieval import Quotas
from tests.pipelines.conftest import VERDICT, promote_run
from tests.serving.conftest import build_bundle


@pytest.fixture
def drifted(tmp_path: Path) -> Path:
    """A home whose champion `good` was promoted by the second of three runs."""
    home = tmp_path / "home"
    promote_run(home, "toy", "older")
    good = promote_run(home, "/shop", "good", version="2")
    good.arguments |= {"train_until": "2024-01-01", "online_store": "redis://127.0.0.1:16379/0"}
    good.size = "fast"
    good.save()
    refused = new_run(home, "training", {"data": "complete-journey"}, ["promote-bundle"])
    refused.step("promote-bundle").status = "failed"
    refused.save()
    return home


ARCHIVE = "offline_store"  # of a home: what its own stream has kept


def promote_runs(home: Path, *data: str) -> None:
    for one in data:
        promote_run(home, str(home / one) if one == ARCHIVE else one)


@pytest.mark.parametrize(
    ("promoted", "data", "warns"),
    [
        ([], "toy", False),
        (["/my/shop"], "/my/shop/newer", False),
        (["toy"], "toy", False),
        (["toy"], "/my/shop", False),
        (["toy"], "complete-journey", True),
        ([ARCHIVE, "toy", ARCHIVE], "toy", False),
        ([ARCHIVE, "toy", ARCHIVE], "complete-journey", True),
    ],
)
def test_only_a_built_in_shop_that_replaces_the_other_one_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, promoted: list[str], data: str, warns: bool
) -> None:
    promote_runs(tmp_path, *promoted)
    check_champions_data(tmp_path, data)
    said = "the champion learnt from toy, and a model of complete-journey replaces it; to keep"
    assert [message.startswith(said) for message in caplog.messages] == ([True] if warns else [])


@pytest.mark.parametrize(
    ("promoted", "learnt"),
    [
        (["/my/shop"], "/my/shop"),
        ([ARCHIVE], r"\S+offline_store"),
        (["toy", ARCHIVE, "/my shop"], "'/my shop'"),
    ],
)
def test_a_built_in_shop_replaces_no_champion_of_own_data(
    tmp_path: Path, promoted: list[str], learnt: str
) -> None:
    promote_runs(tmp_path, *promoted)
    said = (
        rf"learnt from .*: train with --data {learnt}, or give complete-journey a home of its own with --home"
    )
    with pytest.raises(ArgumentsInvalid, match=said):
        start_training(tmp_path, {}, "fast", "", sys.stderr)


def test_beside_a_damaged_pointer_the_newest_run_that_promoted_says_whose_champion_it_is(
    tmp_path: Path,
) -> None:
    promote_runs(tmp_path, "/my shop")
    new_run(tmp_path, "training", {"data": "toy"}, ["promote-bundle"]).save()  # it promoted nothing
    promote_runs(tmp_path, ARCHIVE)
    (tmp_path / "champion.json").write_text("{")
    with pytest.raises(ArgumentsInvalid, match=r"train with --data \S+offline_store, or give toy a home"):
        check_champions_data(tmp_path, "toy")


def test_a_shop_of_which_the_champion_knows_no_item_is_not_replayed(tmp_path: Path) -> None:
    home, other = tmp_path / "home", shop_of(tmp_path / "other shop", "ann,b1,milk,2024-01-01")
    assert data_to_replay(home, "toy", "--data") == home / "datasets" / "toy"  # nothing was learnt here
    manifest = read_manifest(build_bundle(home / "bundles" / "b"))
    write_champion(home, Champion(manifest["bundle_id"], "1", "reco", "bundles/b", manifest["cut"], ""))
    for data in ("toy", str(other)):
        with pytest.raises(
            ArgumentsInvalid, match=r"--replay .* knows none of its \d+ items, so it is"
        ) as refused:
            data_to_replay(home, data, "--replay")
        assert f"--replay {shlex.quote(data)}: " in str(refused.value)
    checked = dataset_of(home, str(other))
    with pytest.raises(ArgumentsInvalid, match="another shop"):
        data_to_replay(home, str(checked), "--data")
    assert checked.is_dir(), "it was not made for the replay"
    item = min(champions_items(home))
    promote_run(home, "complete-journey")  # and its bundle cannot be read
    with pytest.raises(ArgumentsInvalid, match="another shop"):
        data_to_replay(home, "toy", "--replay")
    write_champion(home, Champion(manifest["bundle_id"], "1", "reco", "bundles/b", manifest["cut"], ""))
    mine = shop_of(tmp_path / "mine", "ann,b1,milk,2024-01-01", f"ann,b1,{item},2024-01-01")
    assert data_to_replay(home, str(mine), "--data").is_dir()


def start_with(monkeypatch: pytest.MonkeyPatch, start: Callable[..., Run]) -> None:
    monkeypatch.setattr("pipelines.run.launch.start_training", start)


def test_retraining_uses_the_arguments_of_the_champions_run(
    drifted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Any] = []

    def start(home: Path, given: dict[str, Any], size: str, *_: object) -> Run:
        started.append((given, size))
        return new_run(home, "training", given, ["promote-bundle"])

    start_with(monkeypatch, start)
    assert retrain(drifted, VERDICT, sys.stderr, COOL_DOWN)["started"]
    assert started == [({"data": "/shop"}, "fast")]
    again = retrain(drifted, VERDICT, sys.stderr, COOL_DOWN)
    assert (again["started"], "the next may start at" in again["said"]) == (False, True)


def test_a_refreshed_champion_comes_from_the_run_of_its_ancestor(drifted: Path) -> None:
    """Two nights were promoted since: each bundle names its parent."""
    parent = "good"
    for night in ("first", "second"):
        folder = drifted / "bundles" / night
        folder.mkdir(parents=True)
        (folder / "counts").write_text(night)
        settings = RankingSettings(Quotas(), 1.0)
        parent = seal_bundle(folder, cut="2024-01-01", settings=settings, made_from={"parent": parent})
        folder.rename(drifted / "bundles" / parent)
    write_champion(drifted, replace(read_champion(drifted), bundle_id=parent))
    run = champions_run(drifted)
    assert run is not None
    assert run.arguments["data"] == "/shop"
    (drifted / "bundles" / parent / "manifest.json").unlink()
    assert champions_run(drifted) is None, "without its manifest the bundle has no known parent"


def test_a_champion_without_a_run_is_not_retrained_by_guess(drifted: Path) -> None:
    write_champion(drifted, replace(read_champion(drifted), bundle_id="stranger"))
    outcome = retrain(drifted, VERDICT, sys.stderr, COOL_DOWN)
    assert not outcome["started"]
    assert outcome["promoted"] is False, "it is no run that works still: no later try can start, either"
    assert "no run recorded here promoted the champion" in outcome["said"]
    assert f"reco --home {drifted} run --data" in outcome["said"]
    assert not (drifted / "retrain.json").exists(), "nothing was started: the next try is free"


@pytest.mark.parametrize(
    ("error", "has_run"),
    [
        (Conflict("process 7 is running a pipeline"), True),
        (ArgumentsInvalid("the pipeline has no parameter 'x'"), False),
        (KeyboardInterrupt(), True),
    ],
    ids=["another process runs", "it cannot start", "it was stopped"],
)
def test_a_run_that_did_not_start_or_was_stopped_does_not_use_the_cool_down(
    drifted: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, has_run: bool
) -> None:
    def start(home: Path, *_: object) -> Run:
        if has_run:
            new_run(home, "training", {}, ["promote-bundle"])
        raise error

    start_with(monkeypatch, start)
    with pytest.raises(type(error)):
        retrain(drifted, VERDICT, sys.stderr, COOL_DOWN)
    assert not (drifted / "retrain.json").exists()


def test_runs_that_cannot_be_listed_do_not_use_the_cool_down(
    drifted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(home: Path) -> Any:
        raise OSError("too many open files")

    monkeypatch.setattr("pipelines.run.launch.list_runs", fail)
    with pytest.raises(OSError, match="too many open files"):
        retrain(drifted, VERDICT, sys.stderr, COOL_DOWN)
    assert not (drifted / "retrain.json").exists()


@pytest.mark.parametrize(
    ("step", "is_promoted", "says"),
    [
        ("promote-bundle", False, "the champion stays"),
        ("publish-features", True, "version 3 is champion, but a later step failed: no Redis answers"),
    ],
)
def test_a_run_that_failed_in_a_step_starts_the_cool_down_and_says_who_is_champion(
    drifted: Path, monkeypatch: pytest.MonkeyPatch, step: str, is_promoted: bool, says: str
) -> None:
    def fail(home: Path, *_: object) -> Run:
        run = new_run(home, "training", {}, ["promote-bundle", "publish-features"])
        if is_promoted:
            done = run.step("promote-bundle")
            done.status, done.parameters = "done", {"Output": {"bundle_id": "new", "version": "3"}}
        raise StepFailed(run, step, "no Redis answers", 3)

    start_with(monkeypatch, fail)
    outcome = retrain(drifted, VERDICT, sys.stderr, COOL_DOWN)
    assert (outcome["started"], outcome["promoted"], outcome["failed"]) == (True, is_promoted, step)
    assert says in outcome["said"]
    assert (drifted / "retrain.json").exists()


def test_a_retraining_has_failed_until_a_training_ends_well(
    drifted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The watch may have restarted since: it remembers no failure."""

    def run_with(status: str) -> Run:
        run = new_run(drifted, "training", {}, ["promote-bundle"])
        run.step("promote-bundle").status = status
        run.save()
        return run

    def fail(*_: object) -> Run:
        raise StepFailed(run_with("failed"), "promote-bundle", "worse", 3)

    assert retraining_result(drifted, None, None) is None
    start_with(monkeypatch, fail)
    retrain(drifted, VERDICT, sys.stderr, COOL_DOWN)
    assert retraining_result(drifted, None, None) is False
    failed, *_ = list_runs(drifted)
    run_with("stopped")
    assert retraining_result(drifted, None, None) is False, "a run that was stopped says nothing"
    failed.step("promote-bundle").status = "done"  # a person resumed it
    failed.save()
    assert retraining_result(drifted, None, None) is True
    run_with("failed")
    assert retraining_result(drifted, None, None) is False


def test_a_retraining_whose_runner_failed_has_failed(drifted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a full disk: none of its steps says so."""

    def start(home: Path, *_: object) -> Run:
        new_run(home, "training", {}, ["promote-bundle"])
        raise OSError("no space left on device")

    start_with(monkeypatch, start)
    with pytest.raises(OSError, match="no space left"):
        retrain(drifted, VERDICT, sys.stderr, COOL_DOWN)
    assert retraining_result(drifted, None, None) is False
    run = next(list_runs(drifted))
    run.step("promote-bundle").status = "done"  # a person resumed it
    run.save()
    assert retraining_result(drifted, None, None) is True


def test_a_training_after_a_refused_retraining_ends_its_failure(drifted: Path) -> None:
    run = new_run(drifted, "training", {}, ["promote-bundle"])
    run.step("promote-bundle").status = "done"
    run.save()
    failed_at = datetime.now(UTC) + timedelta(hours=1)
    assert retraining_result(drifted, None, failed_at) is None, "the runs before are older"
    resumed = (failed_at + timedelta(minutes=1)).timestamp()
    os.utime(run.folder / "state.json", (resumed, resumed))
    assert retraining_result(drifted, None, failed_at) is True


def test_a_run_whose_version_was_replaced_names_the_champion(drifted: Path) -> None:
    """Resumed, a finished run does nothing, and says what became of it."""
    _, good, older = list_runs(drifted)
    assert promoted(good).startswith("version 2 (bundle good) is champion  [")
    assert promoted(older).startswith("version 1 (bundle older) was promoted; champion is version 2  [")


def test_the_toy_shop_is_trained_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def train(home: Path, *_: object) -> Run:
        write_champion(home, Champion("toy", "1", "toy", "bundles/toy", "", ""))
        return new_run(home, "training", {}, [])

    start_with(monkeypatch, train)
    assert train_toy_shop(tmp_path, sys.stderr) == tmp_path / "toy"
    start_with(monkeypatch, lambda *_: pytest.fail("trained again"))
    assert train_toy_shop(tmp_path, sys.stderr) == tmp_path / "toy"


def test_a_bench_of_another_run_than_the_champions_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(RunUnknown, match="holds an evaluated bundle"):
        evaluated_run(tmp_path)
    run = new_run(tmp_path, "training", {}, ["evaluate-bundle"])
    made = build_bundle(run.artifacts("evaluate-bundle") / "evaluated")
    promote_run(tmp_path, bundle_id="stranger")
    assert evaluated_run(tmp_path)[1] == made
    assert f"holds the champion's training: the newest, {run.run_id}, is taken" in caplog.text
    bundle_id = read_manifest(made)["bundle_id"]
    copy = shutil.copytree(made, tmp_path / "bundles" / bundle_id)
    promote_run(tmp_path, bundle_id=bundle_id)
    found, bundle = evaluated_run(tmp_path)
    assert (found.run_id, bundle, len(caplog.messages)) == (run.run_id, copy, 1)


def shop_of(folder: Path, *lines: str, columns: str = "user_id,basket_id,item_id,at") -> Path:
    folder.mkdir(parents=True)
    (folder / "events.csv").write_text("\n".join([columns, *lines]) + "\n")
    return folder


def test_a_data_folder_is_read_again_for_each_run(tmp_path: Path) -> None:
    """A run's data set holds the rows of then; rows were appended since."""
    days = ((day, f"2024-{1 + day // 28:02d}-{1 + day % 28:02d}") for day in range(84))
    shop = shop_of(tmp_path / "shop", *(f"u{day % 3},b{day},i{day % 5},{date}" for day, date in days))
    home = tmp_path / "home"
    run = new_run(home, "training", {"data": str(shop)}, ["ingest-events"])
    ingest_events(str(shop), run.artifacts("ingest-events") / "dataset")
    place = dataset_of(home, str(shop))
    assert place.parent == home / "datasets"
    with (shop / "events.csv").open("a") as stream:
        stream.write("u1,late,i1,2024-04-02\n")
    assert dataset_of(home, str(shop)) == place
    assert json.loads((place / "manifest.json").read_bytes())["rows"] == 85
    assert dataset_of(home, str(place)) == place, "a checked data set is taken as it is"
    assert dataset_of(home, newest_data(home)) == run.artifacts("ingest-events") / "dataset"
    for half in (".part", ".old"):  # of a folder that another process replaces
        shutil.copytree(place, place.with_name(place.name + half))
    assert run_datasets(home) == [run.artifacts("ingest-events") / "dataset", place]


def test_data_that_are_only_read_need_no_cut_and_have_the_limit_of_their_training(tmp_path: Path) -> None:
    lines = [f"u,b{day},i,2024-01-{day:02d},1" for day in range(1, 15)]
    shop = shop_of(tmp_path / "shop", *lines, columns="user_id,basket_id,item_id,at,quantity")
    assert json.loads((dataset_of(tmp_path, str(shop)) / "manifest.json").read_bytes())["rows"] == 14
    (shop / "events.csv").write_text((shop / "events.csv").read_text() + "u,b,i,2024-01-15,-3\n")
    with pytest.raises(TooManyRefused):
        dataset_of(tmp_path, str(shop))
    new_run(tmp_path, "training", {"data": str(shop), "max_quarantine_ratio": 0.1}, ["ingest-events"])
    assert json.loads((dataset_of(tmp_path, str(shop)) / "manifest.json").read_bytes())["rows"] == 14


def test_two_folders_of_one_name_are_two_data_sets(tmp_path: Path) -> None:
    shops = [shop_of(tmp_path / place / "shop", f"{place[0]},b,i,2024-01-02") for place in ("north", "south")]
    found = [dataset_of(tmp_path, str(shop)) for shop in shops]
    assert [read_dataset(place).events["user_id"].tolist() for place in found] == [["n"], ["s"]]


def test_an_erasure_during_the_reading_of_data_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shop = shop_of(tmp_path / "shop", "ann,b,i,2024-01-02", "bob,c,i,2024-01-02")
    until = microseconds(datetime(2024, 2, 1, tzinfo=UTC))

    def read_and_be_interrupted(*arguments: Any) -> str:
        cut = ingest_events(*arguments)
        if not Forgotten.load(tmp_path).until("ann"):
            forget(tmp_path, "ann", until)
        return cut

    monkeypatch.setattr("components.data.ingest_events.ingest_events", read_and_be_interrupted)
    assert read_dataset(dataset_of(tmp_path, str(shop))).events["user_id"].tolist() == ["bob"]


def test_a_named_data_set_comes_from_a_run(tmp_path: Path) -> None:
    run = new_run(tmp_path, "training", {"data": "toy"}, ["ingest-events"])
    held = run.artifacts("ingest-events") / "dataset"
    held.mkdir(parents=True)
    (held / "manifest.json").write_text("{}")
    assert dataset_of(tmp_path, "toy") == held


@pytest.mark.parametrize("name", DATA_NAMES)
def test_a_name_is_the_built_in_data_set_also_beside_a_folder_with_that_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    check_data(name)
    shop = shop_of(tmp_path / name, "ann,b,i,2024-01-02")
    assert absolute(name) == name
    assert caplog.text == ""
    check_data(name)
    assert f"{name} is the built-in data set; for the folder here give ./{name}" in caplog.text
    assert absolute(f"./{name}") == str(shop)
    assert read_dataset(dataset_of(tmp_path, f"./{name}")).events["user_id"].tolist() == ["ann"]
    run = new_run(tmp_path, "training", {"data": name}, ["ingest-events"])
    shutil.copytree(dataset_of(tmp_path, f"./{name}"), run.artifacts("ingest-events") / "dataset")
    (shop / "manifest.json").write_text("{}")
    assert dataset_of(tmp_path, name) == run.artifacts("ingest-events") / "dataset"
