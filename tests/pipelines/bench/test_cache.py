"""The bench's own arithmetic, and the whole of it on the toy shop."""

from pathlib import Path

import orjson
import pytest

from components.evaluation.traffic import Ask
from pipelines.bench.cache import (
    Clocked,
    Watch,
    _regret,
    _seen_before,
    bench_cache,
    expiry,
    hits_of,
    kept_verdict,
)
from serving.cache.answer_cache import KNOWN, SHARED, AnswerKey
from serving.cache.entries import JITTER_RATIO


def ask(at: float) -> Ask:
    return Ask(at, 0, 0, ("a",), "s")


def key(name: bytes, shared: bool = True) -> AnswerKey:
    return AnswerKey(name, shared)


def test_a_question_that_comes_again_in_time_hits() -> None:
    late = SHARED.dead_s * (1 + JITTER_RATIO)
    keys = [key(b"a"), key(b"b"), key(b"a"), key(b"a")]
    found = hits_of(keys, [ask(0.0), ask(1.0), ask(2.0), ask(3.0 + late)], Clocked(100))
    assert found.tolist() == [False, False, True, False]


def test_a_known_users_answer_dies_sooner() -> None:
    at = KNOWN.dead_s * (1 + JITTER_RATIO)
    keys = [key(b"a"), key(b"b", shared=False)] * 2
    found = hits_of(keys, [ask(0.0), ask(0.0), ask(at), ask(at)], Clocked(100))
    assert found.tolist() == [False, False, True, False]


def test_what_was_seen_before() -> None:
    assert _seen_before(["a", None, "a", None, "b"]).tolist() == [False, False, True, False, False]


def test_regret_of_the_same_of_another_order_and_of_another_list() -> None:
    now = list(range(10))
    assert _regret([]) == {"answers": 0}
    same = _regret([(now, now)])
    assert (same["other_items_ratio"], same["other_order_ratio"], same["ndcg"]) == (0, 0, 1)
    turned = _regret([(now[::-1], now), (now, now)])
    assert (turned["other_items_ratio"], turned["other_order_ratio"]) == (0, 0.5)
    other = _regret([([99, *now[1:]], now)])
    assert (other["other_items_ratio"], other["overlap_at_10"]) == (1, 0.9)
    assert other["ndcg"] == pytest.approx(1 - 1 / 4.5436, abs=1e-4), "the first place weighs 1 of 4.5436"


@pytest.mark.parametrize(
    ("anonymous", "known", "share", "reached"),
    [
        # 149 hits at 0 % and 50 at 2 % (one): 1 of 199, not the 1 % that the two shares are on average.
        ((149, 0.0), (50, 0.02), 0.0050, True),
        ((100, 0.0), (100, 0.02), 0.0100, True),  # 2 of 200: the bound itself is reached
        ((100, 0.01), (100, 0.02), 0.0150, False),  # 3 of 200
        ((0, None), (50, 0.04), 0.0400, False),
        ((0, None), (0, None), None, None),
    ],
)
def test_the_verdict_on_kept_answers_weighs_each_hit_alike(
    anonymous: tuple[int, float | None],
    known: tuple[int, float | None],
    share: float | None,
    reached: bool | None,
) -> None:
    regret = {
        kind: {"answers": hits} | ({} if ratio is None else {"other_items_ratio": ratio})
        for kind, (hits, ratio) in (("anonymous", anonymous), ("known", known))
    }
    found = kept_verdict(regret)
    assert found["answers"] == anonymous[0] + known[0]
    assert (found["other_items_ratio"], found["bound"], found["reached"]) == (share, 0.01, reached)


def test_without_jitter_all_expire_at_once_and_with_ours_at_most_at_twice_the_mean() -> None:
    found = expiry()["busiest_against_mean"]
    assert found["0"] == 60
    assert found[f"{JITTER_RATIO:g}"] <= 2


def test_processor_time_is_kept_by_name() -> None:
    watch = Watch()
    assert watch.time("a", "make", lambda: 7) == 7
    assert watch.medians()["a"]["make"] >= 0


@pytest.mark.slow
def test_the_whole_bench_on_the_toy_shop(toy_line: Path, tmp_path: Path) -> None:
    result = bench_cache(toy_line / "evaluated", toy_line / "dataset", tmp_path, answers=60)
    assert orjson.loads((tmp_path / "cache.json").read_bytes()) == orjson.loads(orjson.dumps(result))
    assert (tmp_path / "cache.md").read_text().startswith("# Caching answers")
    assert (tmp_path / "cache.png").stat().st_size > 10_000
    for row in result["hits"]:
        rates = list(row["hit_ratio"].values())
        assert all(0 <= rate <= 1 for rate in rates)
    assert result["answers"]["regret"]["anonymous"].get("other_items_ratio", 0) == 0, "a function of its key"
    assert result["answers"]["kept"] == kept_verdict(result["answers"]["regret"])
    nothing, *warmed = result["deploy"][0]["misses"].values()
    assert all(misses <= nothing for misses in warmed)
