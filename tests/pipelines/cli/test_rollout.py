"""`reco release`: its answers and exit codes, on the API in memory."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from click.testing import CliRunner

from components.rollout import NAMESPACE
from components.rollout.cluster import ClusterUnreachable
from components.rollout.manifests import weights
from components.rollout.observe import Observer
from components.rollout.plan import to_json
from components.rollout.release import Rollout
from feature_repo.errors import CHECK_FAILED
from pipelines.cli import rollout
from pipelines.cli.shell import main
from pipelines.live.cluster_api import ApiServer
from pipelines.live.slots import new_cluster
from serving.release.champion import Champion, write_champion
from tests.components.rollout.toy_cluster import RECORD, ToyCluster
from tests.kubernetes_api import kubernetes_api

ROUTE = ("httproutes", NAMESPACE, "checkout")


@pytest.fixture
def api(tmp_path: Path) -> Iterator[ApiServer]:
    objects = new_cluster((tmp_path / "bundles" / "b1").as_uri(), tmp_path / "log")
    with kubernetes_api(objects) as server:
        yield server


@pytest.fixture
def reco(api: ApiServer, tmp_path: Path) -> Any:
    """On a machine without a registry."""

    def run(*arguments: str, url: str = api.url) -> Any:
        given = ["--home", str(tmp_path), *arguments, "--cluster", url]
        where = ["--gateway", "http://gateway"] if arguments[0] == "release" else []
        return CliRunner().invoke(main, [*given, *where])

    return run


def stands(api: ApiServer, **fields: Any) -> dict[str, Any]:
    """Write the record of a release into the route, and a host; return the route."""
    record = json.dumps(json.loads(to_json(RECORD)) | fields)
    note = {"metadata": {"annotations": {"reco.dev/release": record}}}
    return api.objects.merge(ROUTE, {**note, "spec": {"hostnames": ["checkout.example"]}})


def test_the_status_shows_state_weights_and_the_gates_table(reco: Any, api: ApiServer) -> None:
    assert "no release yet; blue 100 %, green 0 %" in reco("release", "--status").stdout
    row = {"share": "errors", "stable": "0 of 9", "canary": "1 of 9", "reveals": 0.25, "verdict": "ok"}
    look = {"at": "shadow", "verdict": "hold", "reason": "9 of 600 answers", "rows": [row]}
    stands(api, gate=[look], state="shadow")
    shown = reco("release", "--status")
    assert shown.exit_code == 0, shown.output
    assert "version 2, bundle b2, to green" in shown.stdout
    assert "25.00% or more" in shown.stdout
    document = json.loads(reco("release", "--status", "--output", "json").stdout)
    assert document["release"]["state"] == "shadow"
    assert document["weights"] == {"blue": 100, "green": 0}


@pytest.mark.parametrize("is_away_at_the_end", [False, True])
def test_a_job_that_is_started_again_after_an_abort_ends_as_aborted(
    reco: Any, api: ApiServer, monkeypatch: pytest.MonkeyPatch, is_away_at_the_end: bool
) -> None:
    def fail(_: Rollout) -> Any:
        raise ClusterUnreachable("the API does not answer")

    before = stands(api, state="aborted", reason="step 5 %", started_by="job-1")
    if is_away_at_the_end:
        monkeypatch.setattr(Rollout, "status", fail)
    registry = ("--tracking-uri", "http://127.0.0.1:9")
    done = reco("release", "2", "--resume", "--deployer", "job-1", *registry)
    assert (done.exit_code, "version 2 was refused at step 5 %" in done.output) == (CHECK_FAILED, True)
    assert api.objects.get(ROUTE) == before


@pytest.mark.parametrize("is_by_hand", [False, True])
def test_a_version_that_kept_its_alias_at_its_end_loses_it_and_is_not_released_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_by_hand: bool
) -> None:
    """The registry is away at the end, and at the next look. Later a person gives the alias again."""
    cluster, said, refused = ToyCluster(tmp_path), list[str](), list[list[str]]()
    cluster.catalogue.away_at.add("undo")

    def roll_back() -> None:
        if weights(cluster.route())["green"] == 5:
            cluster.stops = lambda: None
            cluster.rollout("a person").rollback()

    if is_by_hand:
        cluster.stops = roll_back
    else:
        cluster.less = 0.2
    catalogue = Mock(undo=cluster.catalogue.undo)
    catalogue.challenger.side_effect = ["2", "2", "2", None, "2"]  # then it ends

    def sleep(_: float) -> None:
        refused.append(list(cluster.catalogue.refused))
        if len(refused) == 2:
            cluster.catalogue.away_at.clear()

    monkeypatch.setattr(rollout, "time", Mock(sleep=sleep))
    with pytest.raises(StopIteration):
        rollout._follow(Mock(say=said.append), cluster.rollout(), catalogue)
    assert refused == [[], [], ["2"], ["2"], ["2"]]
    assert said.count("version 2 is challenger") == 2


def test_the_guard_says_that_there_is_nothing_to_guard(reco: Any) -> None:
    assert reco("release", "--guard").exit_code == 0


def test_the_guard_lets_the_champion_of_its_home_follow_a_release_that_is_over(
    reco: Any, api: ApiServer, tmp_path: Path
) -> None:
    """A machine with another home drove it; the registry is away here."""
    stands(api, state="done")
    assert reco("release", "--guard").stderr == "", "a home without a champion follows none"
    write_champion(tmp_path, Champion("b1", "1", "checkout-recommender", "bundles/b1", "", ""))
    done = reco("release", "--guard")
    assert (done.exit_code, "version 2, bundle b2" in done.stdout) == (0, True), done.output
    assert "does not follow the release yet: " in done.stderr
    write_champion(tmp_path, Champion("b2", "2", "checkout-recommender", "bundles/b2", "", ""))
    assert reco("release", "--guard").stderr == ""


def test_a_rollback_gives_the_traffic_back_without_the_registry(
    reco: Any, api: ApiServer, tmp_path: Path
) -> None:
    stands(api, state="step", weight=25)
    done = reco("rollback")
    assert done.exit_code == 0, done.output
    assert "blue 100 %, green 0 %" in done.stdout
    assert "mlflow.db is no registry" in done.stderr
    assert not (tmp_path / "mlflow.db").exists(), "nothing was created"


def test_only_a_release_needs_a_host_in_the_route_or_the_gateways_address(
    api: ApiServer, tmp_path: Path
) -> None:
    def said(*arguments: str) -> str:
        return CliRunner().invoke(main, ["--home", str(tmp_path), *arguments, "--cluster", api.url]).output

    assert "no release yet" in said("release", "--status")
    assert "mlflow.db is no registry" in said("rollback")  # and no word about a gateway
    for mode in ((), ("--watch",), ("--resume",)):
        assert "give the gateway's URL" in said("release", *mode, "--tracking-uri", "http://127.0.0.1:9")


@pytest.mark.parametrize(
    ("given", "asked"), [((), "https://checkout.example"), (("--gateway", "http://here/"), "http://here")]
)
def test_a_rollback_sends_its_golden_requests_to_the_routes_host(
    reco: Any, api: ApiServer, monkeypatch: pytest.MonkeyPatch, given: tuple[str, ...], asked: str
) -> None:
    """Only one after the hold sends any: then the old slot is filled again, and proven."""
    gateways = []

    class Seen(Observer):
        def __init__(self, cluster: Any, http: Any, gateway: str, *rest: Any) -> None:
            gateways.append(gateway)
            super().__init__(cluster, http, gateway, *rest)

    monkeypatch.setattr("components.rollout.observe.Observer", Seen)
    api.objects.merge(ROUTE, {"spec": {"hostnames": ["checkout.example"]}})
    reco("rollback", *given)
    assert gateways == [asked]


@pytest.mark.parametrize("arguments", [("release",), ("release", "--resume"), ("release", "--dry-run")])
def test_what_reads_the_registry_changes_nothing_without_it(
    reco: Any, api: ApiServer, arguments: tuple[str, ...]
) -> None:
    before = api.objects.get(ROUTE)
    done = reco(*arguments)
    assert (done.exit_code, "mlflow.db is no registry" in done.output) == (2, True)
    assert api.objects.get(ROUTE) == before


@pytest.mark.parametrize(
    ("arguments", "url", "code", "says"),
    [
        (("--guard", "--status"), None, 2, "give one of"),
        (("--status",), "http://127.0.0.1:9", 3, "does not answer"),
        (("--status",), "pod", 2, "no cluster: give --cluster URL"),
    ],
)
def test_an_error_has_its_exit_code(reco: Any, arguments: Any, url: Any, code: int, says: str) -> None:
    done = reco("release", *arguments, **({} if url is None else {"url": url}))
    assert (done.exit_code, says in done.output) == (code, True), done.output
