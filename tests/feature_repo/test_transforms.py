"""Features of a five-item shop, computed by hand."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from feature_repo import transforms as t
from feature_repo.aggregates import CLICK, DAY_S, IMPRESSION, UserEvents, no_events
from feature_repo.kernels.pairs import PairFeature
from feature_repo.queries import HOUR_S, MINUTE_S, Query, Rows, User
from feature_repo.schema import DENSE_NAMES, USER, model_inputs, tower_inputs
from feature_repo.statistics import Statistics
from feature_repo.transforms import Feature
from tests.feature_repo.conftest import BREAD, BUTTER, JAM, MILK, NOW, TEA, UNKNOWN

MakeRow = Callable[..., UserEvents]


def listed(feature: Feature, rows: Rows) -> list[float]:
    """Return a feature's value for each candidate; the feature may return one number for all."""
    return np.broadcast_to(feature(rows), len(rows.candidates)).tolist()


def test_user_item_features(rows: Rows) -> None:
    np.testing.assert_allclose(t.user_item_count(rows), [0, 0, 2, 1])
    np.testing.assert_allclose(
        t.user_item_decayed_60d(rows), [0, 0, np.exp(-0.5) + np.exp(-1 / 6), np.exp(-1 / 6)], rtol=1e-6
    )
    np.testing.assert_allclose(t.user_item_recency_days(rows), [t.NEVER_DAYS, t.NEVER_DAYS, 10, 10])
    # Milk was bought twice, 20 days apart; tea once, so the catalogue's 7 days replace its interval.
    np.testing.assert_allclose(t.user_item_interval_days(rows)[2:], [20, 7])
    np.testing.assert_allclose(t.user_item_due_ratio(rows), [0, 0, 0.5, 10 / 7])
    np.testing.assert_allclose(t.user_item_rate(rows), [0, 0, 1, 0.5])
    np.testing.assert_allclose(t.user_item_rank(rows)[2:], [0, 1])


def test_user_features(rows: Rows) -> None:
    user = rows.query.user
    assert t.user_basket_count(user) == 2
    assert t.user_recency_days(user) == 10
    assert t.user_basket_interval_days(user) == 20
    assert t.user_basket_size(user) == 1.5
    assert t.user_spend_per_line(user) == pytest.approx(7 / 3)
    assert t.user_discount_ratio(user) == pytest.approx(2 / 9)


def test_item_features(statistics: Statistics) -> None:
    assert t.item_purchases_4w(statistics).tolist() == [8, 4, 2, 6, 1]
    # Bread: 2 baskets a week lately, 1 a week over the quarter.
    np.testing.assert_allclose(
        t.item_trend(statistics)[[BREAD, JAM]], np.log([2.5 / 1.5, 1 / 1.5]), rtol=1e-6
    )
    assert t.item_price(statistics)[JAM] == 4
    assert t.item_is_private(statistics).tolist() == [0, 1, 0, 0, 1]
    assert t.item_age_days(statistics)[TEA] == 100


def test_the_kind_of_an_item(rows: Rows) -> None:
    """Milk and tea are each the only item of their type and category; together they are a department."""
    milk, tea = np.exp(-30 / 120) + np.exp(-10 / 120), np.exp(-10 / 120)
    assert listed(PairFeature.user_has_item, rows) == [0, 0, 1, 1]
    assert listed(PairFeature.user_type_decayed_120d, rows) == pytest.approx([0, 0, milk, tea])
    assert listed(PairFeature.user_category_decayed_120d, rows) == pytest.approx([0, 0, milk, tea])
    recently = np.exp(-10 / 15)
    assert listed(PairFeature.user_type_decayed_15d, rows) == pytest.approx(
        [0, 0, np.exp(-2) + recently, recently]
    )
    assert listed(PairFeature.user_type_items, rows) == [0, 0, 1, 1]
    assert listed(PairFeature.user_type_share, rows) == [0, 0, 1, 1]
    assert listed(PairFeature.user_department_share, rows) == pytest.approx([0, 0, 1, 1])
    assert listed(PairFeature.user_private_ratio, rows) == pytest.approx([tea / (milk + tea)] * 4)


def test_an_item_of_unknown_type_has_no_share_of_it(rows: Rows) -> None:
    categorical = rows.statistics.categorical.copy()
    categorical[MILK, 0] = 0
    untyped = replace(rows.query, statistics=replace(rows.statistics, categorical=categorical))
    assert listed(PairFeature.user_type_share, Rows(untyped, rows.candidates)) == [0, 0, 0, 1]


def test_the_price_of_an_item(rows: Rows) -> None:
    spend = t.user_spend_per_line(rows.query.user)
    against = [np.log((price + 0.5) / (spend + 0.5)) for price in (3, 4, 1, 5)]
    assert listed(PairFeature.price_to_user_ratio, rows) == pytest.approx(against, rel=1e-6)
    against = [np.log((price + 0.5) / 2.5) for price in (3, 4, 1, 5)]
    assert listed(PairFeature.price_to_basket_ratio, rows) == pytest.approx(against, rel=1e-6)


def test_the_basket_and_kinds_of_items(statistics: Statistics) -> None:
    """Jam has the type of butter and the department of bread; milk shares neither."""
    lift = np.zeros((5, 5), np.float16)
    lift[2, 2], lift[3, 2], lift[2, 1] = 1.5, 0.5, -1
    known = replace(statistics, type_lift=lift)
    query = Query(known, float(NOW), np.array([JAM, MILK]), 2, User(no_events(np.int64), NOW))
    rows = Rows(query, np.array([BUTTER, BREAD]))
    assert listed(PairFeature.basket_same_type, rows) == [1, 0]
    assert listed(PairFeature.basket_same_category, rows) == [1, 0]
    assert listed(PairFeature.basket_same_department, rows) == [0.5, 0.5]
    assert listed(PairFeature.basket_type_lift_mean, rows) == [1, -0.5]
    assert listed(PairFeature.basket_type_lift_max, rows) == [1.5, 0]


def test_features_of_purchases_that_go_with_the_basket(statistics: Statistics, row_of: MakeRow) -> None:
    strength = 4 / (16**0.7 * 4**0.3)  # of bread and butter, both ways
    row = row_of([(NOW - 12 * DAY_S, [BREAD, BUTTER], 5.0, 0.0)])
    with_bread = Query(statistics, float(NOW), np.array([BREAD]), 1, User(row, NOW))
    rows = Rows(with_bread, np.array([BUTTER, JAM]))
    assert listed(PairFeature.together_max_if_bought, rows) == pytest.approx([strength, 0])
    both = strength * np.log1p(np.exp(-12 / 120))
    assert listed(PairFeature.together_times_decayed, rows) == pytest.approx([both, 0])
    lately = np.log1p(np.exp(-12 / 60))
    jam = 2 / (16**0.7 * 4**0.3)
    assert listed(PairFeature.history_together_sum, rows) == pytest.approx([lately * strength, lately * jam])


def test_own_baskets_like_this_one(statistics: Statistics, row_of: MakeRow) -> None:
    """Milk was bought twice with bread; tea once, alone. Butter and jam are of one type."""
    row = row_of(
        [
            (NOW - 30 * DAY_S, [BREAD, MILK], 3.0, 0.0),
            (NOW - 20 * DAY_S, [TEA], 5.0, 0.0),
            (NOW - 10 * DAY_S, [BREAD, BUTTER, MILK, MILK], 7.0, 0.0),
        ]
    )
    query = Query(statistics, float(NOW), np.array([BREAD, JAM]), 3, User(row, NOW))
    rows = Rows(query, np.array([MILK, TEA, BUTTER]))
    old, lonely, new = (np.exp(-days / 120) for days in (30, 20, 10))
    # Cosines: 1 of 2 items shared with 2, and 1 of 3 with 2; of types 1 of 2 with 2, and 2 of 3 with 2.
    item, types = (1 / np.sqrt(4), 1 / np.sqrt(6)), (1 / np.sqrt(4), 2 / np.sqrt(6))
    assert listed(t.own_basket_likeness, rows) == pytest.approx(
        [old * item[0] + new * item[1], 0, new * item[1]]
    )
    assert listed(t.own_basket_likeness_max, rows) == pytest.approx([item[0], 0, item[1]])
    assert listed(t.own_basket_count, rows) == pytest.approx([old + new, 0, new])
    shared = old + new + 0.3
    assert listed(t.own_basket_confidence, rows) == pytest.approx([(old + new) / shared, 0, new / shared])
    total = old + lonely + new + 0.3
    assert listed(t.own_basket_lift, rows) == pytest.approx(
        [
            np.log((with_it + 0.02) / shared) - np.log((ever + 0.02) / total)
            for with_it, ever in ((old + new, old + new), (0, lonely), (new, new))
        ],
        rel=1e-5,
    )
    alike = old * types[0] + new * types[1]
    assert listed(t.own_type_likeness, rows) == pytest.approx([alike, 0, new * types[1]])
    assert listed(t.own_type_likeness_mean, rows) == pytest.approx(
        [alike / (old + new + 0.1), 0, new * types[1] / (new + 0.1)]
    )
    # Items that the user never bought have their type's share: butter stands for jam.
    assert listed(PairFeature.own_basket_type_confidence, rows) == pytest.approx(
        [(old + new) / shared, 0, new / shared]
    )
    unknown = Rows(replace(query, basket=np.array([BREAD])), np.array([JAM]))
    assert listed(PairFeature.own_basket_type_confidence, unknown) == pytest.approx([new / shared])
    nothing = Rows(replace(query, basket=np.empty(0, np.int64)), np.array([MILK]))
    assert listed(t.own_basket_likeness, nothing) == listed(t.own_type_likeness, nothing) == [0]


def test_basket_features(rows: Rows) -> None:
    assert listed(PairFeature.basket_size, rows) == [1] * 4
    assert listed(PairFeature.basket_value, rows) == [2] * 4
    assert listed(PairFeature.basket_known_ratio, rows) == [0] * 4
    np.testing.assert_allclose(PairFeature.basket_same_department(rows), [1, 1, 0, 0])
    np.testing.assert_allclose(
        t.together_sum(rows), [4 / (16**0.7 * 4**0.3), 2 / (16**0.7 * 4**0.3), 0, 0], rtol=1e-6
    )
    np.testing.assert_allclose(t.together_cosine_max(rows), [0.5, 0.25, 0, 0], rtol=1e-6)
    np.testing.assert_allclose(t.together_lift_max(rows), [4 * 20 / 64, 2 * 20 / 64, 0, 0], rtol=1e-6)
    np.testing.assert_allclose(t.together_links(rows), [1, 1, 0, 0])


def test_a_stranger_with_an_empty_basket_has_finite_features(statistics: Statistics) -> None:
    query = Query(statistics, float(NOW), np.empty(0, np.int64), 0, User(no_events(np.int64), NOW))
    dense, categorical = model_inputs(Rows(query, np.arange(5)))
    assert dense.shape == (5, len(DENSE_NAMES))
    assert np.isfinite(dense).all()
    assert categorical[:, 0].tolist() == [1, 2, 3, 4, 5]
    assert categorical[:, 1:].tolist() == statistics.categorical.tolist()
    assert not tower_inputs(query)["history"].any()


def test_absurd_numbers_stay_in_their_row(rows: Rows) -> None:
    price = np.array([2, np.inf, np.nan, 1e308, 4.0])  # those of butter, jam and milk are broken
    broken = Rows(replace(rows.query, statistics=replace(rows.statistics, price=price)), rows.candidates)
    dense, _ = model_inputs(broken)
    for name, expected in (
        ("item_price", [1e9, 0.0, 1e9, 4.0]),
        # Of bread at 2: log of the price and a half over two and a half.
        ("price_to_basket_ratio", [1e9, 0.0, np.log(1e308 / 2.5), np.log(4.5 / 2.5)]),
    ):
        np.testing.assert_allclose(dense[:, DENSE_NAMES.index(name)], expected, rtol=1e-6, err_msg=name)
    assert np.isfinite(dense).all()


# -------------------------------------------------------------------------------- events in a window


def user(row: UserEvents) -> User:
    return User(row, float(NOW))


@pytest.mark.parametrize(
    ("feature", "seconds"),
    [
        (t.user_baskets_1h, HOUR_S),
        (t.user_baskets_7d, 7 * DAY_S),
        (t.user_spend_7d, 7 * DAY_S),
        (t.user_basket_value_60d, 60 * DAY_S),
        (t.user_items_60d, 60 * DAY_S),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_window_includes_its_beginning_and_excludes_the_moment(
    feature: t.UserFeature, seconds: int, row_of: MakeRow
) -> None:
    """One basket of one item that cost 1: each of these features is 1 if it is in the window, else 0."""
    for at, expected in (
        (NOW - seconds - 1e-6, 0),
        (NOW - seconds, 1),
        (NOW - 1e-6, 1),
        (NOW, 0),
        (NOW + 1, 0),
    ):
        assert feature(user(row_of([(at, [MILK], 1.0, 0.0)]))) == expected, at - NOW


def test_windows_of_purchases_by_hand(row_of: MakeRow) -> None:
    """Five baskets in sixty days; two of them in the last week, one of those in the last hour."""
    bought = user(
        row_of(
            [
                (NOW - 100 * DAY_S, [BREAD, JAM], 90.0, 0.0),
                (NOW - 60 * DAY_S, [MILK, TEA], 10.0, 0.0),
                (NOW - 30 * DAY_S, [MILK], 20.0, 5.0),
                (NOW - 30 * DAY_S, [TEA], 6.0, 0.0),  # another basket of the same moment
                (NOW - 3 * DAY_S, [MILK, UNKNOWN], 8.0, 0.0),
                (NOW - 600, [BUTTER], 4.0, 0.0),
            ],
            [(NOW - 60, JAM, CLICK), (NOW - 70, JAM, IMPRESSION)],  # only purchases count here
        )
    )
    assert t.user_baskets_1h(bought) == 1
    assert t.user_baskets_7d(bought) == 2
    assert t.user_spend_7d(bought) == 12
    assert t.user_basket_value_60d(bought) == pytest.approx(48 / 5)
    assert t.user_items_60d(bought) == 4, "milk, tea, butter and the unknown one"
    # A usual week of the sixty days cost 48 * 7 / 60.
    assert t.user_spend_trend(bought) == pytest.approx(12 / 5.6)
    lines = 2 * np.exp(-100 / 15) + 2 * np.exp(-4) + 2 * np.exp(-2) + 2 * np.exp(-0.2)
    assert t.user_lines_decayed_15d(bought) == pytest.approx(lines + np.exp(-600 / DAY_S / 15))


def test_two_unknown_items_count_as_two(row_of: MakeRow) -> None:
    """The catalogue of another day lacks both items, but the shopper bought two."""
    row = row_of([(NOW - 60, ["new", "newer", "tea"], 3.0, 0.0)])
    coded = replace(row, items=np.array([UNKNOWN, UNKNOWN, TEA]))
    assert t.user_items_60d(user(coded)) == 3
    assert t.user_lines_decayed_15d(user(coded)) == pytest.approx(3 * np.exp(-60 / DAY_S / 15))


def test_a_user_without_events_has_the_default_values(row_of: MakeRow) -> None:
    quiet = {
        "user_recency_days": t.NEVER_DAYS,
        "user_basket_interval_days": t.NEVER_DAYS,
        "user_spend_trend": 1,
    }
    newcomer = user(no_events(np.int64))
    just_looked = user(row_of([], [(NOW - DAY_S, TEA, CLICK)]))
    for feature in USER:
        assert feature(newcomer) == quiet.get(feature.__name__, 0), feature.__name__
        assert feature(just_looked) == quiet.get(feature.__name__, 0), feature.__name__


def test_spend_of_nothing_is_no_trend(row_of: MakeRow) -> None:
    """A free purchase, and a purchase before the window: there is no usual week."""
    assert t.user_spend_trend(user(row_of([(NOW - DAY_S, [TEA], 0.0, 3.0)]))) == 1
    assert t.user_spend_trend(user(row_of([(NOW - 61 * DAY_S, [TEA], 9.0, 0.0)]))) == 1
    assert t.user_spend_trend(user(row_of([(NOW - 8 * DAY_S, [TEA], 9.0, 0.0)]))) == 0


# ----------------------------------------------------------------------------------------- sessions


def test_clicks_of_ten_minutes(row_of: MakeRow) -> None:
    clicks = [NOW - 10 * MINUTE_S - 1e-6, NOW - 10 * MINUTE_S, NOW - 1, NOW]
    row = row_of(
        [(NOW - 30, [TEA], 1.0, 0.0)], [(at, TEA, CLICK) for at in clicks] + [(NOW - 5, TEA, IMPRESSION)]
    )
    assert t.user_clicks_10m(user(row)) == 2


def test_a_session_begins_after_the_last_pause(row_of: MakeRow) -> None:
    """A pause of exactly half an hour keeps the session; one microsecond more ends it."""
    last = NOW - 10 * MINUTE_S
    joined = row_of(
        [(last - 60 * MINUTE_S, [MILK, TEA], 2.0, 0.0)],
        [(last - 30 * MINUTE_S, TEA, CLICK), (last, TEA, CLICK)],
    )
    assert t.session_events(user(joined)) == 4
    assert t.session_minutes(user(joined)) == 70
    parted = row_of(
        [(last - 60 * MINUTE_S - 1e-5, [MILK, TEA], 2.0, 0.0)],
        [(last - 30 * MINUTE_S, TEA, CLICK), (last, TEA, CLICK)],
    )
    assert t.session_events(user(parted)) == 2
    assert t.session_minutes(user(parted)) == 40


def test_an_impression_is_no_act_of_the_user(statistics: Statistics, row_of: MakeRow) -> None:
    """Impressions neither extend sessions nor count in them: each answer of the endpoint causes ten."""
    shown = [(NOW - 20 * MINUTE_S - item, item, IMPRESSION) for item in (TEA, JAM)]
    row = row_of([(NOW - 40 * MINUTE_S, [MILK], 2.0, 0.0)], [*shown, (NOW - 60, BUTTER, CLICK)])
    assert t.session_events(user(row)) == 1
    assert t.session_minutes(user(row)) == 1
    assert PairFeature.user_item_last_rank(seen(statistics, row, BUTTER, MILK, TEA)).tolist() == [0, 1, 10]
    assert listed(PairFeature.user_item_impressions_7d, seen(statistics, row, BUTTER, MILK, TEA)) == [0, 0, 1]


@pytest.mark.parametrize(("ago", "events"), [(30 * MINUTE_S, 1), (30 * MINUTE_S + 1e-5, 0)])
def test_a_session_is_over_when_its_last_pause_lasts(ago: float, events: int, row_of: MakeRow) -> None:
    row = row_of([], [(NOW - ago, TEA, CLICK)])
    assert t.session_events(user(row)) == events
    assert t.session_minutes(user(row)) == 30 * events


def test_an_old_session_counts_for_a_request_of_its_time(row_of: MakeRow) -> None:
    row = row_of([], [(NOW - HOUR_S - second, TEA, CLICK) for second in range(9)])
    assert t.session_events(user(row)) == 0
    assert t.session_events(User(row, NOW - HOUR_S - 4)) == 4, "strictly before"


# ------------------------------------------------------------------------------ views of the user, per item


def seen(statistics: Statistics, row: UserEvents, *candidates: int) -> Rows:
    """The candidates of an empty basket."""
    return Rows(Query(statistics, float(NOW), np.empty(0, np.int64), 0, user(row)), np.array(candidates))


def test_clicks_and_impressions_of_a_candidate(statistics: Statistics, row_of: MakeRow) -> None:
    week = 7 * DAY_S
    row = row_of(
        [(NOW - 10, [BREAD], 1.0, 0.0)],
        [
            *((NOW - ago, TEA, CLICK) for ago in (HOUR_S + 1e-5, HOUR_S, 1, 0)),
            (NOW - 20, UNKNOWN, CLICK),
            *((NOW - ago, JAM, IMPRESSION) for ago in (week + 1e-5, week, 5, 4, 0)),
            (NOW - 20, UNKNOWN, IMPRESSION),
        ],
    )
    rows = seen(statistics, row, BREAD, JAM, TEA, MILK)
    assert listed(PairFeature.user_item_clicks_1h, rows) == [0, 0, 2, 0]
    assert listed(PairFeature.user_item_impressions_7d, rows) == [0, 3, 0, 0]


def test_the_rank_among_the_last_items(statistics: Statistics, row_of: MakeRow) -> None:
    """The latest first: tea and an unknown item were clicked, bread bought, milk clicked."""
    row = row_of(
        [(NOW - 40, [BREAD], 1.0, 0.0), (NOW - DAY_S, [TEA, MILK], 1.0, 0.0)],
        [(NOW - 50, MILK, CLICK), (NOW - 30, UNKNOWN, CLICK), (NOW - 20, TEA, CLICK)],
    )
    rows = seen(statistics, row, BREAD, BUTTER, MILK, TEA)
    assert PairFeature.user_item_last_rank(rows).tolist() == [2, 10, 3, 0]


def test_only_ten_items_have_a_rank(statistics: Statistics, row_of: MakeRow) -> None:
    """Twelve items, one a minute: the two oldest have the rank of items never seen."""
    n = 14
    wide = replace(
        statistics,
        item_ids=np.array([f"i{code:02d}" for code in range(n)]),
        **{  # type: ignore[arg-type]
            name: np.resize(getattr(statistics, name), (n, *getattr(statistics, name).shape[1:]))
            for name in ("categorical", "price", "neighbours", "together_count", "basket_count")
        },
    )
    row = row_of([], [(NOW - (12 - code) * MINUTE_S, code, CLICK) for code in range(12)])
    rows = seen(wide, row, *range(n))
    assert PairFeature.user_item_last_rank(rows).tolist() == [10, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0, 10, 10]


def test_candidates_of_the_types_of_the_session(statistics: Statistics, row_of: MakeRow) -> None:
    """Butter and jam are one type; events before the pause and items without a type do not count."""
    row = row_of(
        [(NOW - 2 * HOUR_S, [MILK], 1.0, 0.0), (NOW - 600, [BUTTER], 1.0, 0.0)],
        [(NOW - 500, JAM, CLICK), (NOW - 400, UNKNOWN, CLICK), (NOW - 300, TEA, CLICK)],
    )
    rows = seen(statistics, row, BREAD, BUTTER, JAM, MILK, TEA)
    assert listed(PairFeature.session_same_type, rows) == [0, 2, 2, 0, 1]
    categorical = statistics.categorical.copy()
    categorical[[BREAD, BUTTER], 0] = 0  # of unknown type: nothing is like them
    rows = seen(replace(statistics, categorical=categorical), row, BREAD, BUTTER, JAM)
    assert listed(PairFeature.session_same_type, rows) == [0, 0, 1]
