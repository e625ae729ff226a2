"""Promotion and rollback on a real MLflow database, with bundles that hold no model."""

import json
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

import components.release.promote_bundle as promote_module
from components.home import Conflict
from components.release.bundle_copies import renew_signatures
from components.release.gate import GateFailed, compare
from components.release.history import HistoryBroken, Promotion, next_line, write_head
from components.release.promote_bundle import NothingToCompare, promote_bundle, rollback, verified_history
from components.release.register_bundle import register_bundle
from components.release.registry import Registry, RegistryUnreachable
from components.release.signing import sign
from serving.errors import NoChampion
from serving.release.bundle import SIGNATURE_FILES
from serving.release.champion import read_champion, write_champion
from serving.release.signatures import SignatureInvalid, check_signed
from tests.components.conftest import as_planned, champions
from tests.serving.signed import write_keys

pytestmark = pytest.mark.slow

NAME = "recommender"


@dataclass
class World:
    """A home, its registry, and bundles that hold no model."""

    evaluated: Callable[..., Path]
    registry: Registry
    home: Path
    uri: str
    dataset: Path

    def register(self, name: str, ndcg: float = 0.16, **more: Any) -> str:
        return register_bundle(self.evaluated(name, ndcg, **more), self.uri, NAME)

    def promote(self, version: str = "challenger", **options: Any) -> dict[str, Any]:
        options = {"datasets": [self.dataset], "examine": as_planned, **options}
        return promote_bundle(version, tracking_uri=self.uri, model_name=NAME, home=str(self.home), **options)

    def rollback(self, **options: Any) -> dict[str, Any]:
        return rollback(self.uri, NAME, str(self.home), **options)

    def sign(self, number: str, key: Path, at: datetime | None = None) -> None:
        """Sign a version in the registry, from a copy of its own."""
        version = self.registry.version(number)
        path = self.registry.download(version, Path(tempfile.mkdtemp(dir=self.dataset.parent)))
        sign(path, key, at=at)
        self.registry.attach(version, path.glob("*.sig"))


@pytest.fixture
def world(evaluated: Callable[..., Path], registry: Registry, home: Path, uri: str, dataset: Path) -> World:
    return World(evaluated, registry, home, uri, dataset)


def actions(registry: Registry) -> list[tuple[str, str, str]]:
    return [(entry.action, entry.previous, entry.version) for entry in registry.history()]


def test_the_first_champion_needs_only_the_floors(world: World) -> None:
    world.register("one")
    result = world.promote()
    assert result["changed"]
    assert [check["metric"] for check in result["checks"] if not check["passed"]] == []
    assert world.registry.versions()[0].aliases == ("champion",)
    champion = read_champion(world.home)
    assert (champion.version, champion.bundle_id) == ("1", result["bundle_id"])
    assert (champion.bundle(world.home) / "evaluation.json").is_file()
    assert actions(world.registry) == [("promote", "", "1")]
    assert world.promote("1")["changed"] is False
    assert actions(world.registry) == [("promote", "", "1")]


def test_a_promotion_ends_the_refusal_of_an_earlier_release(world: World) -> None:
    world.register("one")
    world.registry.refuse("1", "rolled back")
    world.promote(dry_run=True)
    assert world.registry.version("1").refused == "rolled back"
    world.promote()
    assert world.registry.version("1").refused == ""
    world.registry.refuse("1", "rolled back")  # as if that promotion had been killed before its end
    world.promote(version="1")
    assert world.registry.version("1").refused == ""


def test_a_worse_bundle_is_refused_and_nothing_changes(world: World) -> None:
    world.register("one", 0.17)
    world.promote()
    world.register("two", 0.16)
    before = read_champion(world.home)
    with pytest.raises(GateFailed, match=r"against champion is 0\.1600, needed 0\.1683"):
        world.promote()
    assert read_champion(world.home) == before
    assert world.registry.alias("champion") == "1"
    assert world.registry.alias("challenger") == "2"
    assert actions(world.registry) == [("promote", "", "1")]


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
    world: World, tmp_path: Path, made: str | None, says: str
) -> None:
    world.register("one")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "manifest.json").write_text(made or "")
    with pytest.raises(NothingToCompare, match=says):
        world.promote(datasets=[tmp_path / "other"] if made else [])
    assert world.registry.alias("champion") is None


def test_of_several_data_sets_the_right_one_is_taken(world: World, tmp_path: Path) -> None:
    """One that users were taken out of is still the one; the one as it was before is taken first."""
    world.register("one")
    places = {"other": {"data_hash": "d2"}, "forgotten": {"data_hash": "d3", "was": ["d1", "d2"]}}
    for name, manifest in places.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "manifest.json").write_text(json.dumps(manifest))
    other, forgotten, replaced_now = (tmp_path / name for name in ("other", "forgotten", "gone"))
    taken = []

    def examine(challenger: Path, champion: Path | None, dataset: Path, sample: int) -> dict[str, Any]:
        taken.append((dataset, sample))
        return as_planned(challenger, champion, dataset, sample)

    given: dict[str, Any] = {"examine": examine, "params": {"sample_baskets": 7}, "dry_run": True}
    world.promote(datasets=[forgotten], **given)
    world.promote(datasets=[other, replaced_now, forgotten, world.dataset], **given)
    assert taken == [(forgotten, 7), (world.dataset, 7)]


def test_a_champion_that_has_seen_the_test_weeks_is_no_measure(world: World) -> None:
    world.register("newer")
    world.promote()
    world.register("older", window="w0", cut="2017-10-30T04:00:00Z")
    with pytest.raises(NothingToCompare, match="has seen the weeks after 2017-10-30"):
        world.promote()


def test_a_champion_that_cannot_be_read_is_replaced_only_on_purpose(world: World) -> None:
    """As after a change of the feature schema: then no bundle can be measured beside it."""
    world.register("one")
    world.promote()
    world.register("two")

    def examine(challenger: Path, champion: Path | None, dataset: Path, sample: int) -> dict[str, Any]:
        fault = {"verdicts": {}, "champion_fault": "other schema"}
        return fault if champion else as_planned(challenger, champion, dataset, sample)

    with pytest.raises(NothingToCompare, match=r"\(other schema\).*--gate over_champion=0"):
        world.promote(examine=examine)
    assert world.promote(examine=examine, params={"over_champion": 0.0})["changed"]


@champions(3)
def test_rollback_walks_back_one_promotion_at_a_time(world: World) -> None:
    assert world.rollback(dry_run=True)["changed"] is False
    assert world.registry.alias("champion") == "3"
    assert world.rollback()["version"] == "2"
    assert world.rollback()["version"] == "1"
    assert read_champion(world.home).version == world.registry.alias("champion") == "1"
    with pytest.raises(NoChampion, match="no champion before 1"):
        world.rollback()
    world.promote("3")
    assert world.rollback()["version"] == "1"
    assert len(world.registry.history()) == 7


@champions(3)
def test_a_rollback_that_was_killed_before_the_pointer_is_completed_and_goes_no_further(world: World) -> None:
    third = read_champion(world.home)
    world.rollback()
    write_champion(world.home, third)
    assert world.rollback(dry_run=True)["version"] == "2"
    assert read_champion(world.home) == third
    again = world.rollback()
    assert (again["version"], again["previous"], again["changed"]) == ("2", "3", True)
    assert read_champion(world.home).version == world.registry.alias("champion") == "2"
    assert len(world.registry.history()) == 4
    assert world.rollback()["version"] == "1"


@champions(3)
def test_a_rollback_after_that_of_another_home_goes_one_further(world: World, tmp_path: Path) -> None:
    (tmp_path / "laptop").mkdir()
    assert rollback(world.uri, NAME, str(tmp_path / "laptop"))["version"] == "2"
    assert world.rollback()["version"] == "1"


@champions(3)
def test_a_rollback_after_a_promotion_in_another_registry_goes_one_further(
    world: World, tmp_path: Path, migrated: Path
) -> None:
    assert world.rollback()["version"] == "2"
    other = f"sqlite:///{shutil.copyfile(migrated, tmp_path / 'another.db')}"
    register_bundle(world.evaluated("other"), other, NAME)
    promote_bundle("challenger", [world.dataset], other, NAME, str(world.home), examine=as_planned)
    assert world.rollback()["version"] == "1"
    assert read_champion(world.home).version == world.registry.alias("champion") == "1"


@pytest.mark.parametrize("promoted_at", ["2999-01-01T00:00:00Z", 5])
@champions(3)
def test_a_rollback_after_a_registry_with_the_same_bundles_moved_the_pointer_goes_one_further(
    world: World, promoted_at: Any
) -> None:
    """That registry's champion is an earlier one of this one, but it came after the way back had ended."""
    third = read_champion(world.home)
    assert world.rollback()["version"] == "2"
    write_champion(world.home, replace(third, promoted_at=promoted_at))
    assert world.rollback()["version"] == "1"


def test_an_alias_moved_by_hand_is_a_conflict_and_is_rolled_back(world: World) -> None:
    world.register("one")
    world.promote()
    before = read_champion(world.home)
    world.register("two", 0.1)
    world.registry.point("champion", "2")
    with pytest.raises(
        Conflict, match=r"names version 2, promoted was 1: .*moved by hand.*rollback"
    ) as caught:
        world.promote("champion")
    assert caught.value.exit_code == 4
    assert f"rollback --model-name {NAME}` moves it back" in str(caught.value), "it acts on this model"
    assert read_champion(world.home) == before
    assert world.rollback(dry_run=True)["version"] == "1"
    assert world.registry.alias("champion") == "2"
    assert world.rollback()["version"] == "1"
    assert (world.registry.alias("champion"), read_champion(world.home)) == ("1", before)
    assert actions(world.registry) == [("promote", "", "1"), ("restore", "2", "1")]
    with pytest.raises(GateFailed):
        world.promote("2")
    world.register("three", 0.161)
    assert world.promote()["previous"] == "1"
    assert world.rollback()["version"] == "1"


@champions(2)
def test_an_alias_moved_back_by_hand_loses_no_line(world: World) -> None:
    """The alias names the version before, as if the last promotion had been stopped."""
    world.registry.point("champion", "1")
    with pytest.raises(Conflict, match="names version 1, promoted was 2"):
        world.promote("1")
    world.registry.unpoint("champion", str(world.registry.alias("champion")))
    with pytest.raises(Conflict, match="names version none, promoted was 2"):
        world.promote("1")
    assert len(world.registry.history()) == 2


@pytest.mark.parametrize(
    ("deleted", "back_to", "then"), [((), "3", "2"), (("3",), "2", "1"), (("2", "3"), "1", "")]
)
@champions(3)
def test_a_removed_alias_returns_to_the_newest_version_that_is_left(
    world: World, deleted: Sequence[str], back_to: str, then: str
) -> None:
    world.register("b3", 0.19)
    for version in deleted:
        world.registry._client.delete_model_version(NAME, version)
    if not deleted:
        world.registry.unpoint("champion", str(world.registry.alias("champion")))
    with pytest.raises(Conflict, match=r"names version none, promoted was 3: .*rollback"):
        world.promote("4")
    result = world.rollback()
    assert (result["version"], result["previous"]) == (back_to, "")
    assert read_champion(world.home).version == world.registry.alias("champion") == back_to
    assert world.promote("4")["previous"] == back_to
    assert world.rollback()["version"] == back_to
    if then:
        assert world.rollback()["version"] == then
    else:
        with pytest.raises(NoChampion, match="no champion before 1"):
            world.rollback()


@champions(2)
def test_when_all_promoted_versions_are_deleted_the_next_promotion_is_a_first_one(world: World) -> None:
    for version in ("2", "1"):
        world.registry._client.delete_model_version(NAME, version)
    world.register("three", 0.18)
    with pytest.raises(NoChampion, match="version 2 was deleted: promote another one"):
        world.rollback()
    world.registry.point("champion", "3")  # by hand
    with pytest.raises(Conflict, match="the alias was moved by hand"):
        world.promote("3")
    assert world.rollback() == {"version": "", "bundle_id": "", "previous": "3", "changed": True}
    result = world.promote("3")
    assert (result["previous"], result["changed"]) == ("", True)
    assert read_champion(world.home).version == world.registry.alias("champion") == "3"


@champions(3)
def test_the_champion_itself_is_no_way_back(world: World) -> None:
    """1, 2, 3 and 2 again were promoted, and 3 is deleted: before 2 came 1."""
    world.promote("2", params={"over_champion": 0.0})
    world.registry._client.delete_model_version(NAME, "3")
    assert world.rollback()["version"] == "1"
    with pytest.raises(NoChampion, match="no champion before 1"):
        world.rollback()


def test_a_home_may_promote_in_two_registries(world: World, tmp_path: Path, migrated: Path) -> None:
    world.register("one")
    world.promote()
    other = Registry(f"sqlite:///{shutil.copyfile(migrated, tmp_path / 'another.db')}", NAME)
    assert verified_history(other, world.home) == []
    assert len(verified_history(Registry(world.uri, NAME), world.home)) == 1


def test_an_alias_set_by_hand_before_any_promotion_is_removed(world: World) -> None:
    world.registry.point("champion", world.register("one"))
    with pytest.raises(Conflict, match="names version 1, promoted was none"):
        world.promote("champion")
    assert world.rollback(dry_run=True)["changed"] is False
    assert world.rollback()["version"] == ""
    assert world.registry.alias("champion") is None
    assert world.promote("1")["changed"]


@champions(2)
def test_another_bundle_under_a_promoted_number_is_a_conflict(world: World) -> None:
    world.registry._client.set_model_version_tag(NAME, "1", "bundle_id", "f" * 16)
    with pytest.raises(Conflict, match="version 1 is bundle 'f"):
        world.rollback()
    refused = world.register("three", 0.18)
    world.promote(refused, dry_run=True)  # a copy of it is under home
    other = world.registry.version(refused).bundle_id
    world.registry._client.set_model_version_tag(NAME, "2", "bundle_id", other)
    champion = read_champion(world.home)
    for version in (refused, "champion"):
        with pytest.raises(Conflict, match="its tag bundle_id was changed by hand"):
            world.promote(version)
    assert read_champion(world.home) == champion


@champions(3)
def test_a_broken_history_stops_promotion_and_rollback(world: World) -> None:
    tags = world.registry._client.get_registered_model(NAME).tags
    world.registry._client.set_registered_model_tag(NAME, "promotion.000002", tags["promotion.000001"])
    for act in (lambda: world.promote("1"), lambda: world.rollback()):
        with pytest.raises(HistoryBroken, match="line 2 of the history holds line 1"):
            act()
    assert read_champion(world.home).version == "3"


@champions(2)
def test_rollback_to_a_deleted_version_says_so(world: World) -> None:
    world.registry._client.delete_model_version(NAME, "1")
    with pytest.raises(NoChampion, match="version 1 was deleted"):
        world.rollback()
    assert world.registry.alias("champion") == "2"


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
@champions(1)
def test_a_stop_anywhere_leaves_old_or_new_and_the_next_try_completes(
    world: World, owner: Any, name: str, done: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.register("two", 0.17)
    real = getattr(owner, name)

    def killed(*arguments: Any, **options: Any) -> None:
        if done:
            real(*arguments, **options)
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, killed)
        with pytest.raises(Killed):
            world.promote()
    assert read_champion(world.home).version == ("2" if done and name == "write_champion" else "1")
    assert world.registry.alias("champion") in {"1", "2"}
    world.promote("2")
    assert json.loads((world.home / "history.json").read_text())[NAME][0] == 2
    assert read_champion(world.home).version == world.registry.alias("champion") == "2"
    assert actions(world.registry) == [("promote", "", "1"), ("promote", "1", "2")]
    assert world.rollback()["version"] == "1"


def test_a_torn_pointer_is_written_again(world: World) -> None:
    world.register("one")
    world.promote()
    before = read_champion(world.home)
    (world.home / "champion.json").write_text('{"bundle_id": ')
    with pytest.raises(NoChampion, match="`reco promote champion`"):
        read_champion(world.home)
    assert not world.promote("champion")["changed"]
    assert read_champion(world.home).bundle_id == before.bundle_id


def test_a_champion_that_moved_while_the_gate_compared_is_a_conflict(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lock covers one home; another machine's promotion shows in the alias."""
    other = world.register("other")
    world.register("one")

    def meanwhile(*arguments: Any) -> Any:
        world.registry.point("champion", other)
        return compare(*arguments)

    monkeypatch.setattr(promote_module, "compare", meanwhile)
    with pytest.raises(Conflict, match="champion is version 1 by now, it was None"):
        world.promote()
    assert world.registry.alias("champion") == other


def line_of_another_home(world: World) -> Promotion:
    """Register versions 2 and 3 beside champion 1; return the line by which another home promotes 3."""
    for name, quality in (("two", 0.17), ("three", 0.18)):
        world.register(name, quality)
    bundle_id = world.registry.version("3").bundle_id
    return next_line(world.registry.history(), "promote", "3", bundle_id, "1", "")


@champions(1)
def test_two_homes_that_promote_at_once_block_neither(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other home writes its intent over this one's, and moves the alias after it."""
    other, point = line_of_another_home(world), Registry.point

    def point_late(registry: Registry, alias: str, version: str) -> None:
        registry.intend(other)
        point(registry, alias, version)

    with monkeypatch.context() as patch:
        patch.setattr(Registry, "point", point_late)
        with pytest.raises(Conflict, match="version 2 is not in its history"):
            world.promote("2")
    world.registry.point("champion", "3")
    world.registry.complete(other)
    assert actions(world.registry) == [("promote", "", "1"), ("promote", "1", "3")]
    assert not world.promote("3")["changed"]
    assert read_champion(world.home).version == "3"
    assert world.rollback()["version"] == "1"


@champions(1)
def test_a_home_that_moves_the_alias_after_another_one_gives_it_back(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    other, point = line_of_another_home(world), Registry.point

    def point_late(registry: Registry, alias: str, version: str) -> None:
        monkeypatch.undo()
        registry.intend(other)
        point(registry, alias, "3")
        registry.complete(other)
        point(registry, alias, version)

    monkeypatch.setattr(Registry, "point", point_late)
    with pytest.raises(Conflict, match="version 2 is not in its history"):
        world.promote("2")
    assert world.registry.alias("champion") == "3"
    assert not world.promote("3")["changed"]
    assert actions(world.registry) == [("promote", "", "1"), ("promote", "1", "3")]


@champions(1)
def test_a_line_stays_when_another_home_writes_its_intent_before_the_end(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.register("two", 0.17)
    other = next_line(world.registry.history(), "promote", "3", "b3", "1", "")

    def write_head_late(*given: Any) -> None:
        world.registry.intend(other)
        write_head(*given)

    with monkeypatch.context() as patch:
        patch.setattr(promote_module, "write_head", write_head_late)
        world.promote("2")
    assert actions(world.registry) == [("promote", "", "1"), ("promote", "1", "2")]
    assert verified_history(world.registry, world.home) == world.registry.history()


def test_the_home_may_move_and_a_damaged_copy_in_it_is_fetched_again(world: World, tmp_path: Path) -> None:
    world.register("one")
    world.promote()
    moved = tmp_path / "else where?#%20"
    shutil.move(world.home, moved)
    there = f"sqlite:///{moved / 'mlflow.db'}"
    bundle = read_champion(moved).bundle(moved)
    (bundle / "index.faiss").write_text("flipped")
    promote_bundle("1", [], there, NAME, str(moved))
    assert (bundle / "index.faiss").read_text() == "one", "fetched from the registry that moved, too"
    register_bundle(world.evaluated("two", 0.17), there, NAME)
    promote_bundle("challenger", [world.dataset], there, NAME, str(moved), examine=as_planned)
    assert read_champion(moved).version == "2"
    assert rollback(there, NAME, str(moved))["version"] == "1"
    assert not world.home.exists(), "nothing is written at the old place"


def test_only_what_a_trusted_key_signed_is_promoted(world: World, tmp_path: Path) -> None:
    key, public = write_keys(tmp_path, "ours")
    trusted = public.parent

    def never(*_: object) -> dict[str, Any]:
        raise AssertionError("an unsigned bundle is opened")

    world.register("one")
    missing = r"signature: .* signed it, bundle\.sig is missing: `reco .*sign 1 --key KEY --model-name"
    with pytest.raises(GateFailed, match=missing):
        world.promote(trusted_keys=trusted, examine=never)
    assert len(world.promote(trusted_keys=trusted, examine=never, dry_run=True)["checks"]) == 1
    world.sign("1", key, datetime(2026, 11, 2, tzinfo=UTC))  # after its files were fetched
    assert world.promote(trusted_keys=trusted)["checks"][0]["metric"] == "signature"

    world.register("two", 0.17)
    world.sign("2", key, datetime(2026, 11, 1, tzinfo=UTC))
    for home in (world.home, tmp_path / "ci"):  # another one has no copy of the champion
        with pytest.raises(GateFailed, match="signed at 2026-11-01T00:00:00Z, before"):
            replace(world, home=home).promote(trusted_keys=trusted)
    world.sign("2", key, datetime(2026, 11, 3, tzinfo=UTC))
    world.promote(trusted_keys=trusted)

    for home in (tmp_path / "another", world.home):  # the first one has no copy of the champion
        with pytest.raises(SignatureInvalid, match="going back needs a signature, too"):
            replace(world, home=home).rollback(trusted_keys=trusted)
    assert (read_champion(world.home).version, world.registry.alias("champion")) == ("2", "2")
    world.rollback(key=key, trusted_keys=trusted)
    assert read_champion(world.home).version == "1"
    for version in ("1", "2"):
        world.registry._client.delete_model_version(NAME, version)
    world.register("three", 0.18)
    world.sign("3", key, datetime(2026, 11, 1, tzinfo=UTC))
    with pytest.raises(GateFailed, match="signed at 2026-11-01T00:00:00Z, before"):
        world.promote("3", trusted_keys=trusted)  # older than the champion that was deleted
    world.sign("3", key)
    world.promote("3", trusted_keys=trusted)
    world.register("four", 0.19)
    world.sign("4", key)
    (trusted / "revoked.txt").write_text(f"{world.registry.version('4').bundle_id}\n")
    with pytest.raises(GateFailed, match="is revoked by"):
        world.promote("4", trusted_keys=trusted)


@champions(1)
def test_a_damaged_champion_is_no_fault_of_the_challengers_signature(world: World, tmp_path: Path) -> None:
    key, public = write_keys(tmp_path, "ours")
    for folder in ("bundles", "mlflow"):
        [file] = (world.home / folder).rglob("index.faiss")
        file.write_text("flipped")
    world.register("two", 0.17)
    world.sign("2", key)
    assert world.promote(trusted_keys=public.parent, params={"over_champion": 0.0})["changed"]


def test_refused_signatures_do_not_replace_those_of_the_local_copy(world: World, tmp_path: Path) -> None:
    key, public = write_keys(tmp_path, "ours")
    (tmp_path / "away").mkdir()
    stranger, _ = write_keys(tmp_path / "away", "theirs")
    world.register("one")
    signed = world.home / "bundles" / world.registry.version("1").bundle_id
    for signer, passes in ((key, True), (stranger, False)):
        world.sign("1", signer)
        checks = world.promote(trusted_keys=public.parent, dry_run=True)["checks"]
        assert checks[0]["passed"] is passes
        assert check_signed(signed, public.parent).key == public


@champions(1)
def test_a_champion_that_is_signed_later_gets_its_signatures_by_another_promotion(
    world: World, tmp_path: Path
) -> None:
    key, public = write_keys(tmp_path, "ours")
    champion = read_champion(world.home).bundle(world.home)
    world.sign("1", key)
    world.promote("champion", trusted_keys=public.parent, dry_run=True)
    assert not list(champion.glob("*.sig"))
    assert not world.promote("champion", trusted_keys=public.parent)["changed"]
    assert check_signed(champion, public.parent).key == public


@champions(2)
def test_a_way_back_that_was_signed_elsewhere_needs_no_key(world: World, tmp_path: Path) -> None:
    key, public = write_keys(tmp_path, "ours")
    for day, version in enumerate(("1", "2"), 1):
        world.sign(version, key, datetime(2026, 11, day, tzinfo=UTC))
        renew_signatures(world.registry, world.home, world.registry.version(version), public.parent)
    with pytest.raises(SignatureInvalid, match="going back needs a signature, too"):
        world.rollback(trusted_keys=public.parent)
    world.sign("1", key, datetime(2026, 11, 3, tzinfo=UTC))
    assert world.rollback(trusted_keys=public.parent)["version"] == "1"
    assert check_signed(read_champion(world.home).bundle(world.home), public.parent).at.day == 3


@champions(2)
def test_a_revoked_bundle_gets_no_signature_on_the_way_back(world: World, tmp_path: Path) -> None:
    key, public = write_keys(tmp_path, "ours")
    first = world.registry.version("1")
    (public.parent / "revoked.txt").write_text(f"{first.bundle_id}\n")
    with pytest.raises(SignatureInvalid, match="is revoked by"):
        world.rollback(key=key, trusted_keys=public.parent)
    assert not world.registry.names(first) & set(SIGNATURE_FILES)
    assert not list((world.home / "bundles" / first.bundle_id).glob("*.sig"))
    (public.parent / "revoked.txt").unlink()
    world.rollback(key=key, trusted_keys=public.parent)
    assert world.registry.names(first) >= set(SIGNATURE_FILES)
    assert check_signed(world.home / "bundles" / first.bundle_id, public.parent).key == public


def test_a_registry_that_keeps_signatures_back_is_unreachable_and_no_verdict(
    world: World, tmp_path: Path
) -> None:
    key, public = write_keys(tmp_path, "ours")
    world.register("one")
    world.promote(dry_run=True)  # its files are under home by now
    world.sign("1", key)
    [stored] = (world.home / "mlflow").rglob("bundle.sig")
    stored.unlink()
    stored.symlink_to(stored)  # it is listed and cannot be read
    with pytest.raises(RegistryUnreachable, match="nothing was changed") as caught:
        world.promote("1", trusted_keys=public.parent, dry_run=True)
    assert caught.value.exit_code == 3
