"""Invalid rows, facts and numbers are stopped at their source and give sound answers."""

import asyncio
import itertools
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from feature_repo.aggregates import UserEvents, pack, unpack
from feature_repo.queries import Rows
from feature_repo.schema import LIMIT, model_inputs
from feature_repo.statistics import Statistics
from serving.answer.recommender import Recommender
from serving.checkout.checkout import Checkout
from serving.release.bundle import Bundle
from serving.schemas import Request, Response
from serving.stores.online_features import MemoryStore, UserRow
from tests.serving.conftest import call, metric

AT = 1_512_498_600.0
ASKED = Request(("1000031",), AT, "u1", None, 10, "r")
BAD_NUMBERS = [np.nan, np.inf, -np.inf]


@pytest.fixture(scope="module")
def good(row_of: Callable[..., UserEvents]) -> UserEvents:
    """Some baskets, weeks apart."""
    baskets = [["1000005", "1000050"], ["1000005", "1000051", "1000120"], ["1000010"]]
    return row_of([(AT - (9 - n) * 86_400, basket, 10.0, 1.0) for n, basket in enumerate(baskets)])


def spoilt(row: UserEvents, column: str, line: int, value: float) -> bytes:
    """Return the row as a broken writer would store it."""
    values = getattr(row, column).copy()
    values[line] = value
    return pack(replace(row, **{column: values}))


@pytest.mark.parametrize(
    ("column", "values"),
    [("at", [*BAD_NUMBERS, -1.0]), ("paid", BAD_NUMBERS), ("discount", BAD_NUMBERS), ("kind", [3])],
)
def test_a_row_with_an_impossible_line_is_invalid(good: UserEvents, column: str, values: list[float]) -> None:
    for line, value in itertools.product(range(len(good)), values):
        with pytest.raises(ValueError, match="it is damaged"):
            unpack(spoilt(good, column, line, value))


@pytest.mark.parametrize(("line", "at"), [(2, 1.0), (0, 1e308)], ids=["before its predecessor", "after all"])
def test_a_row_whose_lines_are_not_in_the_order_of_time_is_invalid(
    good: UserEvents, line: int, at: float
) -> None:
    with pytest.raises(ValueError, match="it is damaged"):
        unpack(spoilt(good, "at", line, at))


def answer_of(bundle: Bundle, row: bytes | None) -> Response:
    store = MemoryStore()
    if row is not None:
        store.write("u1", UserRow(row, AT))
    return Recommender(bundle, store).recommend(ASKED)


def check(response: Response) -> None:
    scores = np.array([item.score for item in response.items])
    assert np.isfinite(scores).all()
    assert ((scores >= 0) & (scores <= 1)).all()
    assert len({item.item_id for item in response.items}) == 10


def test_an_invalid_row_is_ignored_and_counted(toy_opened: Bundle, good: UserEvents) -> None:
    def counted() -> float:
        return metric("reco_responses_total", rung="full", degraded_reason="features_invalid")

    stranger, store = answer_of(toy_opened, None), MemoryStore()
    checkout = Checkout(Recommender(toy_opened, store), 60_000.0)
    for value in BAD_NUMBERS:
        store.write("u1", UserRow(spoilt(good, "paid", 0, value), AT))
        before = counted()
        response = asyncio.run(checkout.answer(ASKED, call(60)))
        assert (response.degraded, response.degraded_reason) == (True, "features_invalid")
        assert response.items == stranger.items
        assert counted() == before + 1


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    changes=st.lists(st.tuples(st.integers(0, 2**16), st.integers(0, 255)), min_size=1, max_size=6),
    length=st.integers(0, 2**16),
)
def test_a_row_of_any_bytes_gives_a_sound_answer(
    toy_opened: Bundle, good: UserEvents, changes: list[tuple[int, int]], length: int
) -> None:
    row = bytearray(pack(good))
    for place, value in changes:
        row[place % len(row)] = value
    check(answer_of(toy_opened, bytes(row[: length % (len(row) + 1)])))
    check(answer_of(toy_opened, bytes(row)))


@settings(max_examples=100)
@given(
    st.lists(
        st.sampled_from([0.0, -0.0, 1e-308, 1e30, 1e38, 1e308, -1e308, np.nan, np.inf, -np.inf, 3.5]),
        min_size=12,
        max_size=12,
    )
)
def test_absurd_numbers_in_the_item_table_are_clipped_before_the_model(
    toy_opened: Bundle, numbers: list[float]
) -> None:
    """Prices, counts and ages: NaN becomes 0, and values that are too large are clipped."""
    with np.errstate(all="ignore"):
        broken = np.resize(np.array(numbers).astype(np.float32), len(toy_opened.statistics.item_ids))
    names = ["price", "discount_ratio", "purchases_4w", "purchases_13w", "repeat_ratio"]
    names += ["interval_days", "age_days"]
    fields = {name: getattr(toy_opened.statistics, name) for name in Statistics.__dataclass_fields__}
    statistics = Statistics(**fields | dict.fromkeys(names, broken))
    worse = replace(toy_opened, statistics=statistics)
    with np.errstate(all="ignore"):  # the strict numerics of the tests; the endpoint has numpy's own
        recommender = Recommender(worse, MemoryStore())
        asked = recommender.ask(Request(("1000031",), AT, None, "store-1", 10, "r"))
        dense, _ = model_inputs(Rows(asked.query, np.arange(len(broken))))
        assert np.isfinite(dense).all()
        assert np.abs(dense).max() <= LIMIT
        check(recommender.recommend(asked.request))


def test_a_row_of_absurd_amounts_gives_a_sound_answer(toy_opened: Bundle, good: UserEvents) -> None:
    absurd = replace(good, paid=np.full(len(good), 3e38, np.float32))
    with np.errstate(all="ignore"):  # the strict numerics of the tests; the endpoint has numpy's own
        check(answer_of(toy_opened, pack(absurd)))
