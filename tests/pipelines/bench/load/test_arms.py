"""The arms: their names, commands and environments, and the reasons why one is skipped."""

import json
from pathlib import Path

import pytest

from pipelines.bench.load.arms import (
    ARMS,
    OURS,
    UNOPTIMISED,
    Arm,
    LoadSetup,
    choose_arms,
    differing,
    fill_store,
    ranker_of,
)
from pipelines.run.runs import new_run
from serving.release.champion import Champion
from serving.settings import FEASTS_OWN, Settings
from serving.stores.online_features import RedisStore

SHELL = {
    "RECO_ANSWER_CACHE": "memory:",
    "RECO_PROCESSES": "2",
    "RECO_RANKER_ADDRESS": "elsewhere:1",
    "RECO_REQUEST_LOG": "off",
    "RECO_TRACE_URL": "http://collector/v1/traces",
}


def setup(student: str = "", pruned: str = "") -> LoadSetup:
    settings = Settings(deadline_ms=70.0, store_url="redis://127.0.0.1:1/0")
    rankers = {"student": student, "pruned": pruned}
    paths = {name: Path(path) if path else None for name, path in rankers.items()}
    return LoadSetup(Path("bundle"), settings, Path("feast"), **paths)


def arm(name: str) -> Arm:
    return next(arm for arm in ARMS if arm.name == name)


def test_ours_is_always_among_the_arms() -> None:
    assert [one.name for one in choose_arms([UNOPTIMISED, "feast-sdk"])] == [OURS, "feast-sdk", UNOPTIMISED]
    assert choose_arms([]) == ARMS
    with pytest.raises(ValueError, match="no arm 'triton': choose among ours"):
        choose_arms(["triton"])


def test_a_missing_arm_has_a_reason() -> None:
    later = Arm("later", "", lambda _: [], {"RECO_FROM_THE_FUTURE": "1", "RECO_DEADLINE_MS": "50"})
    assert later.missing(setup()) == "this version has no RECO_FROM_THE_FUTURE"
    assert "keeps what distill-ranker made" in arm(UNOPTIMISED).missing(setup(pruned="pruned"))
    assert arm(UNOPTIMISED).missing(setup("student")) == ""
    assert "keeps what prune-ranker made" in arm("onnx-fp32").missing(setup("student"))
    assert arm("onnx-fp32").missing(setup(pruned="pruned")) == ""


def test_the_callers_environment_does_not_reach_an_arm(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name, value in {**SHELL, **dict.fromkeys(FEASTS_OWN, "/tmp/metrics")}.items():
        monkeypatch.setenv(name, value)
    places = {"RECO_HOME": str(tmp_path), "RECO_HTTP_PORT": "0", "RECO_GRPC_PORT": "0"}
    given = {**places, "RECO_STORE_URL": "redis://127.0.0.1:1/0", "RECO_DEADLINE_MS": "70.0"}
    for one in ARMS:
        settings = one.settings(setup(), tmp_path)
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


def test_a_variant_has_the_settings_of_ours() -> None:
    # KServe writes a log of its own; all other variants write the same line for each request as ours.
    assert arm("kserve-stock").environment == {"RECO_REQUEST_LOG": "off"}
    assert not any(one.environment for one in ARMS if one.name != "kserve-stock")
    assert "request log" in arm(UNOPTIMISED).what


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("kserve-stock", {"server": "kserve"}),
        ("feast-sdk", {"feast_home": "feast"}),
        ("onnx-fp32", {"graph": "pruned"}),  # without quantisation and compilation
        (UNOPTIMISED, {"server": "fastapi", "weights": "student"}),
    ],
)
def test_a_variant_changes_one_part(name: str, fields: dict[str, str]) -> None:
    command = arm(name).command(setup("student", pruned="pruned"))
    assert command[3] == "pipelines.bench.load.arm_variants"
    assert json.loads(command[4]) == {"bundle": "bundle", **fields}
    assert bool(arm(name).needs) == bool({"graph", "weights"} & set(fields))


def test_five_arms_have_names_and_commands_of_their_own() -> None:
    commands = [tuple(one.command(setup("student", pruned="pruned"))) for one in ARMS]
    assert len({one.name for one in ARMS}) == len(set(commands)) == len(ARMS) == 5
    assert all(isinstance(word, str) for command in commands for word in command)
    assert all("student" in one.what for one in ARMS if one.needs == "student")


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
def test_the_endpoint_reads_rows_written_by_feast(
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
