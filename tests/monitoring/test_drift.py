import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from feature_repo.events import read_dataset
from monitoring import drift
from monitoring.drift import (
    LOOK_BACK,
    DriftFound,
    bundles_alike,
    compare,
    drift_of_events,
    drift_of_log,
    measure_drift,
    moved_most,
    raise_alert,
)
from monitoring.verdict import DriftVerdict, judge
from monitoring.windows import LEAST_UNITS, Embeddings, TablePair, Window, bundle_categories, log_tables
from serving.prediction_log import Record, records_to_table
from serving.release.bundle import RankingSettings, seal_bundle
from serving.release.champion import Champion, write_champion
from serving.release.manifest import read_manifest
from serving.stages.retrieval import Quotas
from tests.conftest import Numbers

Events = Callable[..., pd.DataFrame]
Day = Callable[[int], datetime]
MIX = 1 / np.arange(5, 45)
PIES = np.where(np.arange(40) == 30, 6 * MIX, MIX)  # one category in forty sells six times as much


def check_drift(current: pd.DataFrame, reference: pd.DataFrame, unit: str = "") -> DriftVerdict:
    """Compare two frames column by column."""
    return judge(compare([TablePair(current, reference, unit)]))


def drift_in(path: Path, *compared: Any, **options: Any) -> DriftVerdict:
    """Compare the purchases of a written data set."""
    return drift_of_events(read_dataset(path), *compared, **options)


def frame(rows: int = 2_000, seed: int = 0) -> pd.DataFrame:
    rng = np.random.default_rng(seed)
    return pd.DataFrame(
        {
            "size": rng.poisson(4, rows),
            "value": rng.lognormal(size=rows),
            "store": rng.choice(["a", "b"], rows),
        }
    )


def status(verdict: DriftVerdict, column: str) -> str:
    return verdict.column(column).status


def test_the_same_distribution_in_100_windows_raises_no_alarm() -> None:
    rng = np.random.default_rng(0)

    def window(baskets: int) -> pd.DataFrame:
        basket = np.repeat(np.arange(baskets), rng.geometric(0.2, baskets))
        user = rng.normal(size=baskets)[basket]  # a basket's lines are alike
        return pd.DataFrame(
            {
                "basket_id": basket,
                "category": rng.choice(40, len(basket), p=MIX / MIX.sum()).astype(str),
                "price": rng.lognormal(size=len(basket)) + np.exp(user),
                "count": rng.poisson(np.exp(user)),
                "private": (user + rng.normal(size=len(basket)) > 0).astype(float),
            }
        )

    reference = window(3_000)
    found = [check_drift(window(LEAST_UNITS + 100), reference, "basket_id").status for _ in range(100)]
    assert "drifted" not in found
    assert found.count("ok") >= 95


def test_a_number_that_never_changed_sends_no_page() -> None:
    """A shop begins to send clicks: the model was trained without clicks and ignores them."""
    reference = frame().assign(clicks=0.0, price=1.0)
    verdict = check_drift(frame(seed=1).assign(clicks=lambda f: f["size"] * 1.0, price=1.0), reference)
    assert verdict.status == "warn"
    assert (verdict.columns[0].name, verdict.columns[0].status, verdict.columns[0].pages) == (
        "clicks", "alarm", False,
    )  # fmt: skip
    assert "clicks PSI" in verdict.reason
    assert "shown only" in verdict.reason
    one_level = frame().assign(store="a")
    assert check_drift(frame(seed=1), one_level).status == "drifted", "a new store is another matter"


@pytest.mark.parametrize("rows", [0, 1, LEAST_UNITS - 1])
def test_too_few_rows_are_no_verdict(rows: int) -> None:
    for verdict in (check_drift(frame(rows), frame()), check_drift(frame(), frame(rows))):
        assert verdict.status == "insufficient_data"
        assert f"{LEAST_UNITS} are needed" in verdict.reason
    assert check_drift(pd.DataFrame(), frame()).status == "insufficient_data"
    assert check_drift(pd.DataFrame(), pd.DataFrame()).status == "insufficient_data"


def test_rows_of_one_basket_do_not_make_a_sample() -> None:
    assert (
        check_drift(frame().assign(basket=1), frame().assign(basket=1), "basket").status
        == "insufficient_data"
    )


@pytest.mark.parametrize(
    ("change", "column", "note"),
    [
        (lambda f: f.drop(columns="value"), "value", "gone"),
        (lambda f: f.assign(extra=1), "extra", "new"),
        (lambda f: f.assign(value=np.nan), "value", "no row has a value"),
        (lambda f: f.assign(value=np.inf), "value", "no row has a value"),
        (lambda f: f.assign(store=""), "store", "no row has a value"),
        (lambda f: f.assign(store=None), "store", "no row has a value"),
        (lambda f: f.assign(value="many"), "value", "was a number, is object now"),
    ],
)
def test_a_changed_column_is_named_and_the_others_are_still_compared(
    change: Callable[[pd.DataFrame], pd.DataFrame], column: str, note: str
) -> None:
    verdict = check_drift(change(frame(seed=1)), frame())
    assert (verdict.status, status(verdict, column)) == ("schema_change", "schema_change")
    assert note in verdict.column(column).note
    assert verdict.column("size").psi is not None


def test_values_in_a_formerly_empty_column_are_a_schema_change() -> None:
    assert check_drift(frame(), frame().assign(value=np.nan)).status == "schema_change"
    empty = frame().assign(value=np.nan)
    assert check_drift(empty, empty).status == "ok"


def test_losing_half_of_the_values_alarms_without_a_change_of_psi() -> None:
    holes = frame(seed=1).assign(value=lambda f: f["value"].where(np.arange(len(f)) % 2 == 0))
    found = check_drift(holes, frame()).column("value")
    assert (found.status, found.missing_current) == ("alarm", 0.5)
    assert found.psi is not None
    assert found.psi < 0.02


def test_quiet_weeks_are_quiet(events: Events, dataset: Callable[..., Path], day: Day) -> None:
    path = dataset(events(35))
    verdict = drift_in(path, Window(day(28), day(35)), Window(day(0), day(28)))
    assert verdict.status == "ok", verdict.reason
    some = drift_in(path, Window(day(29), day(33)), Window(day(0), day(28)))
    assert some.status == "insufficient_data"
    assert some.reason.startswith("the window has baskets or requests on 4 days, a whole week (6 such days)")
    none = drift_in(path, Window(day(40), day(47)), Window(day(0), day(28)))
    assert none.status == "insufficient_data"
    assert none.reason == "there is no purchase in the window: take an earlier or a longer one"


def dear_department(week: pd.DataFrame) -> pd.DataFrame:
    """Items of one department in three cost twice as much."""
    number = week["item_id"].str[1:].astype(int)
    return week.assign(price=week["price"] * np.where(number % 3 == 1, 2, 1))


@pytest.mark.parametrize(
    ("change", "mix", "column", "named"),
    [
        (lambda f: f.assign(store_id=f["store_id"].replace("s0", "opened")), MIX, "store_id", "'s0'"),
        (
            lambda f: f[f["basket_id"].str[-1] != f["item_id"].str[-1]].iloc[::2],
            MIX,
            "basket_size",
            "basket_size PSI",
        ),
        (dear_department, MIX, "item_price", "; most in department 'department 1'"),
        (lambda f: f, PIES, "category", "category 30"),
    ],
    ids=["a store", "smaller baskets", "a dear department", "a taste"],
)
def test_a_true_change_is_found_and_named_in_one_week(
    events: Events,
    dataset: Callable[..., Path],
    day: Day,
    change: Callable[[pd.DataFrame], pd.DataFrame],
    mix: np.ndarray,
    column: str,
    named: str,
) -> None:
    path = dataset(events(28), change(events(7, first_day=28, mix=mix)))
    verdict = drift_in(path, Window(day(28), day(35)), Window(day(0), day(28)))
    assert (verdict.status, status(verdict, column)) == ("drifted", "alarm")
    assert (verdict.columns[0].name, verdict.window.since) == (column, day(28))
    assert named in verdict.reason
    assert verdict.place == named.partition("; most in ")[2]


def test_prices_a_third_higher_are_found_in_one_week_with_their_beginning(
    events: Events, dataset: Callable[..., Path], day: Day
) -> None:
    dear = events(10, first_day=35).assign(price=lambda f: f["price"] * 1.3)
    path, reference = dataset(events(35), dear), Window(day(0), day(28))
    first = drift_in(path, Window(day(35), day(42)), reference)
    assert (first.status, first.columns[0].name) == ("drifted", "item_price")
    later = drift_in(path, Window(day(38), day(45)), reference)
    assert later.since is not None
    assert day(35) <= later.since <= day(38), "one to four dear days tip a week over the line"
    assert later.reason.endswith(f"; since about {later.since:%Y-%m-%d}")
    still = drift_in(path, Window(day(33)), reference)
    assert still.since is not None, "a longer window, and an open one"
    assert day(35) <= still.since <= day(38)
    assert later.place == "", "all departments alike"
    quiet = drift_in(path, Window(day(28), day(35)), reference)
    assert (quiet.status, quiet.since) == ("ok", None)
    path = dataset(events(35), events(40, first_day=35).assign(price=lambda f: f["price"] * 1.3))
    old = drift_in(path, Window(day(68), day(75)), reference)
    assert old.reason.endswith(f"; since before {day(75 - LOOK_BACK):%Y-%m-%d}")


def test_no_place_is_named_without_another_one_to_compare_with() -> None:
    both = frame().assign(store_id="only", department="a")
    assert moved_most("value", [TablePair(both.assign(value=lambda f: f["value"] * 2), both)]) == ""
    few = both.assign(store_id=np.where(np.arange(len(both)) < 50, "small", "large"))
    assert moved_most("value", [TablePair(few.assign(value=lambda f: f["value"] * 2), few)]) == ""


def test_events_are_compared_with_the_training_data_of_the_bundle(
    events: Events, dataset: Callable[..., Path], day: Day, bundle: Path
) -> None:
    calm = dataset(events(7, first_day=28))
    verdict = drift_in(calm, Window(), bundle)
    assert (verdict.status, verdict.reference.since is not None) == ("ok", True)
    assert "before the cut of bundle" in verdict.compared
    moved = dataset(events(7, first_day=28, mix=PIES))
    assert drift_in(moved, Window(), bundle).status == "drifted"


def test_purchases_of_a_bundle_show_drift_of_embeddings(
    events: Events, dataset: Callable[..., Path], bundle: Path
) -> None:
    calm = drift_in(dataset(events(7, first_day=28)), Window(), bundle)
    assert status(calm, "basket_region") == "ok"
    other = np.where(np.arange(40) < 5, MIX / 6, MIX)  # the best-selling categories are rare now
    moved = drift_in(dataset(events(7, first_day=28, mix=other)), Window(), bundle)
    assert status(moved, "basket_region") == "alarm", moved.column("basket_region")
    assert "basket_region" not in [
        column.name for column in drift_in(dataset(events(14)), Window(), Window()).columns
    ], "another window has no bundle, so no vectors"


Records = Callable[..., list[Record]]


def test_the_log_is_compared_with_the_evaluation(
    records: Records, log: Callable[..., Path], bundle: Path, bundle_id: str
) -> None:
    calm = drift_of_log(bundle, log(records(600, bundle_id, seed=5)), Window())
    assert (calm.status, calm.compared) == ("ok", f"answers of bundle {bundle_id} with its evaluation")
    dear = drift_of_log(bundle, log(records(600, bundle_id, seed=5, price=1.6)), Window())
    assert (dear.status, dear.columns[0].name) == ("drifted", "item_price")
    pies = drift_of_log(bundle, log(records(600, bundle_id, seed=5, mix=PIES)), Window())
    assert (pies.status, pies.columns[0].name) == ("drifted", "basket_category")


def test_requests_without_a_user_and_rows_that_were_not_read_are_no_drift(
    records: Records, bundle: Path
) -> None:
    """An evaluation has a row for each request; a till may not know the user, and a store may be away."""

    def answers(count: int, unread: int, baskets: int = 40) -> pa.Table:
        made = records(count, seed=count)
        for number, record in enumerate(made):
            record.features[:, 0] = 0 if number < unread else baskets + number % 30
        return records_to_table(made, ("user_basket_count", "item_price"))

    def verdict(current: pa.Table) -> DriftVerdict:
        shop = bundle_categories(bundle), Embeddings.of(bundle)
        return judge(compare(log_tables(current, answers(900, unread=0), *shop)))

    assert verdict(answers(600, unread=60)).status == "ok"
    assert status(verdict(answers(600, unread=60, baskets=60)), "user_basket_count") == "alarm"


def test_prices_drift_in_a_shop_of_guests_alone(records: Records, bundle: Path) -> None:
    def answers(count: int, times: float = 1.0) -> pa.Table:
        made = records(count, seed=count)
        for record in made:
            record.features[:, 0] = 0
            record.features[:, 1] *= times
        return records_to_table(made, ("user_basket_count", "item_price"))

    shop = bundle_categories(bundle), Embeddings.of(bundle)
    same, dearer = (judge(compare(log_tables(answers(600, t), answers(900), *shop))) for t in (1.0, 3.0))
    assert same.status == "ok"
    assert status(dearer, "item_price") == "alarm"


def test_tills_that_ask_after_each_scan_are_no_drift(
    records: Records, log: Callable[..., Path], bundle: Path, bundle_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An unchanged shop whose baskets have one, three or nine items, each asked about after each scan."""
    made, scans = records(600, bundle_id, seed=5), []
    for number, one in enumerate(made):
        basket = (one.request.basket * 2)[: (1, 3, 9)[number % 3]]
        one.features[:, 0] = len(basket)
        made[number] = replace(one, request=replace(one.request, basket=basket, store_id=f"s{len(basket)}"))
        for scan in range(1, len(basket) + 1):
            at = one.answered_at - len(basket) + scan
            request = replace(made[number].request, basket=basket[:scan], at=at)
            scans.append(replace(made[number], request=request, answered_at=at))
    pq.write_table(
        records_to_table(made, ("user_item_count", "item_price")), bundle / "reference_log.parquet"
    )
    path = log(scans[::2], scans[1::2])  # of two processes
    assert len(scans) > 4 * len(made)
    verdict = drift_of_log(bundle, path, Window())
    assert verdict.status == "ok", verdict.reason
    monkeypatch.setattr(drift, "SAMPLE", 2_000)
    verdict = drift_of_log(bundle, path, Window())
    assert verdict.status == "ok", verdict.reason


@pytest.mark.parametrize("sizes", [(300, 0, 500), (4,) * 200])
def test_a_sample_is_of_all_parts_of_a_log(records: Records, sizes: tuple[int, ...]) -> None:
    made, ends = records_to_table(records(800), ("count", "price")), np.cumsum(sizes)
    segments = [made.slice(end - size, size) for end, size in zip(ends.tolist(), sizes, strict=True)]
    assert sum(map(len, drift._sample(segments, 800))) == 800
    found = [name for part in drift._sample(segments, 400) for name in part["request_id"].to_pylist()]
    numbers = np.array([int(name[1:]) for name in found])
    assert 150 < len(numbers) <= 400
    assert 150 / 800 < (numbers < 300).sum() / 300 < 0.6
    rest = np.bincount(numbers % 4, minlength=4) / len(numbers)
    assert rest.min() > 0.15, "each fourth record may be of the same store"


def test_a_sample_holds_a_shoppers_day_whole_or_not_at_all(records: Records) -> None:
    made = records_to_table(records(800), ("count", "price"))
    users, hours = [f"u{number // 4}" for number in range(800)], [number % 4 for number in range(800)]
    at = pd.Series(pd.Timestamp("2026-01-02", tz="UTC") + pd.to_timedelta(hours, "h"))
    for name, values in (("user_id", users), ("answered_at", at)):
        made = made.set_column(made.schema.get_field_index(name), name, pa.array(values))
    kept = pd.concat([part.to_pandas() for part in drift._sample([made], 400)])
    assert set(kept["user_id"].value_counts()) == {4}


def test_of_many_answers_a_sample_is_compared_and_those_of_other_bundles_are_left_out(
    records: Records,
    log: Callable[..., Path],
    bundle: Path,
    bundle_id: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(drift, "SAMPLE", 600)
    path = log(records(1_800, bundle_id, seed=5))
    assert 300 <= len(drift._answers_of({bundle_id}, path, Window())[0]) <= 600
    assert drift_of_log(bundle, path, Window()).status == "ok"
    # Few answers of the champion among many of others are all compared.
    path = log(records(400, bundle_id, seed=5), records(1_800, "another", price=9))
    assert len(drift._answers_of({bundle_id}, path, Window())[0]) == 400
    verdict = drift_of_log(bundle, path, Window())
    assert verdict.status == "ok"
    assert "(1800 answers of other bundles or profiles left out)" in verdict.compared


def test_answers_with_another_profile_are_left_out(
    records: Records, log: Callable[..., Path], bundle: Path, bundle_id: str, day: Day
) -> None:
    """The evaluation asks with the usual profile alone."""
    other = [
        replace(one, request=replace(one.request, profile="premium"))
        for one in records(600, bundle_id, price=4)
    ]
    verdict = drift_of_log(bundle, log(records(600, bundle_id, seed=5), other), Window())
    assert verdict.status == "ok", verdict.reason
    assert "(600 answers of other bundles or profiles left out)" in verdict.compared
    verdict = drift_of_log(bundle, log(other, other), Window())
    assert verdict.status == "insufficient_data"
    assert verdict.reason.endswith("wait until this bundle has answered with the profile `default`")
    long = [
        replace(one, request=replace(one.request, profile="premium")) for one in records(1_300, bundle_id)
    ]
    verdict = drift_of_log(bundle, log(long[::2], long[1::2]), Window(day(14)), Window(None, day(14)))
    assert verdict.status == "ok", "two windows of a shop that always asks with it"


def test_answers_of_a_refreshed_bundle_are_those_of_its_ranker(tmp_path: Path) -> None:
    ids = {}
    for name, ranker in (("first", "same"), ("refreshed", "same"), ("trained", "other")):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "ranker.onnx").write_text(ranker)
        (folder / "counts").write_text(name)
        settings = RankingSettings(Quotas(), 1.0)
        ids[name] = seal_bundle(folder, cut="2024-01-01", settings=settings, made_from={})
    (tmp_path / "half").mkdir()
    assert bundles_alike(tmp_path / "refreshed") == {ids["first"], ids["refreshed"]}
    assert bundles_alike(tmp_path / "trained") == {ids["trained"]}


def test_an_earlier_window_of_the_log_can_be_the_reference(
    records: Records, log: Callable[..., Path], bundle: Path, bundle_id: str, day: Day
) -> None:
    path = log(records(1_000, bundle_id, seed=5, price=2))
    verdict = drift_of_log(bundle, path, Window(day(10)), Window(None, day(10)))
    assert (verdict.status, verdict.reference.until) == ("ok", day(10))


def test_a_till_with_a_wrong_clock_adds_no_day(
    records: Records, log: Callable[..., Path], bundle: Path, bundle_id: str
) -> None:
    made = records(240, bundle_id, seed=5)  # five days
    for one, year in enumerate((9999, 2015)):
        wrong = datetime(year, 1, 1, tzinfo=UTC).timestamp()
        made[one] = replace(made[one], request=replace(made[one].request, at=wrong))
    verdict = drift_of_log(bundle, log(made), Window())
    assert verdict.status == "insufficient_data"
    assert "on 5 days, a whole week" in verdict.reason


def test_answers_of_four_days_on_six_dates_are_no_whole_week(
    records: Records, log: Callable[..., Path], bundle: Path, bundle_id: str, day: Day
) -> None:
    # From 23:45 on a Monday to midnight on a Saturday.
    made = records(600, bundle_id, seed=5, minutes=15)[95:481]
    verdict = drift_of_log(bundle, log(made), Window(day(-1), day(6)))
    assert verdict.status == "insufficient_data"
    assert "on 5 days, a whole week" in verdict.reason


def test_fallbacks_are_shown_and_no_reason_to_retrain(
    records: Records, log: Callable[..., Path], bundle: Path, bundle_id: str
) -> None:
    mixed = [*records(400, bundle_id, seed=5), *records(400, bundle_id, seed=6, rung="popular")]
    verdict = drift_of_log(bundle, log(mixed), Window())
    assert (verdict.status, status(verdict, "rung")) == ("warn", "alarm")


def test_answers_without_features_are_no_verdict_about_them(
    records: Records, log: Callable[..., Path], bundle: Path, bundle_id: str
) -> None:
    made = records(600, bundle_id, seed=5)
    cached = [replace(record, features=record.features[:0]) for record in made]
    path = log(cached[:500], made[500:])
    verdict = drift_of_log(bundle, path, Window())
    assert {status(verdict, name) for name in ("rung", "store_id", "basket_category")} == {"ok"}
    assert verdict.status == "insufficient_data"
    assert verdict.reason.startswith("no feature could be compared: 100 baskets or requests in the window")
    assert drift_of_log(bundle, log(made), Window()).status == "ok"


def test_an_empty_log_is_no_verdict(tmp_path: Path, bundle: Path) -> None:
    verdict = drift_of_log(bundle, tmp_path / "nothing", Window(), report=tmp_path / "report.html")
    assert verdict.status == "insufficient_data"
    assert verdict.reason.startswith(
        f"{tmp_path / 'nothing'} holds no answer in the window: start `reco serve`"
    )
    assert "insufficient data" in (tmp_path / "report.html").read_text()


def test_the_alarm_carries_the_reason() -> None:
    little = {"status": "warn", "reason": "a little"}
    much = {"status": "drifted", "reason": "category PSI 0.2"}
    assert raise_alert(little, little) == "warn: a little; warn: a little"
    for verdicts in ((little, much), (much, little)):
        with pytest.raises(DriftFound, match="drifted: category PSI"):
            raise_alert(*verdicts)


@pytest.mark.slow
def test_a_pipeline_gets_the_verdict_and_keeps_the_report(
    events: Events, dataset: Callable[..., Path], bundle: Path, tmp_path: Path
) -> None:
    path = dataset(events(7, first_day=28, mix=PIES))
    numbers, page, kept = Numbers(tmp_path / "numbers"), tmp_path / "page", tmp_path / "drift"
    verdict = measure_drift(bundle, path, "2024-01-29", "", kept, numbers, page)
    assert verdict["status"] == "drifted"
    assert {file.name for file in kept.iterdir()} == {"verdict.json", "report.html"}
    assert numbers.logged == json.loads((tmp_path / "numbers").read_text())
    assert max(numbers.logged, key=lambda name: numbers.logged[name]) == "psi.category"
    assert "drifted" in page.read_text()
    assert page.stat().st_size > 100_000, "the charts are missing"
    # A recurring run gives a home, and no window: its champion, and the week before the end of the data.
    home = tmp_path / "home"
    shutil.copytree(bundle, home / "bundles" / "b")
    bundle_id = read_manifest(bundle)["bundle_id"]
    write_champion(home, Champion(bundle_id, "1", "recommender", "bundles/b", "2024-01-29", ""))
    assert measure_drift(home, path, "", "", kept, numbers, page)["status"] == "drifted"
    seen = json.loads((kept / "verdict.json").read_text())["window"]
    end = events(7, first_day=28, mix=PIES)["at"].max()
    assert datetime.fromisoformat(seen["since"]) == end - timedelta(days=7)
