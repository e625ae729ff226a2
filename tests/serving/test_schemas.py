"""Valid requests, and the messages about invalid ones."""

import itertools
import json
import math
from typing import Any

import msgspec
import pytest

from serving.errors import InvalidRequest, NotJson
from serving.schemas import (
    MAX_BASKET,
    Call,
    Instances,
    Recommendation,
    Request,
    RequestBody,
    Response,
    check_json,
    parse_instances,
    parse_request,
    read_body,
    read_call,
)


def parse(raw: object) -> Request:
    return parse_request(raw, now=1_000.0, default_id="generated")


def test_a_full_request_is_parsed() -> None:
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


def test_a_profile_of_the_bundle_is_accepted() -> None:
    known = ("default", "premium")
    given = parse_request({"basket": [], "profile": "premium"}, now=0.0, default_id="", profiles=known)
    assert given.profile == "premium"
    assert parse({"basket": [], "profile": None}).profile == "default"
    with pytest.raises(InvalidRequest, match="profile must be one of default, premium"):
        parse_request({"basket": [], "profile": "clearance"}, now=0.0, default_id="", profiles=known)


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        ([], r"Expected `object`, got `array`"),
        ({}, r"missing required field `basket`"),
        ({"basket": "abc"}, r"Expected `array`, got `str` - at `\$.basket`"),
        ({"basket": [1]}, r"Expected `str`, got `int` - at `\$.basket\[0\]`"),
        ({"basket": [""]}, r"`str` of length >= 1 - at `\$.basket\[0\]`"),
        ({"basket": ["a", "a" * 129]}, r"`str` of length <= 128 - at `\$.basket\[1\]`"),
        ({"basket": ["a\x00b"]}, "basket ids must have printable characters only"),
        ({"basket": ["\ud800"]}, "basket ids must have printable characters only"),
        ({"basket": [], "user_id": "a\nb"}, "user_id must have printable characters only"),
        ({"basket": ["x"] * (MAX_BASKET + 1)}, r"length <= 500 - at `\$.basket`"),
        ({"basket": [], "k": -1}, r"Expected `float` >= 0.0 - at `\$.k`"),
        ({"basket": [], "k": 1.5}, r"multiple of 1.0 - at `\$.k`"),
        ({"basket": [], "k": math.nan}, r"at `\$.k`"),
        ({"basket": [], "k": math.inf}, r"at `\$.k`"),
        ({"basket": [], "k": True}, r"Expected `float`, got `bool` - at `\$.k`"),
        ({"basket": [], "k": None}, r"Expected `float`, got `null` - at `\$.k`"),
        ({"basket": [], "user_id": 12}, r"Expected `str \| null`, got `int` - at `\$.user_id`"),
        ({"basket": [], "at": 12}, r"Expected `str \| null`, got `int` - at `\$.at`"),
        ({"basket": [], "at": "yesterday"}, "at must be an ISO 8601 time"),
        ({"basket": [], "at": "9999-12-31T23:59:59-23:59"}, "at must be an ISO 8601 time"),
        ({"basket": [], "at": "0001-01-01T00:00:00+23:59"}, "at must be an ISO 8601 time"),
        ({"basket": [], "at": "9999-12-31T23:59:59.999999Z"}, "at must be an ISO 8601 time"),  # is rounded up
        ({"basket": [], "bascet": []}, "unknown field; did you mean 'basket'\\? expected basket, user_id"),
        ({"basket": [], "x" * 99: []}, "unknown field; expected basket, user_id"),
        ({"basket": [], "nonsense": []}, "unknown field; expected basket, user_id"),
        ({"basket": [], "explain": "yes"}, r"Expected `bool`, got `str` - at `\$.explain`"),
        ({"basket": [], "profile": "premium"}, "profile must be one of default$"),
        ({"basket": [], "profile": 7}, r"Expected `str \| null`, got `int` - at `\$.profile`"),
    ],
)
def test_a_broken_request_names_the_field(raw: Any, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says):
        parse(raw)
    instances = {"instances": [{"basket": []}, raw]}
    with pytest.raises(InvalidRequest, match=r" at `\$\.instances\[1\]"):
        parse_instances(instances, now=0.0, default_id="r")


def test_bytes_are_checked_like_the_document_in_them() -> None:
    text = b'{"request_id": "r1", "basket": ["a"], "at": "2017-12-05T18:30:00Z", "k": 7.0}'
    given = read_body(text, RequestBody).to_request(0.0, "x", ["default"])
    assert given == parse(json.loads(text)) == Request(("a",), 1_512_498_600.0, k=7, request_id="r1")
    with pytest.raises(InvalidRequest, match=r"at `\$.instances\[1\].k`$"):
        read_body(b'{"instances": [{"basket": []}, {"basket": [], "k": -1}]}', Instances)
    with pytest.raises(InvalidRequest, match=r"unknown field; expected instances$"):
        read_body(b'{"instances": [], "x": 1}', Instances)
    with pytest.raises(InvalidRequest):  # deep, and not too deep to read
        read_body(b'{"instances": ' + b"[" * 900 + b"]" * 900 + b"}", Instances)


@pytest.mark.parametrize(
    "text",
    [
        *(
            b"",
            b"{",
            b"nonsense",
            b"\xff\xfe",
            b'{"k": NaN}',
            b'{"basket": ["\\ud800"]}',
            b'{"basket": ["\xff"]}',
        ),
        *(b'{"basket": 5, nonsense', b'{"basket": [], "k": 1e400}', b'{"basket": []} x', b"[" * 100_000),
    ],
)
def test_bytes_that_are_not_json_have_an_error_of_their_own(text: bytes) -> None:
    with pytest.raises(NotJson, match=r"^the body is not JSON"):
        read_body(text, RequestBody)
    with pytest.raises(NotJson):
        check_json(text)


def test_an_item_has_only_its_known_terms() -> None:
    plain = {"item_id": "a", "score": 0.5, "source": "popular", "reason": "popular now"}
    assert Recommendation("a", 0.5, "popular", "popular now").to_dict() == plain
    offered = Recommendation("a", 0.5, "popular", "popular now", 0.0, 0.25, "SAVE")
    assert offered.to_dict() == {**plain, "price": 0.0, "promotion": 0.25, "coupon": "SAVE"}


def test_a_response_has_the_fields_of_its_type() -> None:
    item = Recommendation("a", 0.123456789, "popular", "popular now")
    response = Response("r1", (item,), "b1", stage_ms={"total": 1.23456})
    plain = response.to_dict()
    assert list(plain) == [name for name in Response.__struct_fields__ if name != "unknown_items"]
    assert plain["items"][0]["score"] == 0.123457
    assert plain["stage_ms"] == {"total": 1.235}
    with pytest.raises(msgspec.ValidationError, match="unknown field"):
        msgspec.convert({**plain, "other": 1}, Response)
    assert msgspec.convert(plain, Response).to_dict() == plain


# ------------------------------------------------------------------------------------------- headers


def read_headers(limit_s: float = 0.05, **headers: str) -> Call:
    return read_call(
        {name.replace("_", "-"): text for name, text in headers.items()}, "V1", limit_s, arrived=100.0
    )


def test_without_headers_a_call_is_a_checkout_s_with_the_server_s_deadline() -> None:
    call = read_headers()
    assert (call.arrived, call.deadline, call.priority, call.route) == (100.0, 100.05, "checkout", "V1")
    assert call.traceparent is None


def test_a_header_may_only_shorten_the_deadline() -> None:
    assert read_headers(x_deadline_ms="20").deadline == 100.02
    assert read_headers(x_deadline_ms="12.5").deadline == 100.0125
    assert read_headers(x_deadline_ms="9000").deadline == 100.05
    assert read_headers(x_deadline_ms="inf").deadline == 100.05


@pytest.mark.parametrize("text", ["", "soon", "0", "-1", "nan", "1 2"])
def test_an_invalid_deadline_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest, match="x-deadline-ms must be a number of milliseconds above 0"):
        read_headers(x_deadline_ms=text)


def test_the_priority_is_one_of_two() -> None:
    assert read_headers(x_priority="prefetch").priority == "prefetch"
    with pytest.raises(InvalidRequest, match="x-priority must be checkout or prefetch"):
        read_headers(x_priority="urgent")


def test_a_given_id_is_kept_and_generated_ids_are_distinct() -> None:
    assert read_headers(x_request_id="till-4").request_id == "till-4"
    made = [read_headers(x_request_id=bad).request_id for bad in ("", "a\x00b", "x" * 129)]
    assert len({*made, *(read_headers().request_id for _ in range(100))}) == 103
    assert all(one != other for one, other in itertools.pairwise(made))
    assert read_headers(traceparent="00-aa-bb-01").traceparent == "00-aa-bb-01"
