"""The features of an example are those of an archive that ends before its moment; joins that leak are caught.

The tests replace the events at the moment of a basket or later by poison: other items at huge prices. A
correct join still gives the same features, and the same as over an archive without these events.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pandas as pd
import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from components.data import build_examples as module
from components.data.build_examples import replay
from components.data.fit_statistics import fit, fit_vocabulary, fresh_by_day, purchases_of
from feature_repo.aggregates import BATCH, DAY_S, UserEvents, no_events
from feature_repo.events import EVENT_SCHEMA
from feature_repo.queries import Query, Rows
from feature_repo.schema import model_inputs, tower_inputs
from feature_repo.statistics import Statistics
from feature_repo.stream.archive import rows_of
from serving.stages.retrieval import build_query

BASE = pd.Timestamp("2024-03-01", tz="UTC")  # the statistics cover the events before it
ITEMS = [f"i{number}" for number in range(12)]
PLANTED = ["poison-1", "poison-2", *ITEMS[:3]]

Asked = tuple[str, float]  # user, moment
Placed = tuple[str, pd.Timestamp, list[str], str]  # user, time, items, event type
Join = Callable[[pd.DataFrame, Statistics, Asked, tuple[str, ...]], Query]


def events_of(baskets: list[Placed]) -> pd.DataFrame:
    rows = [
        (f"b{number}-{item}", user, f"b{number}", item, at, kind)
        for number, (user, at, items, kind) in enumerate(baskets)
        for item in items
    ]
    columns = ["event_id", "user_id", "basket_id", "item_id", "at", "event_type"]
    frame = pd.DataFrame(rows, columns=columns)
    frame["at"] = frame["at"].astype("datetime64[us, UTC]")
    return frame.assign(
        quantity=1,
        price=1.0 + frame["item_id"].str.len(),
        discount=np.arange(len(frame)) % 3 * 0.25,
        store_id="",
    )


def before_base() -> list[Placed]:
    """Enough events for a catalogue; i11 is sold too rarely to be in it. A fourth of them are clicks."""
    random = np.random.default_rng(5)
    return [
        (
            f"u{number % 3}",
            BASE - pd.Timedelta(hours=9 * number + 1),
            random.choice(ITEMS[:11], 4, False).tolist(),
            "click" if number % 4 == 3 else "purchase",
        )
        for number in range(60)
    ]


PAST = events_of(before_base())


def statistics() -> Statistics:
    items = pd.DataFrame(
        {
            "type": [f"t{number % 4}" for number in range(12)],
            "category": "c",
            "department": "d",
            "brand": "b",
        },
        index=pd.Index(ITEMS, name="item_id"),
    )
    seen = purchases_of(PAST)
    return fit(seen, items, fit_vocabulary(seen, items), BASE)


FITTED = statistics()


# --------------------------------------------------------------------------------------------- joins


def training(events: pd.DataFrame, fitted: Statistics, asked: Asked, visible: tuple[str, ...]) -> Query:
    """The join of `build_examples`."""
    purchases = purchases_of(events)
    window = module._Window(fitted, purchases.item_ids)
    user, at = asked
    [basket] = [b for b in replay(purchases) if (purchases.user_ids[b.user], b.at) == (user, at)]
    return Query(fitted, basket.at, fitted.codes(visible), len(visible), window.user(basket))


def serving(events: pd.DataFrame, fitted: Statistics, asked: Asked, visible: tuple[str, ...]) -> Query:
    """The join of the endpoint, with the row of a batch over the archive."""
    return build_query(fitted, visible, row(events, asked[0]), asked[1])


def by_the_day(events: pd.DataFrame, fitted: Statistics, asked: Asked, visible: tuple[str, ...]) -> Query:
    """A leak: purchases are known by their date, so a basket sees all of its day."""
    known = row(events, asked[0])
    return build_query(fitted, visible, replace(known, at=known.at // DAY_S * DAY_S), asked[1])


def inclusive(events: pd.DataFrame, fitted: Statistics, asked: Asked, visible: tuple[str, ...]) -> Query:
    """A leak: "up to" the moment instead of before it, so a basket sees itself."""
    query = build_query(fitted, visible, row(events, asked[0]), np.nextafter(asked[1], np.inf))
    return replace(query, at=asked[1])


def uncut(events: pd.DataFrame, fitted: Statistics, asked: Asked, visible: tuple[str, ...]) -> Query:
    """A leak: the user's latest row, as if it had always been there."""
    query = build_query(fitted, visible, row(events, asked[0]), np.inf)
    query.user.at = asked[1]
    return replace(query, at=asked[1])


def row(events: pd.DataFrame, user: str) -> UserEvents:
    table = pa.Table.from_pandas(events, EVENT_SCHEMA, preserve_index=False)
    table = table.append_column("version", pa.array(np.full(len(table), BATCH)))
    return dict(rows_of(table)).get(user, no_events())


# --------------------------------------------------------------------------------------------- worlds


def poisoned(events: pd.DataFrame, at: float) -> pd.DataFrame:
    """The same shop until `at`, and from then on baskets of other things at huge prices."""
    late = moments(events) >= at
    world = events.copy()
    world.loc[late, "item_id"] = [PLANTED[number % len(PLANTED)] for number in range(late.sum())]
    world.loc[late, ["price", "discount", "quantity"]] = [9e8, 9e8, 1_000]
    return world.drop_duplicates(["basket_id", "item_id"])


def ending(events: pd.DataFrame, asked: Asked) -> pd.DataFrame:
    """The shop before the moment; after it, only a visit of the user who gets an answer."""
    late = moments(events) >= asked[1]
    own = events[(events["user_id"] == asked[0]) & (moments(events) == asked[1])].head(1)
    answer = own.assign(event_id="shown", basket_id="answer", event_type="impression")
    buys = own.assign(event_id="bought", basket_id="basket", event_type="purchase")
    return pd.concat([events[~late], answer, buys], ignore_index=True)


def moments(events: pd.DataFrame) -> np.ndarray:
    return events["at"].astype("int64").to_numpy() / 1e6


def inputs(query: Query) -> list[np.ndarray]:
    """The inputs of all models: for every item of the catalogue, and for the query tower."""
    dense, categorical = model_inputs(Rows(query, np.arange(len(FITTED.item_ids))))
    return [dense, categorical, *tower_inputs(query).values()]


def examples(events: pd.DataFrame) -> list[tuple[Asked, tuple[str, ...]]]:
    """Each basket from the base on: user and time of its request, and its visible items."""
    later = events[(events["at"] >= BASE) & (events["event_type"] == "purchase")]
    return [
        (
            (str(user), asked_at(events, str(user), pd.Timestamp(at).value // 1_000 / 1e6)),
            tuple(basket["item_id"].iloc[1:]),
        )
        for (user, at, _), basket in later.groupby(["user_id", "at", "basket_id"])
    ]


def asked_at(events: pd.DataFrame, user: str, bought: float) -> float:
    """The time of a basket's first request, found by going back from answer to answer."""
    own, at = events[events["user_id"] == user], moments(events[events["user_id"] == user])
    shown = at[(own["event_type"] == "impression") & (at <= bought)]
    taken = at[(own["event_type"] == "purchase") & (at < bought)]
    asked = bought
    for answered in sorted(shown, reverse=True):
        if asked - answered > 1_800 or (taken >= answered).any():
            break
        asked = answered
    return float(asked)


def caught(join: Join, events: pd.DataFrame) -> list[Asked]:
    """Return the moments whose features a join takes from the moment itself or from later."""
    found = []
    for asked, visible in examples(events):
        honest = inputs(join(ending(events, asked), FITTED, asked, visible))
        for world in (events, poisoned(events, asked[1])):
            got = inputs(join(world, FITTED, asked, visible))
            if not all(np.array_equal(one, other) for one, other in zip(got, honest, strict=True)):
                found.append(asked)
                break
    return found


new_baskets = st.lists(
    st.tuples(
        st.sampled_from(["u0", "u1", "new"]),
        st.sampled_from([0, 1, 60, 1_800, 3_600, 7 * DAY_S]),  # after the last one, seconds
        st.integers(0, 2),  # and microseconds
        st.lists(st.sampled_from(ITEMS), min_size=2, max_size=5, unique=True),
        st.sampled_from(["purchase", "purchase", "impression", "click"]),
    ),
    min_size=1,
    max_size=7,
)


def world(baskets: list[tuple[str, int, int, list[str], str]]) -> pd.DataFrame:
    """The past, and baskets after the base: some of one user a microsecond apart, none of one moment."""
    at, placed, taken = BASE, [], set()
    for user, pause_s, micros, items, kind in baskets:
        at += pd.Timedelta(seconds=pause_s, microseconds=micros)
        if (user, at) not in taken:
            placed.append((user, at, items, kind))
            taken.add((user, at))
    events = events_of(placed)
    for name in ("event_id", "basket_id"):
        events[name] = "new-" + events[name]
    return pd.concat([PAST, events], ignore_index=True)


@settings(max_examples=25, deadline=None)
@given(new_baskets)
def test_training_and_endpoint_use_only_earlier_events(
    baskets: list[tuple[str, int, int, list[str], str]],
) -> None:
    events = world(baskets)
    assert caught(training, events) == []
    assert caught(serving, events) == []


@settings(max_examples=25, deadline=None)
@given(new_baskets)
def test_training_and_endpoint_have_the_same_features(
    baskets: list[tuple[str, int, int, list[str], str]],
) -> None:
    events = world(baskets)
    for asked, visible in examples(events):
        trained, served = (inputs(join(events, FITTED, asked, visible)) for join in (training, serving))
        for one, other in zip(trained, served, strict=True):
            np.testing.assert_array_equal(one, other, err_msg=str(asked))


def test_leaking_joins_are_caught() -> None:
    """One user, three baskets and a look of one day, and a basket of the next week."""
    hours = (0, 7_200, 3 * 3_600, 60, 7 * DAY_S)
    events = world(
        [
            ("u0", pause, 0, ITEMS[number : number + 4], "click" if number == 3 else "purchase")
            for number, pause in enumerate(hours)
        ]
    )
    first, second, third, _, fourth = (
        BASE.timestamp() + after for after in np.cumsum(hours, dtype=np.float64).tolist()
    )
    assert caught(training, events) == caught(serving, events) == []
    assert caught(inclusive, events) == [("u0", at) for at in (first, second, third, fourth)]
    assert caught(uncut, events) == [("u0", at) for at in (first, second, third, fourth)]
    # The first basket is at midnight exactly: its day holds no earlier events.
    assert {("u0", at) for at in (second, third, fourth)} <= set(caught(by_the_day, events))


def test_an_answer_in_its_own_history_is_caught() -> None:
    """The leak of a feedback loop: impressions for this basket count as earlier impressions."""
    shown, taken = ("u0", 60, 0, ITEMS[:4], "impression"), ("u0", 120, 0, ITEMS[2:6], "purchase")
    events = world([shown, taken])

    def when_bought(
        events: pd.DataFrame, fitted: Statistics, asked: Asked, visible: tuple[str, ...]
    ) -> Query:
        query = build_query(fitted, visible, row(events, asked[0]), asked[1] + 120)
        return replace(query, at=asked[1])

    answered = ("u0", BASE.timestamp() + 60)
    assert examples(events) == [(answered, tuple(ITEMS[3:6]))]
    assert caught(training, events) == caught(serving, events) == []
    assert caught(when_bought, events) == [answered]


def test_day_fresh_features_know_only_the_days_before() -> None:
    """Poison from a moment on changes the counts of each later day, and of no day that began by then."""
    types, days, hours = FITTED.categorical[:, 0], 6, 100
    moment = BASE + pd.Timedelta(hours=hours)
    late = [("u0", moment + pd.Timedelta(days=day), ITEMS[:4], "purchase") for day in range(3)]
    poisoned = purchases_of(events_of([*before_base(), *late]))
    clean, spoilt = (
        fresh_by_day(purchases, FITTED.item_ids, types, BASE.timestamp(), days)
        for purchases in (purchases_of(PAST), poisoned)
    )
    begun = [24 * day <= hours for day in range(days)]
    assert [bool((clean[day] == spoilt[day]).all()) for day in range(days)] == begun
    # The examples of a day see the numbers that the endpoint would hold after that night's count.
    until = purchases_of(PAST).before(BASE)
    assert (fresh_by_day(until, FITTED.item_ids, types, BASE.timestamp(), 1)[0] == FITTED.fresh).all()
