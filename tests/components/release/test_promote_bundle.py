"""Promotion and rollback on a real MLflow database, with bundles that hold no model."""

import json
import shutil
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

import components.release.promote_bundle as promote_module
from components.home import Conflict, locked
from components.release.gate import GateFailed, compare
from components.release.history import HistoryBroken
from components.release.promote_bundle import NothingToCompare, promote_bundle, rollback, verified_history
from components.release.register_bundle import register_bundle
from components.release.registry import Registry, RegistryRefused, RegistryUnreachable
from components.release.signing import sign
from serving.errors import NoChampion
from serving.release.bundle import SIGNATURE_FILES
from serving.release.champion import read_champion, write_champion
from serving.release.signatures import SignatureInvalid, check_signed
from tests.components.conftest import as_planned
from tests.serving.signed import write_keys

pytestmark = pytest.mark.slow

Make = Callable[..., Path]
Promote = Callable[..., dict[str, Any]]
Promoted = Callable[[int], None]


@pytest.fixture
def promote(home: Path, uri: str, dataset: Path) -> Promote:
    def go(
        version: str = "challenger", datasets: Sequence[Path] = (dataset,), **options: Any
    ) -> dict[str, Any]:
        options = {"examine": as_planned, **options}
        return promote_bundle(version, datasets, uri, "recommender", str(home), **options)

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


@pytest.mark.parametrize(
    ("made", "says"),
    [
        (None, "and there is none: give the data set it was evaluated on"),
        ("{}", "is no checked data set"),
        ('{"data_hash": "d2"}', "is d2: give the data set it was evaluated on"),
    ],
    ids=["none", "broken", "another"],
)
def test_without_the_data_set_nothing_is_believed(
    evaluated: Make,
    promote: Promote,
    registry: Registry,
    uri: str,
    tmp_path: Path,
    made: str | None,
    says: str,
) -> None:
    register(evaluated("one"), uri)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "manifest.json").write_text(made or "")
    with pytest.raises(NothingToCompare, match=says):
        promote(datasets=[tmp_path / "other"] if made else [])
    assert registry.alias("champion") is None


def test_of_several_data_sets_the_right_one_is_taken(
    evaluated: Make, promote: Promote, uri: str, tmp_path: Path, dataset: Path
) -> None:
    """One that users were taken out of is still the one; the one as it was before is taken first."""
    register(evaluated("one"), uri)
    places = {"other": {"data_hash": "d2"}, "forgotten": {"data_hash": "d3", "was": ["d1", "d2"]}}
    for name, manifest in places.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "manifest.json").write_text(json.dumps(manifest))
    other, forgotten, replaced_now = (tmp_path / name for name in ("other", "forgotten", "gone"))
    taken = []

    def examine(challenger: Path, champion: Path | None, dataset: Path, sample: int) -> dict[str, Any]:
        taken.append((dataset, sample))
        return as_planned(challenger, champion, dataset, sample)

    given = {"examine": examine, "params": {"sample_baskets": 7}, "dry_run": True}
    promote(datasets=[forgotten], **given)
    promote(datasets=[other, replaced_now, forgotten, dataset], **given)
    assert taken == [(forgotten, 7), (dataset, 7)]


def test_a_champion_that_has_seen_the_test_weeks_is_no_measure(
    evaluated: Make, promote: Promote, uri: str
) -> None:
    register(evaluated("newer"), uri)
    promote()
    register(evaluated("older", window="w0", cut="2017-10-30T04:00:00Z"), uri)
    with pytest.raises(NothingToCompare, match="has seen the weeks after 2017-10-30"):
        promote()


def test_a_champion_that_cannot_be_read_is_replaced_only_on_purpose(
    evaluated: Make, promote: Promote, uri: str
) -> None:
    """As after a change of the feature schema: then no bundle can be measured beside it."""
    register(evaluated("one"), uri)
    promote()
    register(evaluated("two"), uri)

    def examine(challenger: Path, champion: Path | None, dataset: Path, sample: int) -> dict[str, Any]:
        fault = {"verdicts": {}, "champion_fault": "other schema"}
        return fault if champion else as_planned(challenger, champion, dataset, sample)

    with pytest.raises(NothingToCompare, match=r"\(other schema\).*--gate over_champion=0"):
        promote(examine=examine)
    assert promote(examine=examine, params={"over_champion": 0.0})["changed"]


@pytest.fixture
def promoted(evaluated: Make, promote: Promote, uri: str) -> Promoted:
    """Promote so many versions, each better than the one before."""

    def promote_all(count: int) -> None:
        for number in range(count):
            register(evaluated(f"b{number}", 0.16 + number / 100), uri)
            promote()

    return promote_all


def test_rollback_walks_back_one_promotion_at_a_time(
    promoted: Promoted, promote: Promote, registry: Registry, home: Path, uri: str
) -> None:
    promoted(3)
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


def test_a_rollback_that_was_killed_before_the_pointer_is_completed_and_goes_no_further(
    promoted: Promoted, registry: Registry, home: Path, uri: str
) -> None:
    promoted(3)
    third = read_champion(home)
    rollback(uri, "recommender", str(home))
    write_champion(home, third)
    assert rollback(uri, "recommender", str(home), dry_run=True)["version"] == "2"
    assert read_champion(home) == third
    again = rollback(uri, "recommender", str(home))
    assert (again["version"], again["previous"], again["changed"]) == ("2", "3", True)
    assert read_champion(home).version == registry.alias("champion") == "2"
    assert len(registry.history()) == 4
    assert rollback(uri, "recommender", str(home))["version"] == "1"


def test_a_rollback_after_that_of_another_home_goes_one_further(
    promoted: Promoted, home: Path, uri: str, tmp_path: Path
) -> None:
    promoted(3)
    (tmp_path / "laptop").mkdir()
    assert rollback(uri, "recommender", str(tmp_path / "laptop"))["version"] == "2"
    assert rollback(uri, "recommender", str(home))["version"] == "1"


def test_an_alias_moved_by_hand_is_a_conflict_and_is_rolled_back(
    evaluated: Make, promote: Promote, registry: Registry, home: Path, uri: str
) -> None:
    register(evaluated("one"), uri)
    promote()
    before = read_champion(home)
    register(evaluated("two", 0.1), uri)
    registry.point("champion", "2")
    with pytest.raises(
        Conflict, match=r"names version 2, promoted was 1: .*moved by hand.*rollback"
    ) as caught:
        promote("champion")
    assert caught.value.exit_code == 4
    assert read_champion(home) == before
    assert rollback(uri, "recommender", str(home), dry_run=True)["version"] == "1"
    assert registry.alias("champion") == "2"
    assert rollback(uri, "recommender", str(home))["version"] == "1"
    assert (registry.alias("champion"), read_champion(home)) == ("1", before)
    assert actions(registry) == [("promote", "", "1"), ("restore", "2", "1")]
    with pytest.raises(GateFailed):
        promote("2")
    register(evaluated("three", 0.161), uri)
    assert promote()["previous"] == "1"
    assert rollback(uri, "recommender", str(home))["version"] == "1"


def test_an_alias_moved_back_by_hand_loses_no_line(
    promoted: Promoted, promote: Promote, registry: Registry, home: Path, uri: str
) -> None:
    """The alias names the version before, as if the last promotion had been stopped."""
    promoted(2)
    registry.point("champion", "1")
    with pytest.raises(Conflict, match="names version 1, promoted was 2"):
        promote("1")
    registry.unpoint("champion", str(registry.alias("champion")))
    with pytest.raises(Conflict, match="names version none, promoted was 2"):
        promote("1")
    assert len(registry.history()) == 2


@pytest.mark.parametrize(
    ("deleted", "back_to", "then"), [((), "3", "2"), (("3",), "2", "1"), (("2", "3"), "1", "")]
)
def test_a_removed_alias_returns_to_the_newest_version_that_is_left(
    promoted: Promoted,
    evaluated: Make,
    promote: Promote,
    registry: Registry,
    home: Path,
    uri: str,
    deleted: Sequence[str],
    back_to: str,
    then: str,
) -> None:
    promoted(3)
    register(evaluated("b3", 0.19), uri)
    for version in deleted:
        registry._client.delete_model_version("recommender", version)
    if not deleted:
        registry.unpoint("champion", str(registry.alias("champion")))
    with pytest.raises(Conflict, match=r"names version none, promoted was 3: .*rollback"):
        promote("4")
    result = rollback(uri, "recommender", str(home))
    assert (result["version"], result["previous"]) == (back_to, "")
    assert read_champion(home).version == registry.alias("champion") == back_to
    assert promote("4")["previous"] == back_to
    assert rollback(uri, "recommender", str(home))["version"] == back_to
    if then:
        assert rollback(uri, "recommender", str(home))["version"] == then
    else:
        with pytest.raises(NoChampion, match="no champion before 1"):
            rollback(uri, "recommender", str(home))


def test_the_champion_itself_is_no_way_back(
    promoted: Promoted, promote: Promote, registry: Registry, home: Path, uri: str
) -> None:
    """1, 2, 3 and 2 again were promoted, and 3 is deleted: before 2 came 1."""
    promoted(3)
    promote("2", params={"over_champion": 0.0})
    registry._client.delete_model_version("recommender", "3")
    assert rollback(uri, "recommender", str(home))["version"] == "1"
    with pytest.raises(NoChampion, match="no champion before 1"):
        rollback(uri, "recommender", str(home))


def test_a_home_may_promote_in_two_registries(
    evaluated: Make, promote: Promote, home: Path, uri: str, tmp_path: Path
) -> None:
    register(evaluated("one"), uri)
    promote()
    other = Registry(f"sqlite:///{tmp_path}/another/mlflow.db", "recommender")
    assert verified_history(other, home) == []
    assert len(verified_history(Registry(uri, "recommender"), home)) == 1


def test_an_alias_set_by_hand_before_any_promotion_is_removed(
    evaluated: Make, promote: Promote, registry: Registry, home: Path, uri: str
) -> None:
    registry.point("champion", register(evaluated("one"), uri))
    with pytest.raises(Conflict, match="names version 1, promoted was none"):
        promote("champion")
    assert rollback(uri, "recommender", str(home), dry_run=True)["changed"] is False
    assert rollback(uri, "recommender", str(home))["version"] == ""
    assert registry.alias("champion") is None
    assert promote("1")["changed"]


def test_another_bundle_under_a_promoted_number_is_a_conflict(
    promoted: Promoted, evaluated: Make, promote: Promote, registry: Registry, home: Path, uri: str
) -> None:
    promoted(2)
    registry._client.set_model_version_tag("recommender", "1", "bundle_id", "f" * 16)
    with pytest.raises(Conflict, match="version 1 is bundle 'f"):
        rollback(uri, "recommender", str(home))
    registry._client.set_model_version_tag("recommender", "2", "bundle_id", "f" * 16)
    register(evaluated("three", 0.18), uri)
    with pytest.raises(Conflict, match="its tag bundle_id was changed by hand"):
        promote("3")


def test_a_broken_history_stops_promotion_and_rollback(
    promoted: Promoted, promote: Promote, registry: Registry, home: Path, uri: str
) -> None:
    promoted(3)
    tags = registry._client.get_registered_model("recommender").tags
    registry._client.set_registered_model_tag("recommender", "promotion.000002", tags["promotion.000001"])
    for act in (lambda: promote("1"), lambda: rollback(uri, "recommender", str(home))):
        with pytest.raises(HistoryBroken, match="line 2 of the history holds line 1"):
            act()
    assert read_champion(home).version == "3"


def test_rollback_to_a_deleted_version_says_so(
    promoted: Promoted, registry: Registry, home: Path, uri: str
) -> None:
    promoted(2)
    registry._client.delete_model_version("recommender", "1")
    with pytest.raises(NoChampion, match="version 1 was deleted"):
        rollback(uri, "recommender", str(home))
    assert registry.alias("champion") == "2"


def test_rollback_with_nothing_promoted(registry: Registry, home: Path, uri: str) -> None:
    with pytest.raises(NoChampion):
        rollback(uri, "recommender", str(home))
    with pytest.raises(RegistryRefused, match="has no version 'challenger'"):
        promote_bundle("challenger", [], uri, "recommender", str(home))


class Killed(BaseException):
    """Stands for kill -9: nothing of ours catches it."""


STATIONS = [  # before each, the one above it is done
    (Registry, "download", False),
    (Registry, "intend", False),
    (Registry, "point", False),
    (promote_module, "write_head", False),
    (promote_module, "write_head", True),
    (promote_module, "write_champion", False),
    (promote_module, "write_champion", True),
]


@pytest.mark.parametrize(
    ("owner", "name", "done"),
    STATIONS,
    ids=[f"{name} {'after' if d else 'before'}" for _, name, d in STATIONS],
)
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
    assert json.loads((home / "history.json").read_text())["recommender"][0] == 2
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


def test_a_torn_pointer_is_written_again(evaluated: Make, promote: Promote, home: Path, uri: str) -> None:
    register(evaluated("one"), uri)
    promote()
    before = read_champion(home)
    (home / "champion.json").write_text('{"bundle_id": ')
    with pytest.raises(NoChampion, match="`reco promote champion`"):
        read_champion(home)
    assert not promote("champion")["changed"]
    assert read_champion(home).bundle_id == before.bundle_id


def test_a_bundle_changed_in_the_registry_is_refused(
    evaluated: Make, promote: Promote, registry: Registry, home: Path, uri: str
) -> None:
    register(evaluated("one"), uri)
    [stored] = (home / "mlflow").rglob("evaluation.json")
    better = json.loads(stored.read_text())
    better["served"]["ndcg_at_10"] = 0.9
    stored.write_text(json.dumps(better))
    with pytest.raises(GateFailed, match=r"^files: .*evaluation\.json has SHA-256"):
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


def test_the_home_may_move(
    evaluated: Make, promote: Promote, home: Path, uri: str, tmp_path: Path, dataset: Path
) -> None:
    register(evaluated("one"), uri)
    promote()
    moved = tmp_path / "else where?#%20"
    shutil.move(home, moved)
    there = f"sqlite:///{moved / 'mlflow.db'}"
    bundle = read_champion(moved).bundle(moved)
    (bundle / "index.faiss").write_text("flipped")
    promote_bundle("1", [], there, "recommender", str(moved))
    assert (bundle / "index.faiss").read_text() == "one", "fetched from the registry that moved, too"
    register(evaluated("two", 0.17), there)
    promote_bundle("challenger", [dataset], there, "recommender", str(moved), examine=as_planned)
    assert read_champion(moved).version == "2"
    assert rollback(there, "recommender", str(moved))["version"] == "1"
    assert not home.exists(), "nothing is written at the old place"


def test_only_what_a_trusted_key_signed_is_promoted(
    evaluated: Make, promote: Promote, registry: Registry, home: Path, uri: str, tmp_path: Path
) -> None:
    key, public = write_keys(tmp_path, "ours")
    trusted = public.parent

    def sign_version(number: str, at: datetime) -> None:
        version = registry.version(number)
        path = registry.download(version, tmp_path / f"signed {at:%d}")
        sign(path, key, at=at)
        registry.attach(version, path.glob("*.sig"))

    def never(*_: object) -> dict[str, Any]:
        raise AssertionError("an unsigned bundle is opened")

    register(evaluated("one"), uri)
    with pytest.raises(GateFailed, match=r"signature: .* signed it, bundle\.sig is missing: reco sign 1"):
        promote(trusted_keys=trusted, examine=never)
    assert len(promote(trusted_keys=trusted, examine=never, dry_run=True)["checks"]) == 1
    sign_version("1", datetime(2026, 11, 2, tzinfo=UTC))  # after its files were fetched
    assert promote(trusted_keys=trusted)["checks"][0]["metric"] == "signature"

    register(evaluated("two", 0.17), uri)
    sign_version("2", datetime(2026, 11, 1, tzinfo=UTC))
    with pytest.raises(GateFailed, match="signed at 2026-11-01T00:00:00Z, before"):
        promote(trusted_keys=trusted)
    sign_version("2", datetime(2026, 11, 3, tzinfo=UTC))
    promote(trusted_keys=trusted)

    with pytest.raises(SignatureInvalid, match="going back needs a signature, too"):
        rollback(uri, "recommender", str(home), trusted_keys=trusted)
    assert (read_champion(home).version, registry.alias("champion")) == ("2", "2")
    rollback(uri, "recommender", str(home), key=key, trusted_keys=trusted)
    assert read_champion(home).version == "1"
    (trusted / "revoked.txt").write_text(f"{registry.version('2').bundle_id}\n")
    with pytest.raises(GateFailed, match="is revoked by"):
        promote("2", trusted_keys=trusted)


def test_refused_signatures_do_not_replace_those_of_the_local_copy(
    evaluated: Make, promote: Promote, registry: Registry, home: Path, uri: str, tmp_path: Path
) -> None:
    key, public = write_keys(tmp_path, "ours")
    (tmp_path / "away").mkdir()
    stranger, _ = write_keys(tmp_path / "away", "theirs")
    register(evaluated("one"), uri)
    version = registry.version("1")
    path = registry.download(version, tmp_path / "signed")
    for signer, passes in ((key, True), (stranger, False)):
        sign(path, signer)
        registry.attach(version, path.glob("*.sig"))
        checks = promote(trusted_keys=public.parent, dry_run=True)["checks"]
        assert checks[0]["passed"] is passes
        assert check_signed(home / "bundles" / version.bundle_id, public.parent).key == public


def test_a_revoked_bundle_gets_no_signature_on_the_way_back(
    promoted: Promoted, registry: Registry, home: Path, uri: str, tmp_path: Path
) -> None:
    key, public = write_keys(tmp_path, "ours")
    promoted(2)
    first = registry.version("1")
    (public.parent / "revoked.txt").write_text(f"{first.bundle_id}\n")
    with pytest.raises(SignatureInvalid, match="is revoked by"):
        rollback(uri, "recommender", str(home), key=key, trusted_keys=public.parent)
    assert not registry.names(first) & set(SIGNATURE_FILES)
    assert not list((home / "bundles" / first.bundle_id).glob("*.sig"))
    (public.parent / "revoked.txt").unlink()
    rollback(uri, "recommender", str(home), key=key, trusted_keys=public.parent)
    assert registry.names(first) >= set(SIGNATURE_FILES)
    assert check_signed(home / "bundles" / first.bundle_id, public.parent).key == public


def test_a_registry_that_keeps_signatures_back_is_unreachable_and_no_verdict(
    evaluated: Make, promote: Promote, registry: Registry, home: Path, uri: str, tmp_path: Path
) -> None:
    key, public = write_keys(tmp_path, "ours")
    register(evaluated("one"), uri)
    promote(dry_run=True)  # its files are under home by now
    version = registry.version("1")
    path = registry.download(version, tmp_path / "signed")
    sign(path, key)
    registry.attach(version, path.glob("*.sig"))
    [stored] = (home / "mlflow").rglob("bundle.sig")
    stored.unlink()
    stored.symlink_to(stored)  # it is listed and cannot be read
    with pytest.raises(RegistryUnreachable, match="nothing was changed") as caught:
        promote("1", trusted_keys=public.parent, dry_run=True)
    assert caught.value.exit_code == 3
