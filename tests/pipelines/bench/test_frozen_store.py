import pytest

from pipelines.bench.frozen_store import frozen_under_load
from pipelines.live.local_redis import local_server


@pytest.mark.slow
def test_a_frozen_store_holds_no_request_and_fails_none() -> None:
    with local_server() as (url, pid):
        measured = frozen_under_load(url, pid, healthy_s=0.5, frozen_s=1.0, recovered_s=1.5)
    phases = [measured[name] for name in ("healthy", "frozen", "recovered")]
    assert [phase["failures"] for phase in phases] == [0, 0, 0]
    assert sum(phase["reads"] for phase in phases) == 600
    assert measured["healthy"]["answered"] > 90
    assert measured["frozen"]["answered"] <= 2
    assert measured["recovered"]["answered"] > 10
    assert measured["frozen"]["max_ms"] < 1_000, "the figure is 15 ms; a busy machine takes slices of its own"
    assert measured["open_ms"] < 1_000
    assert measured["close_ms"] < 2_000
