"""The arms: their names, commands and environments, and the reasons why one is skipped."""

from dataclasses import replace
from pathlib import Path

import pytest

from pipelines.bench.load.arms import ARMS, Arm, LoadSetup, fill_store, ranker_of
from pipelines.bench.load.goals import OURS, UNOPTIMISED
from pipelines.run.runs import new_run
from serving.release.bundle import RankingSettings, seal_bundle
from serving.release.champion import Champion
from serving.settings import FEASTS_OWN, Settings
from serving.stages.retrieval import Quotas
from serving.stores.online_features import RedisStore

SHELL = {
    "RECO_ANSWER_CACHE": "memory:",
    "RECO_PROCESSES": "2",
    "RECO_RANKER_ADDRESS": "elsewhere:1",
    "RECO_REQUEST_LOG": "off",
    "RECO_TRACE_URL": "http://collector/v1/traces",
}


def setup(**rankers: Path) -> LoadSetup:
    settings = Settings(deadline_ms=70.0, store_url="redis://127.0.0.1:1/0")
    return LoadSetup(Path("bundle"), settings, rankers)


def arm(name: str) -> Arm:
    return next(arm for arm in ARMS if arm.name == name)


@pytest.mark.parametrize(
    ("name", "needs", "step"),
    [(UNOPTIMISED, "student", "distill-ranker"), ("onnx-fp32", "pruned", "prune-ranker")],
)
def test_an_arm_without_its_ranker_has_a_reason(name: str, needs: str, step: str) -> None:
    assert f"keeps what {step} made" in arm(name).missing(setup())
    assert arm(name).missing(setup(**{needs: Path("here")})) == ""


def test_the_callers_environment_does_not_reach_an_arm(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name, value in {**SHELL, **dict.fromkeys(FEASTS_OWN, "/tmp/metrics")}.items():
        monkeypatch.setenv(name, value)
    for one in ARMS:
        settings = one.settings(setup(), tmp_path)
        environment = settings.to_env()
        assert not set(FEASTS_OWN) & set(environment), "servers would share their counters"
        assert Settings.from_env(environment) == settings
        for name in set(SHELL) - set(one.environment):
            assert environment[name] == Settings().to_env()[name], one.name


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (OURS, ["serving.server", "--bundle", "bundle"]),
        ("kserve-stock", ["pipelines.bench.load.arm_variants", "kserve", "bundle"]),
        # Without quantisation and compilation.
        ("onnx-fp32", ["pipelines.bench.load.arm_variants", "graph", "bundle", "b"]),
        (UNOPTIMISED, ["pipelines.bench.load.arm_variants", "fastapi", "bundle", "a"]),
    ],
)
def test_each_arm_has_its_command(name: str, words: list[str]) -> None:
    assert arm(name).command(setup(student=Path("a"), pruned=Path("b")))[3:] == words
    # KServe writes a log of its own; all others write the same line for each request as ours.
    assert arm(name).environment == ({"RECO_REQUEST_LOG": "off"} if name == "kserve-stock" else {})


@pytest.mark.parametrize("step", ["distill-ranker", "prune-ranker"])
def test_a_ranker_is_that_of_the_champions_own_run(step: str, tmp_path: Path) -> None:
    def seal(folder: Path, **made_from: str) -> str:
        folder.mkdir(parents=True)
        settings = RankingSettings(Quotas(), 1.0)
        return seal_bundle(folder, cut="2024-01-01", settings=settings, made_from=made_from)

    for name in ("promoted", "refused"):
        run = new_run(tmp_path, "training", {}, ["evaluate-bundle", "distill-ranker", "prune-ranker"])
        bundle_id = seal(run.artifacts("evaluate-bundle") / "evaluated", data_hash=name)
        for made in ("distill-ranker", "prune-ranker"):
            (run.artifacts(made) / "ranker").mkdir(parents=True)
            for file in ("weights.npz", "ranker.onnx"):
                (run.artifacts(made) / "ranker" / file).touch()
        if name == "promoted":
            trained, expected = bundle_id, run.artifacts(step) / "ranker"
    champion = Champion(trained, "1", "m", "bundle", "2024-01-01", "2024-01-02")
    assert ranker_of(tmp_path, champion, step) == expected
    night = seal(tmp_path / "bundles" / "night", parent=trained)
    (tmp_path / "bundles" / "night").rename(tmp_path / "bundles" / night)
    assert ranker_of(tmp_path, replace(champion, bundle_id=night), step) == expected, "after a refresh, too"
    assert ranker_of(tmp_path, replace(champion, bundle_id="stranger"), step) is None
    (expected / "ranker.onnx").unlink()
    assert ranker_of(tmp_path, champion, step) is None


@pytest.mark.slow
def test_the_endpoint_reads_rows_written_by_feast(
    toy_line: Path, valkey: tuple[str, object], tmp_path: Path
) -> None:
    import pyarrow.parquet as pq

    offline_store = toy_line / "home" / "offline_store"
    users = fill_store(offline_store, tmp_path / "feast", valkey[0])
    rows = pq.read_table(offline_store / "user_history" / "snapshots.parquet").to_pandas()
    first = rows.sort_values("event_timestamp").drop_duplicates("user_id")
    assert users == len(first)
    store = RedisStore(valkey[0], timeout_ms=30_000.0)
    for user, history in zip(first["user_id"], first["history"], strict=True):
        row = store.read(user)
        assert row is not None
        assert row.history == history
    store.close()
