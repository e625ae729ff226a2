"""What a request may look like, and what is said about one that may not."""

from typing import Any

import pytest

from serving.errors import InvalidRequest
from serving.schemas import MAX_BASKET, MAX_K, Recommendation, Request, parse_request


def parse(raw: object) -> Request:
    return parse_request(raw, now=1_000.0, default_id="generated")


def test_a_full_request() -> None:
    request = parse(
        {
            "request_id": "r1",
            "user_id": "1228",
            "basket": ["a", "b", "a"],
            "store_id": "406",
            "at": "2017-12-05T18:30:00Z",
            "k": 20,
        }
    )
    assert request == Request(("a", "b"), 1_512_498_600.0, "1228", "406", 20, "r1")


def test_all_but_the_basket_may_be_absent() -> None:
    assert parse({"basket": []}) == Request((), 1_000.0, None, None, 10, "generated")


def test_a_profile_of_the_bundle_is_taken() -> None:
    known = ("default", "premium")
    given = parse_request({"basket": [], "profile": "premium"}, now=0.0, default_id="", profiles=known)
    assert given.profile == "premium"
    assert parse({"basket": [], "profile": None}).profile == "default"
    with pytest.raises(InvalidRequest, match="profile must be one of default, premium"):
        parse_request({"basket": [], "profile": "clearance"}, now=0.0, default_id="", profiles=known)


def test_a_huge_k_is_cut() -> None:
    assert parse({"basket": [], "k": 10**6}).k == MAX_K


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        ([], "JSON object"),
        ({}, "basket is missing"),
        ({"basket": "abc"}, "basket must be a list"),
        ({"basket": [1]}, "basket must be a list of item ids"),
        ({"basket": [""]}, "basket ids are 1 to 128"),
        ({"basket": ["a" * 129]}, "basket ids are 1 to 128"),
        ({"basket": ["a\x00b"]}, "printable"),
        ({"basket": ["x"] * (MAX_BASKET + 1)}, "at most 500"),
        ({"basket": [], "k": -1}, "k must be 0 or more"),
        ({"basket": [], "k": 1.5}, "k must be a whole number"),
        ({"basket": [], "k": True}, "k must be a whole number"),
        ({"basket": [], "user_id": 12}, "user_id must be a string"),
        ({"basket": [], "at": 12}, "ISO 8601"),
        ({"basket": [], "at": "yesterday"}, "ISO 8601"),
        ({"basket": [], "bascet": []}, "1 unknown field"),
        ({"basket": [], "profile": "premium"}, "profile must be one of default$"),
        ({"basket": [], "profile": 7}, "profile must be one of default$"),
    ],
)
def test_a_broken_request_names_the_field(raw: Any, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says):
        parse(raw)


@pytest.mark.parametrize("field", ["user_id", "store_id", "request_id", "at", "profile"])
def test_what_was_sent_is_never_echoed(field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse({"basket": [], field: "canary\n<script>"})
    assert "canary" not in str(caught.value)


def test_an_item_tells_its_terms_only_where_they_are_known() -> None:
    plain = {"item_id": "a", "score": 0.5, "source": "popular", "reason": "popular now"}
    assert Recommendation("a", 0.5, "popular", "popular now").to_dict() == plain
    offered = Recommendation("a", 0.5, "popular", "popular now", 0.0, 0.25, "SAVE")
    assert offered.to_dict() == {**plain, "price": 0.0, "promotion": 0.25, "coupon": "SAVE"}
