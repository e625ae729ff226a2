"""Which servers there are, and which of them can be started here."""

import json
from pathlib import Path

import pytest

from components.home import Champion
from pipelines.bench.load.arms import (
    ARMS,
    NULL,
    OURS,
    Arm,
    Scene,
    choose_arms,
    differing,
    fill_store,
    ranker_of,
)
from pipelines.run.runs import new_run
from serving.settings import FEASTS_OWN, Settings
from serving.stores.online_features import RedisStore

SHELL = {
    "RECO_ANSWER_CACHE": "memory:",
    "RECO_PROCESSES": "2",
    "RECO_RANKER_ADDRESS": "elsewhere:1",
    "RECO_REQUEST_LOG": "off",
    "RECO_TRACE_URL": "http://collector/v1/traces",
}


def scene(student: str = "", mixed: bool = False, pruned: str = "") -> Scene:
    settings = Settings(deadline_ms=70.0, store_url="redis://127.0.0.1:1/0")
    rankers = {"student": student, "pruned": pruned}
    paths = {name: Path(path) if path else None for name, path in rankers.items()}
    return Scene(Path("bundle"), settings, Path("feast"), mixed=mixed, **paths)


def arm(name: str) -> Arm:
    return next(arm for arm in ARMS if arm.name == name)


def test_ours_is_always_among_them() -> None:
    assert [one.name for one in choose_arms(["fastapi", NULL])] == [OURS, "fastapi", NULL]
    assert choose_arms([]) == ARMS
    with pytest.raises(ValueError, match="no arm 'triton': choose among ours"):
        choose_arms(["triton"])


def test_an_arm_says_why_it_is_missing() -> None:
    later = Arm("later", "", lambda _: [], {"RECO_FROM_THE_FUTURE": "1", "RECO_DEADLINE_MS": "50"})
    assert later.missing(scene()) == "this version has no RECO_FROM_THE_FUTURE"
    for name in ("unpruned", "fastapi-torch", "unoptimised", "unoptimised-user-row"):
        assert "keeps what distill-ranker made" in arm(name).missing(scene(pruned="pruned"))
        assert arm(name).missing(scene("student")) == ""
    for name in ("eager", "onnx-fp32"):
        assert "keeps what prune-ranker made" in arm(name).missing(scene("student"))
        assert arm(name).missing(scene(pruned="pruned")) == ""


def test_answers_are_kept_only_where_the_requests_are_those_of_a_shop() -> None:
    assert "all hits after the first round" in arm("answer-cache").missing(scene())
    assert arm("answer-cache").missing(scene(mixed=True)) == ""
    assert [one.name for one in ARMS if one.keeps_answers] == ["answer-cache"]


def test_nothing_of_the_callers_shell_reaches_an_arm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, value in {**SHELL, **dict.fromkeys(FEASTS_OWN, "/tmp/metrics")}.items():
        monkeypatch.setenv(name, value)
    places = {"RECO_HOME": str(tmp_path), "RECO_HTTP_PORT": "0", "RECO_GRPC_PORT": "0"}
    given = {**places, "RECO_STORE_URL": "redis://127.0.0.1:1/0", "RECO_DEADLINE_MS": "70.0"}
    for one in ARMS:
        settings = one.settings(scene(), tmp_path)
        environment = settings.to_env()
        assert not set(FEASTS_OWN) & set(environment), "servers would share their counters"
        assert Settings.from_env(environment) == settings
        own = {
            name: str(Settings.from_env({name: value}).to_env()[name])
            for name, value in one.environment.items()
        }
        assert differing(settings) == {**given, **own}, one.name
        for name in set(SHELL) - set(one.environment):
            assert environment[name] == Settings().to_env()[name], one.name


def test_each_part_of_ours_that_is_left_out_is_one_part() -> None:
    """All else is what `serving.server` is: its settings but for logs, and its own code but for one name."""
    assert arm("no-logs").environment == {"RECO_REQUEST_LOG": "off", "RECO_LOG": "off"}
    assert arm("no-logs").command(scene()) == arm(OURS).command(scene())
    # KServe writes a log of its own; all other variants write the same line for each request as ours.
    assert arm("kserve-stock").environment == {"RECO_REQUEST_LOG": "off"}
    for name in ("eager", "onnx-fp32", "unpruned", "feast-sdk", "no-gc-freeze"):
        assert arm(name).environment == {}
    for name in ("fastapi", "unoptimised"):
        assert "request log" in arm(name).what


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("onnx-fp32", {"graph": "pruned"}),  # without quantisation and compilation
        ("unpruned", {"graph": "student"}),  # and without pruning
        ("eager", {"weights": "pruned"}),  # onnx-fp32 in another engine
        ("fastapi-torch", {"door": "fastapi", "weights": "student"}),
    ],
)
def test_each_step_on_the_way_to_the_served_ranker_stands_alone(name: str, given: dict[str, str]) -> None:
    document = json.loads(arm(name).command(scene("student", pruned="pruned"))[3])
    assert document == {"bundle": "bundle", **given}


def test_who_serves_the_student_as_it_was_before_pruning_says_so() -> None:
    for one in ARMS:
        if one.needs == "student":
            assert "student" in one.what, one.name


def test_each_arm_is_one_command_with_the_scene_in_it() -> None:
    for one in ARMS:
        command = one.command(scene("student", pruned="pruned"))
        assert all(isinstance(word, str) for word in command)
        if command[2].startswith("pipelines.load_arms_") and len(command) > 3:
            given = json.loads(command[3])
            assert given["bundle"] == "bundle"
            assert given.get("student") in (None, "student")
            assert {given.get("graph"), given.get("weights")} <= {None, "student", "pruned"}
            assert bool(one.needs) == any(given.get(name) for name in ("student", "graph", "weights"))
            assert given.get("feast_home") in (None, "feast")
    assert len({one.name for one in ARMS}) == len(ARMS)


@pytest.mark.parametrize("step", ["distill-ranker", "prune-ranker"])
def test_a_ranker_is_that_of_the_champions_own_run(step: str, tmp_path: Path) -> None:
    champion = Champion("b1", "1", "m", "bundle", "2024-01-01", "2024-01-02")
    assert ranker_of(tmp_path, champion, step) is None
    for bundle_id in ("b1", "b2"):
        run = new_run(tmp_path, "training", {}, ["evaluate-bundle", "distill-ranker", "prune-ranker"])
        evaluated = run.artifacts("evaluate-bundle") / "evaluated"
        evaluated.mkdir(parents=True)
        (evaluated / "manifest.json").write_text(json.dumps({"bundle_id": bundle_id}))
        for made in ("distill-ranker", "prune-ranker"):
            (run.artifacts(made) / "ranker").mkdir(parents=True)
            for name in ("weights.npz", "ranker.onnx"):
                (run.artifacts(made) / "ranker" / name).touch()
        if bundle_id == "b1":
            expected = run.artifacts(step) / "ranker"
    assert ranker_of(tmp_path, champion, step) == expected
    (expected / "ranker.onnx").unlink()
    assert ranker_of(tmp_path, champion, step) is None


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
