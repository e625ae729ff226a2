"""A small cluster of real endpoints: a release gets through, and a worse copy is aborted.

Few answers a step: the gate's numbers are tested against the API in memory, and measured by the drill.
"""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from components.rollout.plan import Pace
from components.rollout.release import Aborted
from pipelines.bench.load.waiting import wait_for
from pipelines.drills.canary import DrillVersions, Shop
from pipelines.drills.system import released
from pipelines.inspect.ask import evaluation_requests
from pipelines.live.slots import SERVER
from pipelines.live.small_cluster import SmallCluster, small_cluster
from serving.settings import Settings

pytestmark = pytest.mark.slow
PACE = Pace(weights={1: 1, 50: 3}, shadow_answers=10, mirror_percent=100, look_s=0.5, hold_s=0.0)


@pytest.fixture(params=["good", "less"])
def world(toy_line: Path, tmp_path: Path, request: Any) -> Iterator[tuple[str, SmallCluster, DrillVersions]]:
    champions = [released(toy_line / "evaluated", tmp_path, made_for) for made_for in ("", "a canary")]
    bundles = {"1": champions[0].bundle_id, "2": champions[1].bundle_id}
    settings = Settings(tmp_path, http_port=0, store_url="memory:", deadline_ms=5_000.0, log_segment_s=0.2)
    bad = (SERVER[0], "-P", "-m", "pipelines.drills.bad_endpoint", "all-less", "0")

    def launch(served: Path) -> tuple[str, ...]:
        return bad if request.param == "less" and served.name == bundles["2"] else SERVER

    with small_cluster(champions[0].bundle(tmp_path), settings, tmp_path / "logs", launch=launch) as cluster:
        yield request.param, cluster, DrillVersions(tmp_path, bundles)


def test_a_release_steps_the_weights_of_real_endpoints(
    world: tuple[str, SmallCluster, DrillVersions], toy_line: Path
) -> None:
    kind, cluster, versions = world
    lines = evaluation_requests(toy_line / "evaluated", 20)
    over, statuses = threading.Event(), list[int]()
    wait_for(lambda: bool(cluster.objects.list("pods")), "the first slot starts")

    def shop() -> None:
        with httpx.Client(base_url=cluster.gateway.url, trust_env=False, timeout=30) as client:
            while not over.wait(0.02):
                answer = client.post("/v1/recommendations", json=lines[len(statuses) % len(lines)])
                statuses.append(answer.status_code)

    shopper = threading.Thread(target=shop)
    shopper.start()
    try:
        rollout = Shop(cluster, versions, PACE).rollout()
        if kind == "good":
            record = rollout.start("2")
            assert (record.state, versions.champions) == ("done", ["1", "2"])
        else:
            with pytest.raises(Aborted, match="less than full"):
                rollout.start("2")
            assert versions.champions == ["1"]
        split = rollout.status()[1]
        assert split == ({"blue": 0, "green": 100} if kind == "good" else {"blue": 100, "green": 0})
    finally:
        over.set()
        shopper.join()
    assert set(statuses) == {200}
