"""A champion that commands can follow, where no test opens its bundle."""

from pathlib import Path

from serving.release.bundle import RankingSettings, seal_bundle
from serving.release.champion import Champion, write_champion
from serving.stages.retrieval import Quotas


def promote_sealed(home: Path, name: str = "small", cut: str = "2024-01-01") -> Champion:
    """Seal the files in `bundles/NAME` of a home, if there are any, and make that bundle the champion."""
    place = home / "bundles" / name
    place.mkdir(parents=True, exist_ok=True)
    bundle_id = seal_bundle(place, cut=cut, settings=RankingSettings(Quotas(), 1.0), made_from={})
    champion = Champion(bundle_id, "1", "recommender", f"bundles/{name}", cut, "2024-01-02")
    write_champion(home, champion)
    return champion
