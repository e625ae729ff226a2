from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import faiss
import msgspec
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from feature_repo.events import read_dataset
from monitoring.windows import (
    REFERENCE_EVENTS,
    REFERENCE_LOG,
    Embeddings,
    EventFrames,
    Window,
    bundle_categories,
    bundle_reference,
    event_tables,
    known_until,
    log_tables,
    purchases,
)
from serving.errors import BundleInvalid
from serving.prediction_log import Record, records_to_table
from serving.release.bundle import RankingSettings, seal_bundle
from serving.stages.retrieval import Quotas

NEW_YORK = "America/New_York"
FEATURES = ("user_item_count", "item_price")
Events = Callable[..., pd.DataFrame]


def test_purchases_of_a_till_whose_clock_is_ahead_say_nothing_of_the_others() -> None:
    old = pd.to_datetime(["2024-01-02", "2024-01-03"], utc=True)
    ahead = pd.Timestamp.now("UTC") + pd.to_timedelta([20, 21], unit="h")
    assert known_until(pd.Series([*ahead, *old])) == old[1]
    assert known_until(pd.Series(ahead)) == ahead[1]


def test_a_date_is_local_midnight_and_a_full_time_is_itself() -> None:
    window = Window.parse("2017-11-20", "2017-11-27T05:00:00Z", NEW_YORK)
    assert window.since == datetime(2017, 11, 20, 5, tzinfo=UTC)
    assert window.until == datetime(2017, 11, 27, 5, tzinfo=UTC)
    assert Window.parse("", "") == Window()


@pytest.mark.parametrize(
    ("since", "until", "message"),
    [("yesterday", "", "'yesterday' is no time"), ("2017-02-01", "2017-01-01", "before it begins")],
)
def test_an_invalid_window_is_refused(since: str, until: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Window.parse(since, until)


def test_purchases_have_their_category_and_other_events_are_left_out(
    events: Events, dataset: Callable[..., Path], day: Callable[[int], datetime]
) -> None:
    frame = events(3)
    frame.loc[frame.index[:40], "event_type"] = "impression"
    data = read_dataset(dataset(frame))
    found = purchases(data, Window(day(1), day(2)))
    assert found["at"].between(day(1), day(2), inclusive="left").all()
    assert (found["category"] == "category " + (found["item_id"].str[1:].astype(int) % 40).astype(str)).all()
    assert len(purchases(data, Window())) == len(frame) - 40


def test_an_item_scanned_twice_is_one_line(events: Events, dataset: Callable[..., Path]) -> None:
    frame = events(3)
    again = frame.head(1).assign(event_id="again", price=frame["price"] + 2)
    found = purchases(read_dataset(dataset(pd.concat([frame, again]))), Window())
    first = found[(found["basket_id"] == again["basket_id"][0]) & (found["item_id"] == again["item_id"][0])]
    assert len(found) == len(frame)
    assert first["quantity"].tolist() == [2 * frame["quantity"][0]]
    assert first["price"].tolist() == pytest.approx([frame["price"][0] + 1])


def test_a_basket_is_counted_once() -> None:
    events = pd.DataFrame(
        {
            "basket_id": ["a", "a", "b"],
            "category": ["x", "y", "x"],
            "department": "d",
            "store_id": ["s1", "s1", "s2"],
            "at": pd.to_datetime(["2024-01-01T03:00Z", "2024-01-01T03:00Z", "2024-01-01T12:00Z"]),
            "price": [1.0, 2.0, 4.0],
            "quantity": [1, 3, 1],
            "discount": [0.5, 0.0, 0.0],
        }
    )
    baskets = EventFrames.of(events, NEW_YORK).baskets.set_index("basket_id")
    assert baskets["basket_size"].tolist() == [2, 1]
    assert baskets["basket_value"].tolist() == [7, 4]
    assert baskets["discounted_line_ratio"].tolist() == [0.5, 0]
    assert baskets["hour"].tolist() == ["22", "07"]
    assert baskets["date"].dt.day.tolist() == [31, 1]


@pytest.mark.parametrize(
    ("zone", "day"),
    [("America/Santiago", "2024-09-08"), ("Africa/Cairo", "2024-04-26"), ("America/Havana", "2024-11-03")],
)
def test_a_day_without_a_midnight_or_with_two_is_a_day(zone: str, day: str) -> None:
    noon = pd.Timestamp(f"{day}T12:00", tz=zone).tz_convert("UTC")
    events = pd.DataFrame({"basket_id": ["a"], "category": "x", "department": "d", "store_id": "s"})
    events = events.assign(at=[noon], price=1.0, quantity=1, discount=0.0)
    assert EventFrames.of(events, zone).baskets["date"].tolist() == [pd.Timestamp(day)]


def test_an_empty_window_has_tables_without_rows(events: Events) -> None:
    frame = events(28).assign(category="x", department="d")
    for table in event_tables(EventFrames.of(frame[:0], "UTC"), EventFrames.of(frame, "UTC")):
        assert len(table.current) == 0
        assert set(table.current) == set(table.reference)


def test_the_log_is_watched_by_item_by_basket_and_by_request(records: Callable[..., list[Record]]) -> None:
    table = records_to_table([*records(20), *records(25, rung="popular")[20:]], FEATURES)
    category_of = {f"i{n}": f"c{n % 2}" for n in range(30)}
    items, baskets, requests = log_tables(table, table, category_of, embeddings())
    assert list(items.current) == [*FEATURES, "score", "source", "request"]
    assert len(items.current) == 100  # a fallback's answers have no features
    assert items.current["request"].nunique() == 20
    assert len(baskets.current) == 125
    assert set(baskets.current["basket_category"].dropna()) == {"c0", "c1"}
    assert baskets.current["basket_category"].isna().any()  # the catalogue here ends at i29
    assert requests.current["rung"].value_counts().to_dict() == {"full": 20, "popular": 5}


def test_answers_without_a_history_are_left_out_on_both_sides(records: Callable[..., list[Record]]) -> None:
    def answered(every: int) -> pa.Table:
        made = records(300)
        for number, record in enumerate(made):
            record.features[:, 0] = number % every
        return records_to_table(made, ("user_basket_count", "item_price"))

    items, _, requests = log_tables(answered(3), answered(4), {}, embeddings())
    for frame, left in ((items.current, 200), (items.reference, 225)):
        assert (frame["user_basket_count"] > 0).all()
        assert frame["request"].nunique() == left
    assert len(requests.current) == len(requests.reference) == 300
    guests, *_ = log_tables(answered(1), answered(2), {}, embeddings())
    for frame, left in ((guests.current, 300), (guests.reference, 150)):
        assert (frame["user_basket_count"] == 0).all()
        assert frame["request"].nunique() == left


def embeddings(kind: str = "Flat") -> Embeddings:
    """Items 0 to 49 point one way, 50 to 99 another, with lengths that do not matter."""
    vectors = np.zeros((100, 4), np.float32)
    vectors[:50, 0] = vectors[50:, 1] = np.linspace(1, 3, 50)
    index = faiss.index_factory(4, kind, faiss.METRIC_INNER_PRODUCT)
    index.train(vectors)
    index.add(vectors)
    return Embeddings.of_index(index, [f"i{n}" for n in range(100)])


@pytest.mark.parametrize("kind", ["Flat", "HNSW8,Flat", "IVF2,Flat", "IVF2,PQ2x4,RFlat"])
def test_a_basket_lies_at_the_mean_of_its_known_items_in_each_type_of_index(kind: str) -> None:
    items = pd.Series(["i0", "i1", "i60", "i7", "i99", "unknown", "unknown"])
    unit = pd.Series(["a", "a", "b", "c", "c", "c", "d"])
    vectors, units = embeddings(kind).means(items, unit)
    assert units.tolist() == ["a", "b", "c"], "no item of the basket d is known"
    expected = np.array([[1, 0, 0, 0], [0, 1, 0, 0], [0.5, 0.5, 0, 0]])
    np.testing.assert_allclose(vectors, expected, atol=1e-6)


def test_baskets_of_one_direction_share_regions_that_the_others_have_not() -> None:
    items = pd.Series([f"i{n}" for n in range(100)])
    mixed = pd.Series([f"i{n % 100}" for n in range(100)] + [f"i{n}" for n in range(100)])
    unit = pd.Series([*range(100), *range(100, 150), *range(100, 150)])  # 50 baskets hold both kinds
    found = embeddings().with_regions(mixed, unit)
    region = found.regions_of(items, pd.Series(range(100)))
    assert set(region[:50]).isdisjoint(region[50:])
    assert found.regions_of(pd.Series(["unknown"]), pd.Series([0])).empty
    assert embeddings().with_regions(items[:3], unit[:3]).regions_of(items, unit[:100]).empty, (
        "too few to know"
    )


def test_of_a_checkout_the_last_answer_with_features_and_the_last_basket_are_compared(
    records: Callable[..., list[Record]],
) -> None:
    def asked(*users: str | None) -> pa.Table:
        """Ask three times in each basket; the last answer is a cached one, without features."""
        made = []
        for number, one in enumerate(records(len(users))):
            for scan in (1, 2, 5):
                request = replace(
                    one.request,
                    user_id=users[number],
                    basket=one.request.basket[:scan],
                    at=one.request.at + scan,
                )
                features = one.features[:0] if scan == 5 else one.features
                made.append(replace(one, request=request, features=features))
        return records_to_table(made, FEATURES)

    known, guests = [f"u{number}" for number in range(200)], [None] * 10
    answers, _, requests = log_tables(asked(*known, *guests), asked(*known), {}, embeddings())
    assert answers.current["request"].nunique() == answers.reference["request"].nunique() == 200
    assert len(requests.current) == len(requests.reference) == 200, "without guests"
    few = asked(*known[:20], *guests)
    answers, items, requests = log_tables(few, few, {}, embeddings())
    assert answers.current["request"].nunique() == 20 + 2 * len(guests)
    assert len(requests.current) == 20 + 3 * len(guests), "nothing joins the questions of a guest"
    assert items.current.groupby("request").size().value_counts().to_dict() == {5: 30, 1: 10, 2: 10}


def test_growing_baskets_are_compared_with_baskets_of_the_same_lengths(
    records: Callable[..., list[Record]],
) -> None:
    """The evaluation asks once about four or five items, the till after each scan, also about eight."""

    def asked(count: int, lengths: tuple[int, ...]) -> pa.Table:
        made = records(count)
        for number, record in enumerate(made):
            basket = (record.request.basket * 2)[: lengths[number % len(lengths)]]
            made[number] = replace(record, request=replace(record.request, basket=basket))
        return records_to_table(made, FEATURES)

    _, items, requests = log_tables(asked(80, (1, 2, 4, 8)), asked(90, (1, 4, 4)), {}, embeddings())
    assert len(requests.current) == 40, "of two items and of eight the reference has none"
    assert len(requests.reference) == 60
    for frame in (items.current, items.reference):
        assert frame.groupby("request").size().value_counts(normalize=True).to_dict() == {1: 0.5, 4: 0.5}


def test_only_places_that_both_sides_show_are_compared(records: Callable[..., list[Record]]) -> None:
    """The evaluation asks for five items, some tills for two, and a single request for one."""

    def answered(*wanted: int) -> pa.Table:
        made = records(100)
        for number, record in enumerate(made):
            k = wanted[number] if number < len(wanted) else 5
            response = msgspec.structs.replace(record.response, items=record.response.items[:k])
            asked = replace(record.request, k=k)
            made[number] = replace(record, request=asked, response=response, features=record.features[:k])
        return records_to_table(made, FEATURES)

    items, _, _ = log_tables(answered(1, 2, 2, 2), answered(), {}, embeddings())
    assert items.reference.groupby("request").size().tolist() == [2] * 100
    assert items.current.groupby("request").size().tolist() == [1] + [2] * 99
    shown = records_to_table(records(100), FEATURES)["scores"].to_pylist()
    assert items.reference["score"].tolist() == [score for scores in shown for score in scores[:2]]


def test_a_bundle_holds_its_reference(bundle: Path) -> None:
    assert len(bundle_reference(bundle, REFERENCE_LOG)) == 900
    assert bundle_reference(bundle, REFERENCE_EVENTS).to_pandas()["category"].nunique() == 40
    assert bundle_categories(bundle)["i41"] == "category 1"


def test_a_bundle_that_was_not_evaluated_has_no_reference(bundle: Path) -> None:
    (bundle / "reference_log.parquet").unlink()
    seal_bundle(bundle, cut="2024-01-01", settings=RankingSettings(Quotas(), 1.0), made_from={})
    with pytest.raises(FileNotFoundError, match="evaluate it first"):
        bundle_reference(bundle, REFERENCE_LOG)


@pytest.mark.parametrize(
    ("name", "size"),
    [("index.faiss", 30), *(("statistics/item_ids.npy", size) for size in (0, 60, 200))],
)
def test_a_cut_file_of_a_bundle_is_an_error_that_names_the_bundle(bundle: Path, name: str, size: int) -> None:
    assert len(Embeddings.of(bundle).item_ids)
    with (bundle / name).open("r+b") as file:
        file.truncate(size)
    with pytest.raises(BundleInvalid, match=f"bundle {bundle} can't be read .*: fetch the bundle again"):
        Embeddings.of(bundle)
    if name != "index.faiss":
        with pytest.raises(BundleInvalid, match=f"bundle {bundle} can't be read"):
            bundle_categories(bundle)
