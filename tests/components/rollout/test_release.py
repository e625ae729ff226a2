"""The state machine against the API in memory: where a release ends after crashes, and which one runs."""

import contextlib
import copy
import json
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from components.home import Conflict
from components.rollout.cluster import Cluster, ClusterUnreachable, Stale
from components.rollout.manifests import BUNDLE_VARIABLE, STOP, source_of, weights
from components.rollout.observe import CallerRefused
from components.rollout.plan import Release
from components.rollout.release import Aborted, NoRelease
from feature_repo.errors import UNREACHABLE
from tests.chaos.procs import eventually
from tests.components.rollout.toy_cluster import HOLD_S, Killed, RegistryAway, ToyCluster

GUIDE = Path(__file__).parents[3] / "docs" / "how-to" / "release-and-roll-back.md"


def slots(cluster: ToyCluster) -> dict[str, str]:
    return {name: source_of(cluster.slot(name)) for name in ("blue", "green")}


def seen(cluster: ToyCluster) -> list[tuple[str, int]]:
    """The states of the release, filled while it runs."""
    found: list[tuple[str, int]] = []

    def look() -> None:
        record, split = cluster.rollout().status()
        assert record
        if not found or found[-1] != (record.state, split["green"]):
            found.append((record.state, split["green"]))

    cluster.stops = look
    return found


def test_a_good_version_gets_all_traffic_in_steps_and_becomes_champion_last(cluster: ToyCluster) -> None:
    states, began = seen(cluster), cluster.now
    record = cluster.release()
    assert cluster.now - began - HOLD_S <= 300.0, "at 50 requests a second, the hold apart"
    assert states == [("shadow", 0), ("step", 1), ("step", 5), ("step", 25), ("step", 50), ("hold", 100)]
    assert (record.state, record.canary) == ("done", "green")
    assert weights(cluster.route()) == {"blue": 0, "green": 100}
    assert cluster.catalogue.champions == ["1", "2"]
    assert slots(cluster) == {"blue": "", "green": "s3://bundles/b2"}, "the old slot is parked"
    steps = [f"step {weight} %" for weight in (1, 5, 25, 50)]
    assert [look["at"] for look in record.gate] == ["shadow", *steps]
    assert all(row["reveals"] is not None for row in record.gate[2]["rows"]), "each says what it can see"


def test_a_slot_that_may_get_all_traffic_has_as_many_pods_as_the_other(cluster: ToyCluster) -> None:
    cluster.autoscale(blue=9)
    found: list[tuple[str, int, int]] = []

    def look() -> None:
        record, _ = cluster.rollout().status()
        assert record
        found.append((record.state, cluster.pods("blue"), cluster.pods("green")))

    cluster.stops = look
    cluster.release()
    assert {pods for state, *pair in found if state in ("shadow", "step", "hold") for pods in pair} == {9}
    assert cluster.floors() == {"blue": 9, "green": 2}, "each has its own again"
    cluster.autoscale(green=7)
    found.clear()
    cluster.rollout().rollback()
    assert found[-1] == ("hold", 9, 9)
    assert cluster.floors() == {"blue": 9, "green": 7}
    cluster.errors = 0.1
    with pytest.raises(Aborted):
        cluster.release("3")
    assert cluster.floors() == {"blue": 9, "green": 7}


def test_the_next_release_goes_back_to_the_first_slot(cluster: ToyCluster) -> None:
    cluster.release()
    record = cluster.release("3")
    assert (record.state, record.stable, record.canary) == ("done", "green", "blue")
    assert slots(cluster) == {"blue": "s3://bundles/b3", "green": ""}


@pytest.mark.parametrize(("fault", "share"), [("errors", 0.02), ("less", 0.1), ("slow", 0.3)])
def test_a_bad_version_is_aborted_within_60_s_at_5_percent_or_less(
    cluster: ToyCluster, fault: str, share: float
) -> None:
    setattr(cluster, fault, share)
    states, began = seen(cluster), cluster.now
    with pytest.raises(Aborted, match="refused"):
        cluster.release()
    assert cluster.now - began <= 60.0
    assert max(weight for _, weight in states) <= 5
    assert weights(cluster.route()) == {"blue": 100, "green": 0}
    assert slots(cluster) == {"blue": "s3://bundles/b1", "green": ""}
    assert cluster.catalogue.champions == ["1"]
    assert cluster.catalogue.refused == ["2"]


@pytest.mark.parametrize("slot", ["blue", "green"])
def test_missing_metrics_hold_and_then_abort(cluster: ToyCluster, slot: str) -> None:
    def away() -> None:
        if weights(cluster.route())["green"] == 5:
            cluster.no_metrics.add(slot)

    cluster.stops = away
    with pytest.raises(Aborted, match=f"slot {slot}: no metrics"):
        cluster.release()
    assert weights(cluster.route())["blue"] == 100


def test_pods_that_never_start_abort_and_get_no_request(cluster: ToyCluster) -> None:
    cluster.stuck = True
    states = seen(cluster)
    with pytest.raises(Aborted, match="stage after 1200 s"):
        cluster.release()
    assert {weight for _, weight in states} == {0}


def test_too_few_answers_hold_and_then_abort(cluster: ToyCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.components.rollout.toy_cluster.RATE", 0.01)
    with pytest.raises(Aborted, match=r"shadow after 1800 s: .* answers"):
        cluster.release()


def park_blue(cluster: ToyCluster) -> None:
    parked = {"metadata": {"annotations": {"serving.kserve.io/stop": "true"}}}
    cluster.objects.merge(("inferenceservices", "checkout", "checkout-blue"), parked)


def test_without_a_stable_slot_there_is_nothing_to_compare(cluster: ToyCluster) -> None:
    park_blue(cluster)
    states = seen(cluster)
    record = cluster.release()
    assert (record.state, [state for state, _ in states]) == ("done", ["hold"])


def test_one_deployer_judges_its_second_version_by_that_versions_own_data(cluster: ToyCluster) -> None:
    deployer = cluster.rollout()
    cluster.errors = 0.3
    with pytest.raises(Aborted, match="shadow: errors"):
        deployer.start("2")
    cluster.errors = 0.0
    assert deployer.start("3").state == "done"
    assert cluster.catalogue.fetched == ["2", "3"]


# ------------------------------------------------------------------------------------------ crashes


def finish(cluster: ToyCluster) -> None:
    """Resume as the next pod of the Job does; a release that was not claimed yet begins again."""
    cluster.kill_after, cluster.now = 0, cluster.now + 61.0
    try:
        cluster.rollout("job-2").resume()
    except NoRelease:
        record, _ = cluster.rollout().status()
        if record is None:
            cluster.release()
    except Aborted:
        pass


@pytest.mark.slow
@pytest.mark.parametrize("line", ["good version", "bad version", "rollback in the hold", "rollback after it"])
def test_a_crash_after_each_write_ends_after_resume_in_the_same_state(tmp_path: Path, line: str) -> None:
    first = ToyCluster(tmp_path)
    if line == "rollback in the hold":
        die_at(first, 100)
    elif line == "rollback after it":
        first.release()
    first.less = 0.2 if line == "bad version" else 0.0

    crashed: list[ToyCluster] = []  # as a kill after each write leaves it

    def copied() -> None:
        lock, first.wrote = first.objects._lock, lambda: None  # the first cannot be copied
        crashed.append(copy.deepcopy(first, {id(lock): lock}))
        first.wrote = copied

    first.wrote = copied
    with pytest.raises(Aborted) if line == "bad version" else contextlib.nullcontext():
        if line.startswith("rollback"):
            first.rollout("a person").rollback()
        else:
            first.release()
    wanted = first.state()
    wanted["record"].pop("reason")
    for number, cluster in enumerate(crashed, 1):
        finish(cluster)
        found = cluster.state()
        found["record"].pop("reason")  # it holds counts of answers
        assert found == wanted, f"killed after write {number}"
    assert f"| {line} | {len(crashed)} |" in GUIDE.read_text(encoding="utf-8")


@pytest.mark.parametrize("ended_by", ["job-1", "guard"])
def test_a_job_whose_release_was_aborted_does_not_begin_it_again(cluster: ToyCluster, ended_by: str) -> None:
    if ended_by == "guard":
        die_at(cluster, 25)
        cluster.now += 301.0
        with pytest.raises(Aborted, match="its deployer was silent for 301 s"):
            cluster.rollout("guard").guard()
        assert weights(cluster.route()) == {"blue": 100, "green": 0}
    else:
        cluster.less = 0.2
        with pytest.raises(Aborted, match="less than full"):
            cluster.release()
        cluster.less = 0.0
    before, writes = cluster.state(), cluster.writes
    for version in ("2", "challenger"):  # the abort has taken the alias
        with pytest.raises(Aborted, match="version 2 was refused"):
            cluster.rollout("job-1").resume(version)
    assert (cluster.state(), cluster.writes) == (before, writes)
    with pytest.raises(NoRelease):
        cluster.rollout("job-2").resume("2")


def test_a_job_whose_release_is_done_does_not_begin_it_again(cluster: ToyCluster) -> None:
    cluster.release()
    writes = cluster.writes
    assert cluster.rollout("job-1").resume("2").state == "done"
    assert cluster.writes == writes


def test_a_job_whose_release_was_rolled_back_by_hand_does_not_begin_it_again(cluster: ToyCluster) -> None:
    die_at(cluster, 25)
    with contextlib.suppress(Aborted):
        cluster.rollout("a person").rollback()
    cluster.rollout("job-2").start("3")
    before, writes = cluster.state(), cluster.writes
    with pytest.raises(Conflict, match="the release of job-1 is over, and job-2 began one of version 3"):
        cluster.rollout("job-1").resume("2")
    assert (cluster.state(), cluster.writes) == (before, writes)


def test_a_live_deployer_is_not_resumed_by_another(cluster: ToyCluster) -> None:
    def intrude() -> None:
        with pytest.raises(Conflict, match="is being released by job-1"):
            cluster.rollout("job-2").resume()
        with pytest.raises(Conflict, match="is being released"):
            cluster.release("3", "job-2")

    cluster.stops = intrude
    assert cluster.release().state == "done"


def test_of_eight_concurrent_releases_one_runs(cluster: ToyCluster) -> None:
    ends: list[Any] = []
    begin = threading.Barrier(8)
    cluster.stops = lambda: None

    def run(number: int) -> None:
        rollout = cluster.rollout(f"job-{number}")
        begin.wait()
        try:
            ends.append(rollout.start("2").state)
        except Conflict as error:
            ends.append(error.exit_code)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(map(str, ends)) == ["4"] * 7 + ["done"]


def die_at(cluster: ToyCluster, weight: int) -> None:
    def look() -> None:
        if weights(cluster.route())["green"] == weight:
            cluster.stops = lambda: None
            raise Killed

    cluster.stops = look
    with pytest.raises(Killed):
        cluster.release()


def test_a_version_waits_for_a_valid_token_of_the_caller_and_is_not_refused(cluster: ToyCluster) -> None:
    cluster.refuses_callers = True
    with pytest.raises(CallerRefused) as refused:
        cluster.release()
    assert (refused.value.exit_code, cluster.catalogue.refused) == (UNREACHABLE, [])
    assert weights(cluster.route())["green"] == 0
    cluster.refuses_callers = False  # the Job's next pod reads the token of now
    assert cluster.rollout().resume().state == "done"
    cluster.refuses_callers = True
    with pytest.raises(CallerRefused):
        cluster.rollout().rollback()
    cluster.refuses_callers = False
    cluster.now += 301.0
    back = cluster.rollout("guard").guard()
    assert back is not None
    assert (back.kind, back.state, cluster.catalogue.champions) == ("rollback", "done", ["1"])


def test_a_job_goes_on_with_its_own_version_alone(cluster: ToyCluster) -> None:
    die_at(cluster, 25)
    cluster.now += 61.0
    cluster.catalogue.challenger = "3"
    for version in ("3", "challenger"):
        with pytest.raises(Conflict, match=f"version 2 is unfinished .step 25 %., not {version}"):
            cluster.rollout("job-3").resume(version)
    assert weights(cluster.route())["green"] == 25
    cluster.catalogue.challenger = "2"
    assert cluster.rollout("job-2").resume("challenger").state == "done"


def test_an_older_deployer_keeps_what_a_newer_one_wrote_into_the_record(cluster: ToyCluster) -> None:
    def record() -> dict[str, Any]:
        return dict(json.loads(cluster.route()["metadata"]["annotations"]["reco.dev/release"]))

    die_at(cluster, 25)
    noted = {"metadata": {"annotations": {"reco.dev/release": json.dumps(record() | {"newer": 1})}}}
    cluster.objects.merge(("httproutes", "checkout", "checkout"), noted)
    cluster.rollout("job-1").resume("2")
    assert (record()["state"], record()["newer"]) == ("done", 1)
    cluster.release("3")
    assert "newer" not in record(), "it was of another release"


def test_after_the_seal_the_lost_alias_still_means_the_sealed_version(cluster: ToyCluster) -> None:
    die_at(cluster, 100)
    cluster.now += 61.0
    with pytest.raises(Conflict, match="not 3"):
        cluster.rollout("job-3").resume("3")
    assert cluster.rollout("job-2").resume("challenger").state == "done"


@pytest.mark.parametrize("act", ["check", "publish", "seal"])
def test_a_deployer_beats_while_it_asks_the_registry(
    cluster: ToyCluster, monkeypatch: pytest.MonkeyPatch, act: str
) -> None:
    monkeypatch.setattr("components.rollout.release.BEAT_S", 0.05)
    real, beats = getattr(cluster.catalogue, act), list[float]()

    def is_seen() -> bool:
        found, _ = cluster.rollout().status()
        return found is not None and found.beat == cluster.now

    def takes_an_hour(record: Release) -> None:
        cluster.now += 3_600.0
        eventually(is_seen)
        guarded = cluster.rollout("guard").guard()
        assert guarded
        assert guarded.state == record.state
        with pytest.raises(Conflict, match="is being released by job-1, seen 0 s ago"):
            cluster.rollout("job-2").resume()
        beats.append(guarded.beat)
        real(record)

    monkeypatch.setattr(cluster.catalogue, act, takes_an_hour)
    assert cluster.release().state == "done"
    assert len(beats) == 1


@pytest.mark.parametrize("act", ["check", "a step", "seal"])
def test_a_deployer_that_was_ended_writes_nothing_more(
    cluster: ToyCluster, monkeypatch: pytest.MonkeyPatch, act: str
) -> None:
    """Also while it asks the registry. At the seal its alias has moved all the same: it is taken back."""

    def ended_meanwhile(record: Release) -> None:
        cluster.rollout("a person").rollback()
        time.sleep(0.2)  # beats are due
        real(record)

    def end() -> None:
        if weights(cluster.route())["green"] == 5:
            cluster.stops = lambda: None
            cluster.rollout("a person").rollback()

    if act == "a step":
        cluster.stops = end
    else:
        monkeypatch.setattr("components.rollout.release.BEAT_S", 0.05)
        real = getattr(cluster.catalogue, act)
        monkeypatch.setattr(cluster.catalogue, act, ended_meanwhile)
    with pytest.raises(Conflict, match="another deployer has taken over"):
        cluster.release()
    assert cluster.state()["record"]["state"] == "aborted"
    assert cluster.catalogue.champions == ["1"]
    assert weights(cluster.route()) == {"blue": 100, "green": 0}


def test_a_rollback_during_the_gate_ends_it_and_the_next_one_goes_back(
    cluster: ToyCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.release()
    monkeypatch.setattr("components.rollout.release.BEAT_S", 0.05)
    ends: list[str] = []
    person = threading.Thread(target=lambda: cluster.rollout("a person").rollback())

    def long_gate(record: Release) -> None:
        person.start()
        for _ in range(1_000):
            time.sleep(0.01)  # `subprocess.run` looks so, too, and kills its child then
        ends.append("by itself")

    with monkeypatch.context() as patch:
        patch.setattr(cluster.catalogue, "check", long_gate)
        before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # as `reco release` does
        try:
            with pytest.raises(Conflict, match="another deployer has taken over"):
                cluster.release("3", "job-3")
        finally:
            signal.signal(signal.SIGTERM, before)
    person.join()
    assert ends == [], "its process holds the lock that the next rollback needs"
    assert weights(cluster.route())["green"] == 100
    assert "version 3 had no traffic: its release ends, and the traffic stays" in "\n".join(cluster.said)
    back = cluster.rollout("a person").rollback()
    assert (back.version, back.state, weights(cluster.route())["blue"]) == ("1", "done", 100)


def test_a_deployer_whose_patch_comes_after_a_rollback_leaves_the_slot_alone(
    cluster: ToyCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A patch that the API put off is stale by then, as after a change of the status."""
    patch, tried = Cluster.patch, list[str]()

    def late(self: Cluster, kind: str, name: str, changes: Any, version: str) -> Any:
        if kind == "InferenceService" and not tried:
            tried.append(name)
            cluster.rollout("a person").rollback()
            raise Stale("changed meanwhile")
        return patch(self, kind, name, changes, version)

    monkeypatch.setattr(Cluster, "patch", late)
    with pytest.raises(Conflict, match="another deployer has taken over"):
        cluster.release()
    assert cluster.state()["record"]["state"] == "aborted"
    slot = cluster.slot(tried[0].removeprefix("checkout-"))
    assert slot["metadata"]["annotations"][STOP] == "true"


def test_a_beat_whose_answer_was_lost_ends_no_release_and_the_next_follow(
    cluster: ToyCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("components.rollout.release.BEAT_S", 0.02)
    check, patch, lost = cluster.catalogue.check, Cluster.patch, threading.Event()

    def long_check(record: Release) -> None:
        cluster.now += 1.0  # a beat differs from the record before it
        assert lost.wait(60)
        cluster.now += 301.0
        eventually(lambda: cluster.rollout().status()[0].beat == cluster.now)  # type: ignore[union-attr]
        check(record)

    def lose_one(self: Cluster, kind: str, *rest: Any) -> None:
        patch(self, kind, *rest)
        if threading.current_thread() is not threading.main_thread() and not lost.is_set():
            lost.set()
            raise ClusterUnreachable("the answer was lost")

    monkeypatch.setattr(cluster.catalogue, "check", long_check)
    monkeypatch.setattr(Cluster, "patch", lose_one)
    assert cluster.release().state == "done"


def test_a_registry_away_at_the_seal_leaves_all_traffic_and_is_resumed(cluster: ToyCluster) -> None:
    cluster.catalogue.away_at.add("seal")
    with pytest.raises(RegistryAway):
        cluster.release()
    assert weights(cluster.route())["green"] == 100
    assert cluster.catalogue.champions == ["1"]
    cluster.catalogue.away_at.clear()
    cluster.now += 301.0
    assert cluster.rollout("guard").guard().state == "done"  # type: ignore[union-attr]
    assert cluster.catalogue.champions == ["1", "2"]


@pytest.mark.parametrize(
    ("act", "state"), [("verify", "verify"), ("publish", "publish"), ("bundle", "stage")]
)
def test_a_service_away_before_any_traffic_keeps_the_release_for_the_jobs_next_pod(
    cluster: ToyCluster, act: str, state: str
) -> None:
    cluster.catalogue.away_at.add(act)
    with pytest.raises(RegistryAway):
        cluster.release()
    for waits_s in (10, 20, 40, 80, 160):  # between two pods of a Job: over five minutes in sum
        cluster.now += waits_s
        assert cluster.rollout("guard").guard().state == state  # type: ignore[union-attr]
        with pytest.raises(RegistryAway):
            cluster.rollout("job-1").resume("2")
    assert weights(cluster.route())["blue"] == 100
    assert cluster.catalogue.refused == []
    cluster.catalogue.away_at.clear()
    assert cluster.rollout("job-1").resume("2").state == "done"


def test_the_guard_ends_a_release_whose_service_stays_away(cluster: ToyCluster) -> None:
    cluster.catalogue.away_at |= {"verify", "undo"}
    with pytest.raises(RegistryAway):
        cluster.release()
    cluster.now += 301.0
    with pytest.raises(Aborted, match="its deployer was silent for 301 s"):
        cluster.rollout("guard").guard()
    cluster.catalogue.away_at.clear()
    assert cluster.release().state == "done"


def test_a_deployer_that_lives_on_goes_on_with_its_release(cluster: ToyCluster) -> None:
    """As `reco release --watch` does, which asks again when a service was away."""
    deployer = cluster.rollout()
    cluster.catalogue.away_at.add("publish")
    with pytest.raises(RegistryAway):
        deployer.start("2")
    with pytest.raises(Conflict, match=r"is being released \(publish\) by job-1"):
        deployer.start("3")
    cluster.catalogue.away_at.clear()
    assert deployer.start("2").state == "done"


@pytest.mark.parametrize("act", ["verify", "publish"])
def test_a_conflict_of_the_registry_before_any_pod_ends_the_release(cluster: ToyCluster, act: str) -> None:
    cluster.catalogue.conflict_at = act
    with pytest.raises(Conflict, match="moved by hand"):
        cluster.release()
    assert cluster.state()["record"]["state"] == "aborted"
    cluster.catalogue.conflict_at = ""
    assert cluster.release("3").state == "done"


@pytest.mark.parametrize("state", ["verify", "seal"])
def test_a_release_waits_for_another_promotion_of_its_home(cluster: ToyCluster, state: str) -> None:
    cluster.catalogue.busy[state] = 3
    assert cluster.release().state == "done"
    assert cluster.catalogue.busy[state] == 0
    assert cluster.catalogue.refused == []
    waits = [line for line in cluster.said if "waits: process 7 is judging version 5" in line]
    assert len(waits) == 1, "it is said once"


def test_a_conflict_at_the_seal_leaves_all_traffic_and_a_rollback_ends_it(cluster: ToyCluster) -> None:
    cluster.catalogue.conflict_at = "seal"
    with pytest.raises(Conflict, match="moved by hand"):
        cluster.release()
    assert weights(cluster.route())["green"] == 100
    assert cluster.rollout().rollback().state == "aborted"
    assert weights(cluster.route())["blue"] == 100


def test_a_registry_away_in_an_abort_delays_it_only_if_the_alias_may_have_moved(cluster: ToyCluster) -> None:
    cluster.catalogue.away_at.add("undo")
    cluster.less = 0.2
    with pytest.raises(Aborted):
        cluster.release()
    cluster.less = 0.0
    die_at(cluster, 100)
    with pytest.raises(RegistryAway):
        cluster.rollout("a person").rollback()
    assert cluster.state()["record"]["state"] == "abort"
    assert (weights(cluster.route())["blue"], cluster.catalogue.champions) == (100, ["1", "2"])
    cluster.catalogue.away_at.clear()
    cluster.now += 301.0
    with pytest.raises(Aborted, match="rolled back by hand"):
        cluster.rollout("guard").guard()
    assert cluster.catalogue.champions == ["1"]


# ----------------------------------------------------------------------------------------- rollback


def test_a_rollback_in_the_hold_is_one_patch_of_weights_before_anything_else(cluster: ToyCluster) -> None:
    die_at(cluster, 100)
    before = cluster.writes
    cluster.kill_after = before + 1
    with pytest.raises(Killed):
        cluster.rollout("job-1").rollback()
    assert weights(cluster.route()) == {"blue": 100, "green": 0}
    finish(cluster)
    assert cluster.catalogue.champions == ["1"]
    assert slots(cluster) == {"blue": "s3://bundles/b1", "green": ""}


def test_a_rollback_in_the_hold_of_the_first_release_leaves_the_traffic_where_pods_are(
    cluster: ToyCluster,
) -> None:
    park_blue(cluster)
    die_at(cluster, 100)
    before = cluster.state()
    with pytest.raises(NoRelease, match="no version was served before 2, and slot blue has no pods"):
        cluster.rollout("a person").rollback()
    assert cluster.state() == before
    cluster.now += 301.0
    assert cluster.rollout("job-1").resume("2").state == "done"


@pytest.mark.parametrize("slash", ["", "/"])
def test_a_champion_whose_new_pods_are_refused_stays_champion(cluster: ToyCluster, slash: str) -> None:
    """As with another image: the old pods have the same bundle, and keep the traffic."""
    spec = copy.deepcopy(cluster.slot("blue")["spec"])
    [bundle] = [one for one in spec["predictor"]["containers"][0]["env"] if one["name"] == BUNDLE_VARIABLE]
    bundle["value"] += slash  # the guide writes it so
    cluster.objects.merge(("inferenceservices", "checkout", "checkout-blue"), {"spec": spec})
    assert f"s3://bundles/b1{slash}" in json.dumps(cluster.slot("blue"))
    cluster.stuck = True
    with pytest.raises(Aborted):
        cluster.release("1")
    assert cluster.catalogue.champions == ["1"]
    assert slots(cluster) == {"blue": "s3://bundles/b1", "green": ""}


def test_a_rollback_during_an_abort_ends_the_abort_and_nothing_else(cluster: ToyCluster) -> None:
    cluster.release()  # 2 is champion

    def die_in_the_abort() -> None:
        if weights(cluster.route())["blue"] == 5:
            cluster.stops, cluster.kill_after = lambda: None, cluster.writes + 1
            cluster.rollout("a person").rollback()

    cluster.stops = die_in_the_abort
    with pytest.raises(Killed):
        cluster.release("3")
    assert cluster.state()["record"]["state"] == "abort"
    ended = cluster.rollout().rollback()
    assert (ended.version, ended.state) == ("3", "aborted")
    assert cluster.catalogue.champions == ["1", "2"]
    assert weights(cluster.route()) == {"blue": 0, "green": 100}


def test_a_rollback_after_the_hold_fills_the_parked_slot_first(cluster: ToyCluster) -> None:
    cluster.release()
    began = cluster.now
    states = seen(cluster)
    record = cluster.rollout().rollback()
    assert (record.kind, record.state, record.canary) == ("rollback", "done", "blue")
    assert cluster.catalogue.champions == ["1"]
    assert states == [("hold", 0)]
    assert cluster.now - began <= HOLD_S + 60.0
    assert slots(cluster) == {"blue": "s3://bundles/b1", "green": ""}


@pytest.mark.parametrize("stopped_at", ["the slot's start", "the seal"])
def test_a_rollback_that_is_asked_for_again_goes_on(cluster: ToyCluster, stopped_at: str) -> None:
    cluster.release()
    if stopped_at == "the seal":
        cluster.catalogue.away_at.add("seal")
        with pytest.raises(RegistryAway):
            cluster.rollout("a person").rollback()
        cluster.catalogue.away_at.clear()
    else:

        def die() -> None:
            cluster.stops = lambda: None
            raise Killed

        cluster.stops, cluster.stuck = die, True
        with pytest.raises(Killed):
            cluster.rollout("a person").rollback()
        cluster.stuck = False
    record = cluster.rollout("another").rollback()
    assert (record.kind, record.version, record.state) == ("rollback", "1", "done")
    assert weights(cluster.route()) == {"blue": 100, "green": 0}
    assert cluster.catalogue.champions == ["1"]


def test_the_guard_ends_a_rollback_where_it_was_to_end(cluster: ToyCluster) -> None:
    cluster.release()
    cluster.kill_after = cluster.writes + 5
    with pytest.raises(Killed):
        cluster.rollout("a person").rollback()
    assert weights(cluster.route()) == {"blue": 0, "green": 100}
    cluster.kill_after, cluster.now = 0, cluster.now + 301.0
    cluster.rollout("guard").guard()
    assert weights(cluster.route()) == {"blue": 100, "green": 0}
    assert cluster.catalogue.champions == ["1"]


def test_a_dry_run_shows_the_patches_and_writes_nothing(cluster: ToyCluster) -> None:
    before = cluster.objects.version
    patches = list(cluster.rollout().patches("2"))
    kinds = [name for name, _ in patches if name.startswith("Inf")]
    assert kinds == ["InferenceService checkout-green"] * 2 + ["InferenceService checkout-blue"]
    shares = [
        changes["spec"]["rules"][-1]["backendRefs"][1]["weight"]
        for _, changes in patches
        if "rules" in changes.get("spec", {})
    ]
    assert shares == [0, 0, 1, 5, 25, 50, 100]
    assert cluster.catalogue.published == set()
    assert [one["spec"] for one in cluster.objects.list("httproutes")] == [cluster.route()["spec"]]
    assert int(cluster.objects.version) - int(before) < 20, "KServe's own writes alone"
