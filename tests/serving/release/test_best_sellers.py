from pathlib import Path

from serving.client.client import read_best_sellers
from serving.release.best_sellers import write_best_sellers
from serving.release.bundle import load_bundle


def test_the_client_reads_the_best_sellers_of_a_bundle(toy_bundle: Path, tmp_path: Path) -> None:
    bundle = load_bundle(toy_bundle)
    write_best_sellers(bundle, tmp_path / "best.json")
    items = read_best_sellers(tmp_path / "best.json")
    assert items[:3] == ["1000000", "1000001", "1000002"]
    assert len(items) == len(bundle.statistics.popular)
