"""Promotion and rollback on a real MLflow database, with bundles that hold no model."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import components.release.promote_bundle as promote_module
import components.release.served_latency as served_latency_module
from components.home import Conflict, locked
from components.release.gate import GateFailed, compare
from components.release.promote_bundle import NothingToCompare, promote_bundle, rollback
from components.release.register_bundle import register_bundle
from components.release.registry import Registry, RegistryRefused
from serving.errors import NoChampion
from serving.release.champion import read_champion

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy:DeprecationWarning"),
]

Make = Callable[..., Path]
Promote = Callable[..., dict[str, Any]]


@pytest.fixture
def promote(home: Path, uri: str) -> Promote:
    def go(version: str = "challenger", **options: Any) -> dict[str, Any]:
        return promote_bundle(version, options.pop("dataset", None), uri, "recommender", str(home), **options)

    return go


def register(bundle: Path, uri: str) -> str:
    return register_bundle(bundle, uri, "recommender")


def actions(registry: Registry) -> list[tuple[str, str, str]]:
    return [(entry.action, entry.previous, entry.version) for entry in registry.history()]


def test_the_first_champion_needs_only_the_floors(
    evaluated: Make, promote: Promote, registry: Registry, home: Path, uri: str
) -> None:
    register(evaluated("one"), uri)
    result = promote()
    assert result["changed"]
    assert [check["metric"] for check in result["checks"] if not check["passed"]] == []
    assert registry.versions()[0].aliases == ("champion",)
    champion = read_champion(home)
    assert (champion.version, champion.bundle_id) == ("1", result["bundle_id"])
    assert (champion.bundle(home) / "evaluation.json").is_file()
    assert actions(registry) == [("promote", "", "1")]
    assert promote("1")["changed"] is False
    assert actions(registry) == [("promote", "", "1")]


def test_a_worse_bundle_is_refused_and_nothing_changes(
    evaluated: Make, promote: Promote, registry: Registry, home: Path, uri: str
) -> None:
    register(evaluated("one", 0.17), uri)
    promote()
    register(evaluated("two", 0.16), uri)
    before = read_champion(home)
    with pytest.raises(GateFailed, match=r"against champion is 0\.1600, needed 0\.1683"):
        promote()
    assert read_champion(home) == before
    assert registry.alias("champion") == "1"
    assert registry.alias("challenger") == "2"
    assert actions(registry) == [("promote", "", "1")]


def test_a_dry_run_reports_and_changes_nothing(
    evaluated: Make, promote: Promote, registry: Registry, home: Path, uri: str
) -> None:
    register(evaluated("one", 0.10), uri)
    result = promote(dry_run=True)
    assert not result["changed"]
    assert not all(check["passed"] for check in result["checks"])
    assert registry.alias("champion") is None
    assert not (home / "champion.json").exists()


def test_the_limits_of_the_gate_are_parameters(evaluated: Make, promote: Promote, uri: str) -> None:
    register(evaluated("one", 0.14), uri)
    with pytest.raises(TypeError, match="GateParams has no parameter 'over_blnd': did you mean 'over_blend'"):
        promote(params={"over_blnd": 1.0})
    assert promote(params={"over_blend": 1.05})["changed"]


def test_other_weeks_need_the_data_set(evaluated: Make, promote: Promote, uri: str) -> None:
    register(evaluated("one"), uri)
    promote()
    register(evaluated("two", window="w2"), uri)
    with pytest.raises(NothingToCompare, match="evaluated on another test window: give the data set"):
        promote()


def test_a_wrong_data_set_never_opens_the_gate(
    evaluated: Make, promote: Promote, registry: Registry, uri: str, tmp_path: Path
) -> None:
    from feature_repo.events import EventsInvalid, write_dataset
    from feature_repo.toy_shop import toy_dataset

    register(evaluated("one"), uri)
    promote()
    register(evaluated("two", window="w2"), uri)
    (tmp_path / "empty").mkdir()
    with pytest.raises(EventsInvalid):
        promote(dataset=tmp_path / "empty")
    write_dataset(tmp_path / "toy", toy_dataset(users=5, weeks=6))
    with pytest.raises(NothingToCompare, match=r"is data set .*, the challenger was evaluated on d1"):
        promote(dataset=tmp_path / "toy")
    assert registry.alias("champion") == "1"


def test_a_champion_that_has_seen_the_test_weeks_is_no_measure(
    evaluated: Make, promote: Promote, uri: str, tmp_path: Path
) -> None:
    register(evaluated("newer"), uri)
    promote()
    register(evaluated("older", window="w0", cut="2017-10-30T04:00:00Z"), uri)
    with pytest.raises(NothingToCompare, match="has seen the weeks after 2017-10-30"):
        promote(dataset=tmp_path)


def test_champion_and_challenger_sit_the_same_exam(toy_line: Path) -> None:
    """Asked as another bundle's tests say, a bundle gets the very score of its own evaluation."""
    from components.evaluation.evaluate_bundle import evaluate_served
    from feature_repo.events import read_dataset

    data = read_dataset(toy_line / "dataset")
    recorded = json.loads((toy_line / "evaluated" / "evaluation.json").read_text())["served"]
    assert evaluate_served(toy_line / "bundle", toy_line / "evaluated", data)["served"] == recorded


def test_a_bundle_that_cannot_be_asked_is_promoted_without_a_latency(
    evaluated: Make, promote: Promote, uri: str
) -> None:
    """These bundles hold no model, as one of an older feature schema holds none for this code."""
    register(evaluated("one"), uri)
    assert promote()["latency"] == {}
    register(evaluated("two"), uri)
    result = promote()
    assert result["changed"]
    assert result["latency"] == {}
    assert "was not measured" in result["checks"][-1]["reason"]


def test_latency_that_costs_more_sales_than_is_forgiven_is_refused(
    evaluated: Make, promote: Promote, home: Path, uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    register(evaluated("one"), uri)
    promote()
    register(evaluated("two"), uri)
    measured = {"added_ms": 120.0, "machine": {"cores": 2}}
    monkeypatch.setattr(served_latency_module, "served_latency", lambda challenger, champion: measured)
    result = promote(dry_run=True)
    assert result["latency"] == measured
    assert [check["metric"] for check in result["checks"] if not check["passed"]] == [
        "ndcg_at_10 less latency against champion"
    ]
    with pytest.raises(GateFailed, match=r"less latency against champion is 0\.1581, needed 0\.1584"):
        promote()
    assert read_champion(home).version == "1"


def test_rollback_walks_back_one_promotion_at_a_time(
    evaluated: Make, promote: Promote, registry: Registry, home: Path, uri: str
) -> None:
    for number, ndcg in enumerate((0.16, 0.161, 0.162)):
        register(evaluated(f"b{number}", ndcg), uri)
        promote()
    assert rollback(uri, "recommender", str(home), dry_run=True)["changed"] is False
    assert registry.alias("champion") == "3"
    assert rollback(uri, "recommender", str(home))["version"] == "2"
    assert rollback(uri, "recommender", str(home))["version"] == "1"
    assert read_champion(home).version == registry.alias("champion") == "1"
    with pytest.raises(NoChampion, match="no champion before 1"):
        rollback(uri, "recommender", str(home))
    promote("3")
    assert rollback(uri, "recommender", str(home))["version"] == "1"
    assert len(registry.history()) == 7


def test_an_alias_moved_by_hand_can_be_rolled_back(
    evaluated: Make, promote: Promote, registry: Registry, home: Path, uri: str
) -> None:
    register(evaluated("one"), uri)
    promote()
    other = register(evaluated("two", 0.1), uri)
    registry.point("champion", other)
    assert rollback(uri, "recommender", str(home))["version"] == "1"


def test_rollback_to_a_deleted_version_says_so(
    evaluated: Make, promote: Promote, registry: Registry, home: Path, uri: str
) -> None:
    for number in range(2):
        register(evaluated(f"b{number}", 0.16 + number / 100), uri)
        promote()
    registry._client.delete_model_version("recommender", "1")
    with pytest.raises(NoChampion, match="version 1, was deleted"):
        rollback(uri, "recommender", str(home))
    assert registry.alias("champion") == "2"


def test_rollback_with_nothing_promoted(registry: Registry, home: Path, uri: str) -> None:
    with pytest.raises(NoChampion):
        rollback(uri, "recommender", str(home))
    with pytest.raises(RegistryRefused, match="has no version 'challenger'"):
        promote_bundle("challenger", None, uri, "recommender", str(home))


class Killed(BaseException):
    """Stands for kill -9: nothing of ours catches it."""


STATIONS = [
    (Registry, "download"),
    (Registry, "write"),
    (Registry, "point"),
    (promote_module, "write_champion"),
]


@pytest.mark.parametrize(("owner", "name"), STATIONS, ids=[name for _, name in STATIONS])
@pytest.mark.parametrize("done", [True, False], ids=["after", "before"])
def test_a_stop_anywhere_leaves_old_or_new_and_the_next_try_completes(
    owner: Any,
    name: str,
    done: bool,
    evaluated: Make,
    promote: Promote,
    registry: Registry,
    home: Path,
    uri: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    register(evaluated("one", 0.16), uri)
    promote()
    register(evaluated("two", 0.17), uri)
    real = getattr(owner, name)

    def killed(*arguments: Any, **options: Any) -> None:
        if done:
            real(*arguments, **options)
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, killed)
        with pytest.raises(Killed):
            promote()
    assert read_champion(home).version == ("2" if done and name == "write_champion" else "1")
    assert registry.alias("champion") in {"1", "2"}
    promote("2")
    assert read_champion(home).version == registry.alias("champion") == "2"
    assert actions(registry) == [("promote", "", "1"), ("promote", "1", "2")]
    assert rollback(uri, "recommender", str(home))["version"] == "1"


def test_a_damaged_copy_under_home_is_fetched_again(
    evaluated: Make, promote: Promote, home: Path, uri: str
) -> None:
    register(evaluated("one"), uri)
    promote()
    bundle = read_champion(home).bundle(home)
    (bundle / "index.faiss").write_text("flipped")
    promote("1")
    assert (bundle / "index.faiss").read_text() == "one"


def test_a_bundle_changed_in_the_registry_is_refused(
    evaluated: Make, promote: Promote, registry: Registry, home: Path, uri: str
) -> None:
    from serving.errors import BundleInvalid

    register(evaluated("one"), uri)
    [stored] = (home / "mlflow").rglob("evaluation.json")
    better = json.loads(stored.read_text())
    better["served"]["ndcg_at_10"] = 0.9
    stored.write_text(json.dumps(better))
    with pytest.raises(BundleInvalid, match=r"evaluation\.json has SHA-256"):
        promote()
    assert registry.alias("champion") is None


def test_a_concurrent_promotion_is_a_conflict(
    evaluated: Make, promote: Promote, home: Path, uri: str
) -> None:
    register(evaluated("one"), uri)
    with (
        locked(home / "promote.lock", "promoting recommender 9"),
        pytest.raises(Conflict, match="is promoting recommender 9"),
    ):
        promote()


def test_a_champion_that_moved_while_the_gate_compared_is_a_conflict(
    evaluated: Make,
    promote: Promote,
    registry: Registry,
    home: Path,
    uri: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The lock covers one home; another machine's promotion shows in the alias."""
    other = register(evaluated("other"), uri)
    register(evaluated("one"), uri)

    def meanwhile(*arguments: Any) -> Any:
        registry.point("champion", other)
        return compare(*arguments)

    monkeypatch.setattr(promote_module, "compare", meanwhile)
    with pytest.raises(Conflict, match="champion is version 1 by now, it was None"):
        promote()
    assert registry.alias("champion") == other


PROMOTE = """
import sys
from components.home import Conflict
from components.release.promote_bundle import promote_bundle

home, uri, version = sys.argv[1:]
try:
    promote_bundle(version, None, uri, "recommender", home)
except Conflict as conflict:
    sys.exit(conflict.exit_code)
"""


def test_concurrent_promotions_lose_nothing(
    evaluated: Make, registry: Registry, home: Path, uri: str
) -> None:
    versions = [register(evaluated(f"b{number}", 0.16), uri) for number in range(4)]
    program = [sys.executable, "-c", PROMOTE, str(home), uri]
    processes = [subprocess.Popen([*program, version]) for version in versions]
    outcomes = [process.wait(timeout=120) for process in processes]
    history = registry.history()
    assert set(outcomes) <= {0, 4}
    assert outcomes.count(0) == len(history) >= 1
    assert [entry.number for entry in history] == list(range(1, len(history) + 1))
    assert read_champion(home).version == registry.alias("champion") == history[-1].version


def test_the_home_may_move(evaluated: Make, promote: Promote, home: Path, uri: str, tmp_path: Path) -> None:
    register(evaluated("one"), uri)
    promote()
    moved = tmp_path / "else where?#%20"
    shutil.move(home, moved)
    there = f"sqlite:///{moved / 'mlflow.db'}"
    bundle = read_champion(moved).bundle(moved)
    (bundle / "index.faiss").write_text("flipped")
    promote_bundle("1", None, there, "recommender", str(moved))
    assert (bundle / "index.faiss").read_text() == "one", "fetched from the registry that moved, too"
    register(evaluated("two", 0.17), there)
    promote_bundle("challenger", None, there, "recommender", str(moved))
    assert read_champion(moved).version == "2"
    assert rollback(there, "recommender", str(moved))["version"] == "1"
    assert not home.exists(), "nothing is written at the old place"
