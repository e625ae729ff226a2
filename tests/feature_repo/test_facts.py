"""The fact: its valid values, the message about an invalid fact, and the fact that wins among several."""

import json
import math
import re
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from feature_repo.facts import MAX_BYTES, Fact, FactInvalid, parse_fact, parse_lines, unranked

NOW = 1_512_498_600.0  # 2017-12-05T18:30:00Z
PRICE = {"fact_id": "f1", "fact": "price", "item_id": "a", "value": 2.5, "at": "2017-12-05T18:30:00Z"}


def parse(**changed: Any) -> Fact:
    given = {**PRICE, **changed}
    fields = {name: value for name, value in given.items() if value is not ...}
    return parse_fact(json.dumps(fields).encode(), NOW)


def test_a_stored_fact_is_read_whatever_its_times_say() -> None:
    fields = {**PRICE, "fact": "stock", "valid_from": "2999-01-01T00:00:00Z"}
    assert parse_fact(orjson.dumps(fields), math.inf).valid_from is not None


def test_a_full_fact_from_bytes() -> None:
    raw = orjson.dumps(
        {
            **PRICE,
            "fact": "coupon",
            "value": "SAVE10",
            "store_id": "406",
            "user_id": "u1",
            "valid_from": "2017-12-05T19:30:00+01:00",
            "valid_until": "2017-12-06",
        }
    )
    found = parse_fact(raw, NOW)
    assert found == Fact("f1", "coupon", "a", "SAVE10", NOW, "406", "u1", NOW, 1_512_518_400.0)


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("price", 0),
        ("price", 1e9),
        ("stock", 0),
        ("stock", 2.5),
        ("ban", False),
        ("ban", 1),
        ("promotion", 0),
        ("promotion", 1),
        ("coupon", "x" * 128),
        ("ban", None),
        ("coupon", None),
    ],
)
def test_valid_values_are_accepted(kind: str, value: object) -> None:
    assert parse(fact=kind, value=value).value == value


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"fact": "offer"}, "fact is not one of price, stock, ban, promotion, cost, coupon"),
        ({"fact_id": ...}, "missing required field `fact_id`"),
        ({"value": ...}, "missing required field `value`"),
        ({"fact_id": ""}, "fact_id is not a text of 1 to 128"),
        ({"item_id": 7}, "Expected `str`, got `int` - at `$.item_id`"),
        ({"item_id": "a\x1fb"}, "printable"),
        ({"store_id": "x" * 129}, "store_id is not a text"),
        ({"user_id": "u1"}, "a price is the same for every user"),
        ({"value": True}, "value is not that of a price: expected the current price of one unit"),
        ({"value": "2.5"}, "the current price of one unit"),
        ({"value": -0.01}, "a number from 0 to 1e9"),
        ({"value": 10**400}, "out of range"),
        ({"fact": "ban", "value": 0.5}, "true or 1 banned, false or 0 not"),
        ({"fact": "stock", "valid_from": "2017-12-06"}, "a stock replaces the one that holds until then"),
        ({"fact": "ban", "value": 0, "valid_from": "2017-12-06"}, "send it when it begins"),
        ({"fact": "promotion", "value": 10}, "a number from 0 to 1"),
        ({"fact": "coupon", "value": 10}, "the coupon's code"),
        ({"fact": "coupon", "value": ""}, "the coupon's code"),
        ({"at": None}, "Expected `str`, got `null` - at `$.at`"),
        ({"at": "now"}, "at is no ISO 8601 time"),
        ({"at": "1969-12-31T23:59:59Z"}, "at lies before 1970"),
        ({"valid_from": "9999-12-31T23:59:59-23:59"}, "valid_from lies before 1970 or after the year 9999"),
        ({"at": "2017-12-06T18:30:01Z"}, "at lies in the future"),
        ({"valid_until": "0001-01-01T00:00:00+14:00"}, "valid_until"),
        ({"valid_from": "2018-01-01", "valid_until": "2018-01-01"}, "valid_until is not after valid_from"),
        ({"x\nforged": "2018-01-01"}, "no fact: it has an unknown field; known are fact_id, fact,"),
    ],
    ids=str,
)
def test_an_invalid_fact_names_the_field(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(FactInvalid, match=re.escape(message)) as found:
        parse(**changed)
    assert "2.5" not in str(found.value)


@pytest.mark.parametrize("part", ["99999", "999999", "9999999"])
def test_the_largest_time_of_a_language_is_valid(part: str) -> None:
    fact = parse(valid_until=f"9999-12-31T23:59:59.{part}Z")
    assert parse_fact(unranked(fact.ranked()), math.inf) == fact


@pytest.mark.parametrize("raw", [b"", b"[]", b'{"value": NaN}', b"\xff", b" " * (MAX_BYTES + 1)])
def test_a_text_without_a_json_object_is_refused(raw: bytes) -> None:
    with pytest.raises(FactInvalid):
        parse_fact(raw)


def test_a_file_is_read_to_its_end_and_each_bad_line_reported() -> None:
    good = orjson.dumps(PRICE)
    found, refused = parse_lines([good, b"", b"{}", good, b"nothing"])
    assert len(found) == 2
    assert [number for number, _ in refused] == [3, 5]


ids = st.sampled_from(["a", "b"])
facts = st.builds(
    Fact,
    fact_id=st.sampled_from(["f1", "f10", "f2", "ä"]),
    fact=st.sampled_from(["price", "coupon"]),
    item_id=ids,
    value=st.sampled_from([1.0, 2.0, None, "C1", "C2"]),
    at=st.sampled_from([NOW, NOW + 1e-6, NOW + 1.0, 9.0]),
    store_id=st.none() | ids,
    user_id=st.none() | ids,
    valid_from=st.none() | st.just(5.0),
)


@given(arrivals=st.lists(facts, min_size=1, max_size=12))
def test_the_latest_fact_has_the_highest_rank(arrivals: list[Fact]) -> None:
    """The stores keep it, in any order of arrival: tests/serving/shop/test_fact_store.py."""
    latest = max(arrivals, key=Fact.ranked)
    assert (latest.at, latest.fact_id) == max((fact.at, fact.fact_id) for fact in arrivals)


@given(fact=facts.filter(lambda fact: isinstance(fact.value, str) == (fact.fact == "coupon")))
def test_a_fact_survives_a_round_trip(fact: Fact) -> None:
    if fact.fact != "coupon" and fact.user_id is not None:
        return
    assert parse_fact(unranked(fact.ranked())) == fact
