import json
import math
from pathlib import Path

import pytest

from pipelines.bench.latency import SHOWN, STAGES, bench_latency, latency_table
from serving.settings import Settings

AT = "2017-12-05T18:30:00Z"


@pytest.mark.slow
def test_latency_is_measured_in_process_and_over_http(
    toy_bundle: Path, toy_store: str, tmp_path: Path
) -> None:
    requests = [
        {"request_id": f"r{n}", "user_id": f"u{n % 3}", "basket": [f"{1_000_000 + n}"], "k": 10, "at": AT}
        for n in range(20)
    ]
    settings = Settings(home=tmp_path / "home", store_url=toy_store, deadline_ms=30_000.0)
    result = bench_latency(toy_bundle, requests, tmp_path / "out", seconds=0.5, settings=settings)
    assert list(result["arms"]) == ["in_process", "http_one_at_a_time"]
    for arm in result["arms"].values():
        assert (arm["failed"], arm["degraded"]) == (0, 0)
        assert set(arm["ms"]) == {"client", *STAGES, "unexplained"}
        for numbers in arm["ms"].values():
            assert set(SHOWN) <= set(numbers)
            # A busy machine answers too few requests for a p99.
            known = [numbers[name] for name in ("p50", "p95", "p99", "max") if numbers[name] is not None]
            assert len(known) >= 2
            assert known == sorted(known)
            assert all(map(math.isfinite, known))
        assert arm["ms"]["client"]["p50"] > arm["ms"]["total"]["p50"]
    assert result["machine"]["cores"] > 0
    assert json.loads((tmp_path / "out" / "latency.json").read_text())["bundle_id"] == result["bundle_id"]
    assert (tmp_path / "out" / "latency.md").read_text() == latency_table(result)
    assert not (tmp_path / "home").exists()


@pytest.mark.slow
def test_latency_without_requests_is_refused(toy_bundle: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no requests"):
        bench_latency(toy_bundle, [], tmp_path)
