"""A small cluster of real endpoints: a worse copy is aborted, and a release gets through.

Few answers a step: the gate's numbers are tested against the API in memory, and measured by the drill.
"""

import threading
from pathlib import Path

import httpx
import pytest

from components.rollout.plan import Pace
from components.rollout.release import Aborted
from pipelines.bench.load.waiting import wait_for
from pipelines.drills.canary import DrillVersions, Shop
from pipelines.drills.system import released
from pipelines.inspect.ask import evaluation_requests
from pipelines.live.slots import SERVER
from pipelines.live.small_cluster import small_cluster
from serving.settings import Settings

pytestmark = pytest.mark.slow
PACE = Pace(weights={1: 1, 50: 3}, shadow_answers=10, mirror_percent=100, look_s=0.5, hold_s=0.0)


def test_a_release_steps_the_weights_of_real_endpoints_after_a_worse_one_was_aborted(
    toy_line: Path, tmp_path: Path
) -> None:
    champions = [released(toy_line / "evaluated", tmp_path, kind) for kind in ("", "less", "good")]
    bundles = {str(version): champion.bundle_id for version, champion in enumerate(champions, 1)}
    settings = Settings(tmp_path, http_port=0, store_url="memory:", deadline_ms=5_000.0, log_segment_s=0.2)
    bad = (SERVER[0], "-P", "-m", "pipelines.drills.bad_endpoint", "all-less", "0")

    def launch(served: Path) -> tuple[str, ...]:
        return bad if served.name == bundles["2"] else SERVER

    lines = evaluation_requests(toy_line / "evaluated", 20)
    over, statuses = threading.Event(), list[int]()
    with small_cluster(champions[0].bundle(tmp_path), settings, tmp_path / "logs", launch=launch) as cluster:
        versions = DrillVersions(tmp_path, bundles)
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
            with pytest.raises(Aborted, match="less than full"):
                rollout.start("2")
            assert versions.champions == ["1"]
            assert rollout.status()[1] == {"blue": 100, "green": 0}
            record = rollout.start("3")
            assert (record.state, versions.champions) == ("done", ["1", "3"])
            assert rollout.status()[1] == {"blue": 0, "green": 100}
        finally:
            over.set()
            shopper.join()
    assert set(statuses) == {200}
