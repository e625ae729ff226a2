"""Figures of the cache -> a page that says what was not reached, too."""

from pathlib import Path
from typing import Any

import pytest

from pipelines.bench.cache_report import cache_table, draw_hits

REGRET = {
    "answers": 10,
    "other_items_ratio": 0.1,
    "other_order_ratio": 0.2,
    "overlap_at_10": 0.99,
    "ndcg": 0.98,
}
KEPT = {"answers": 199, "other_items": 1, "other_items_ratio": 0.005, "bound": 0.01, "reached": True}
MS = {"p50": 1.0, "p99": 2.0, "mean": 1.5}
RESULT: dict[str, Any] = {
    "bundle_id": "b1",
    "machine": {"cpu": "a processor", "cores": 2, "load_average": [0.5, 0.5, 0.5]},
    "commit": "c0ffee",
    "measured_at": "2026-01-01",
    "baskets": 5,
    "shoppers": 4,
    "stores": 3,
    "items": 2,
    "budget_s": 5.0,
    "questions": {"0": 30, "0.1": 33},
    "typical": {"anonymous": 0.7, "again": 0.1},
    "hits": [
        {"anonymous": 0.0, "again": 0.0, "distinct": 30, "hit_ratio": {"1000": 0.0, "100000": 0.01}},
        {"anonymous": 1.0, "again": 0.1, "distinct": 25, "hit_ratio": {"1000": 0.2, "100000": 0.31}},
    ],
    "by_size_of_basket": [{"items": "1", "questions": 10, "hit_ratio": 0.5}],
    "levels": {
        "replicas": 4,
        "process_hit_ratio": 0.1,
        "redis_hit_ratio_of_the_rest": 0.2,
        "inference_avoided_ratio": 0.28,
    },
    "candidates": [
        {
            "what": "whole answers",
            "hit_ratio": 0.3,
            **{f"{act}_ms_{kind}": 1.0 for act in ("make", "look") for kind in ("anonymous", "known")},
            "saved_ms_per_question": 0.5,
            "saved_ratio": 0.2,
        }
    ],
    "answers": {
        "questions": 30,
        "hit_ratio": 0.3,
        "ms": {"without": MS, "hit": MS, "miss": {}, "with": MS},
        "regret": {"anonymous": REGRET, "known": {"answers": 0}},
        "kept": KEPT,
    },
    "hour_old": {"59": REGRET},
    "without_store": {"hit_ratio": {"with_store": 0.1, "without_store": 0.2}, "regret": REGRET},
    "deploy": [
        {
            "anonymous": 1.0,
            "per_second": 10,
            "questions": 30,
            "in_budget": 100,
            "misses": {"nothing": 20, "100 by clusters": 15},
        }
    ],
    "expiry": {"keys": 10_000, "busiest_against_mean": {"0": 60.0, "0.35": 1.7}, "chosen": 0.35},
}


def test_the_page_says_what_was_asked_for_and_what_was_found() -> None:
    page = cache_table(RESULT)
    assert "Asked for are 90 % with 100,000 entries; the best row has 31.0%" in page
    assert "Asked for are 85 % fewer" in page
    assert "| 100% | 10 | 30 | 100 by clusters | 15 | 25.0% |" in page
    assert "| hits, anonymous | 10 | 10.00% | 20.00% | 0.9900 | 0.9800 |" in page
    assert "hits, known" not in page, "nothing was compared"
    assert "| miss |" not in page, "nothing was measured"
    assert (
        "Of all 199 hits together 1, 0.50%, show other items than an answer computed now; "
        "at most 1% were asked for: reached." in page
    )


@pytest.mark.parametrize(
    ("kept", "said"),
    [
        ({"answers": 50, "other_items": 2, "other_items_ratio": 0.04, "reached": False}, "for: not reached."),
        ({"answers": 0, "other_items": 0, "other_items_ratio": None, "reached": None}, "No answer was kept"),
    ],
)
def test_the_page_says_it_where_the_bound_is_missed_or_nothing_was_kept(
    kept: dict[str, Any], said: str
) -> None:
    page = cache_table({**RESULT, "answers": {**RESULT["answers"], "kept": {**kept, "bound": 0.01}}})
    assert said in page
    assert "for: reached" not in page


def test_the_hits_are_drawn(tmp_path: Path) -> None:
    draw_hits(RESULT, tmp_path / "cache.png")
    assert (tmp_path / "cache.png").read_bytes().startswith(b"\x89PNG")
