"""The gate between two slots: enough answers or hold, worse or abort; worse never gets a better verdict."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import generate_latest
from scipy.special import bdtr

from components.rollout.comparison import (
    ABORT,
    GO,
    HOLD,
    MARGINS,
    SeriesMissing,
    SlotCounts,
    compare,
    read_metrics,
    revealed,
)
from components.rollout.plan import Pace
from serving.metrics import ANSWER_SECONDS, BUNDLE, FAULTS, REJECTED, RESPONSES

RANK = {GO: 0, HOLD: 1, ABORT: 2}


def counts(answers: float, errors: float = 0, less: float = 0, slow: float = 0) -> SlotCounts:
    return SlotCounts(
        answers,
        errors,
        less,
        {0.005: answers - slow, 0.01: answers - slow, 0.1: answers, float("inf"): answers},
    )


def test_the_gate_reads_the_series_that_an_endpoint_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PROMETHEUS_MULTIPROC_DIR", raising=False)  # Feast sets it where it was loaded before
    BUNDLE.labels("b1").set(1)
    try:
        before, bundle = read_metrics(generate_latest().decode())
        RESPONSES.labels("full", "none").inc(3)
        RESPONSES.labels("popular", "x").inc(2)
        REJECTED.labels("internal").inc()
        FAULTS.labels("http").inc()
        for seconds in (0.01, 0.01, 9.0):
            ANSWER_SECONDS.observe(seconds)
        since = read_metrics(generate_latest().decode())[0].minus(before)
    finally:
        BUNDLE.remove("b1")
    assert bundle == "b1"
    assert (since.answers, since.less, since.errors, since.slower_than(0.05)) == (5, 2, 2, 1)


STABLE = counts(10_000, 5, 20, 10)
# Share of the stable slot below `full` -> answers, 150 at least, that reveal 10 % more nine times in ten.
ANSWERS = {0.0: 150, 0.01: 150, 0.05: 207, 0.15: 373}


def test_as_good_as_the_stable_slot_goes_with_enough_answers_only() -> None:
    assert compare(STABLE, counts(600, 0, 1, 1), 600).outcome == GO
    held = compare(STABLE, counts(599), 600)
    assert (held.outcome, held.reason) == (HOLD, "599 of 600 answers")
    assert compare(counts(20), counts(600), 600).outcome == HOLD, "the stable slot has too few, too"


@pytest.mark.parametrize(
    ("canary", "says"),
    [
        (counts(600, errors=12), "errors: 12 of 612"),
        (counts(600, less=60), "less than full: 60 of 600"),
        (counts(600, slow=60), "slower than 10 ms: 60 of 600"),
    ],
)
def test_a_worse_share_aborts_and_says_why(canary: SlotCounts, says: str) -> None:
    verdict = compare(STABLE, canary, 600)
    assert verdict.outcome == ABORT
    assert verdict.reason.startswith(says)


def test_a_fault_of_both_slots_is_not_the_canarys() -> None:
    assert compare(counts(10_000, less=5_000), counts(600, less=300), 600).outcome == GO


@given(*[st.integers(0, 300)] * 3, st.sampled_from(["errors", "less", "slow"]), st.integers(0, 200))
def test_a_worse_canary_never_gets_a_better_verdict(
    errors: int, less: int, slow: int, kind: str, more: int
) -> None:
    shares = {"errors": errors, "less": less, "slow": slow}
    before = compare(STABLE, counts(600, **shares), 600)
    after = compare(STABLE, counts(600, **{**shares, kind: shares[kind] + more}), 600)
    assert RANK[after.outcome] >= RANK[before.outcome]


def test_a_degraded_stable_slot_makes_a_step_wait_until_ten_per_cent_less_show() -> None:
    stable = counts(1_000, less=50)
    held = compare(stable, counts(150, less=8), 150, 0.1)
    assert (held.outcome, held.reason) == (HOLD, "150 answers reveal 17% below full, 15% is asked")
    assert compare(stable, counts(ANSWERS[0.05], less=10), 150, 0.1).outcome == GO
    assert compare(STABLE, counts(150), 150, 0.1).outcome == GO, "a healthy slot waits for no more"
    assert compare(stable, counts(150, less=8), 150).outcome == GO, "as in the first step"


def test_more_answers_reveal_smaller_shares() -> None:
    found = [revealed(answers, 0.0025) for answers in (25, 150, 600, 1_000)]
    assert found == sorted(found, reverse=True)  # type: ignore[type-var]
    assert revealed(1, 0.5) is None


@pytest.mark.parametrize(("asked", "missed"), [(600, 1 / 12), (Pace().shadow_answers, 1 / 200)])
def test_two_per_cent_of_errors_pass_one_look_at_the_shadow_so_often(asked: int, missed: float) -> None:
    verdicts = (compare(counts(asked), counts(asked - n, errors=n), asked).outcome for n in range(asked))
    refused = next(number for number, outcome in enumerate(verdicts) if outcome == ABORT)
    assert float(bdtr(refused - 1, asked, 0.02)) == pytest.approx(missed, rel=0.2)


def test_the_guide_says_what_each_step_can_reveal() -> None:
    guide = Path(__file__).parents[3] / "docs" / "how-to" / "release-and-roll-back.md"
    for stable in (0.0, 0.01, 0.05, 0.15):
        base = stable + MARGINS["less than full"]
        shares = [stable, *(revealed(answers, base) or 1.0 for answers in Pace().weights.values())]
        row = " | ".join(f"{100 * share:.0f} %" for share in shares)
        assert f"| {row} | {ANSWERS[stable]} |" in guide.read_text(encoding="utf-8")
        reveals = [(revealed(ANSWERS[stable] - less, base) or 1.0) - stable for less in (0, 1)]
        assert reveals[0] <= Pace().reveals
        assert reveals[1] > Pace().reveals or ANSWERS[stable] == Pace().weights[5]


GOOD = """reco_bundle_info{bundle_id="b"} 1
reco_responses_total{rung="full",degraded_reason="none"} 9
reco_responses_total{rung="popular",degraded_reason="x"} 1
reco_faults_total{protocol="http"} 2
reco_answer_seconds_bucket{le="0.005"} 9
reco_answer_seconds_bucket{le="+Inf"} 10
"""


@pytest.mark.parametrize("series", ["reco_bundle_info", "reco_answer_seconds"])
def test_a_missing_series_is_an_error(series: str) -> None:
    page = "".join(line for line in GOOD.splitlines(keepends=True) if not line.startswith(series))
    with pytest.raises(SeriesMissing, match=series):
        read_metrics(page)


def test_a_value_that_is_not_a_number_is_an_error() -> None:
    with pytest.raises(SeriesMissing, match="reco_faults_total is not a number"):
        read_metrics(GOOD.replace('"http"} 2', '"http"} NaN'))


def test_counters_that_began_again_count_from_their_new_beginning() -> None:
    assert counts(30).minus(counts(100)).answers == 30
    assert counts(130).minus(counts(100)).answers == 30
