"""The document against the endpoint's own checks: both allow and refuse the same."""

import inspect
import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.answer import recommender
from serving.api.openapi import openapi
from serving.checkout import checkout
from serving.errors import InvalidRequest, RankingFailed, UserOverLimit
from serving.schemas import MAX_BASKET, NOTHING_LEFT, REASONS, Recommendation, Response, parse_request
from serving.settings import Settings
from serving.stores import freshness

DOCUMENT = openapi(Settings())
SCHEMAS = DOCUMENT["components"]["schemas"]


def validator(schema: str) -> jsonschema.Draft202012Validator:
    found = {"$ref": f"#/components/schemas/{schema}", "components": DOCUMENT["components"]}
    return jsonschema.Draft202012Validator(found)


def dictionaries(node: object) -> Iterator[dict[str, Any]]:
    if isinstance(node, dict):
        yield node
    for child in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
        yield from dictionaries(child)


def test_the_document_is_json_with_valid_references() -> None:
    assert json.loads(json.dumps(DOCUMENT, allow_nan=False)) == DOCUMENT
    named = {node["$ref"] for node in dictionaries(DOCUMENT) if "$ref" in node}
    assert {name.rpartition("/")[2] for name in named} == set(SCHEMAS)
    for name, schema in SCHEMAS.items():
        jsonschema.Draft202012Validator.check_schema(schema)
        assert validator(name)


def test_each_example_matches_its_schema() -> None:
    seen = 0
    for node in dictionaries(DOCUMENT["paths"]):
        if "example" in node and "$ref" in node["schema"]:
            validator(node["schema"]["$ref"].rpartition("/")[2]).validate(node["example"])
            seen += 1
    assert seen == 4


IDS = st.one_of(st.text(max_size=4), st.sampled_from(["a" * 128, "a" * 129, "ü⚡", ""]), st.integers())
REQUESTS = st.fixed_dictionaries(
    {},
    optional={
        "basket": st.one_of(
            st.lists(IDS, max_size=4),
            st.sampled_from([["x"] * MAX_BASKET, ["x"] * (MAX_BASKET + 1), "abc", None]),
        ),
        "k": st.one_of(st.integers(-2, 2), st.sampled_from([10**6, True, 2.5, "7", None])),
        "user_id": st.one_of(IDS, st.none()),
        "store_id": st.one_of(IDS, st.none()),
        "at": st.sampled_from(["2017-12-05T18:30:00Z", None, 5]),
        "request_id": st.one_of(IDS, st.none()),
        "explain": st.sampled_from([True, False, None, 1]),
        "other": st.just(1),
    },
)


@settings(deadline=None)
@given(st.one_of(REQUESTS, st.lists(st.integers(), max_size=1), st.none()))
def test_the_parser_accepts_and_refuses_the_same_bodies_as_the_document(raw: Any) -> None:
    unprintable = [
        text
        for value in (raw.values() if isinstance(raw, dict) else ())
        for text in (value if isinstance(value, list) else [value])
        if isinstance(text, str) and not text.isprintable()
    ]  # the one rule that JSON Schema cannot express
    try:
        parse_request(raw, now=0.0, default_id="made")
        accepted = True
    except InvalidRequest:
        accepted = False
    assert accepted == (validator("RequestBody").is_valid(raw) and not unprintable)


AT = "2017-12-05T18:30:00Z"
ASKED: list[tuple[object, int]] = [
    ({"basket": ["1000005"], "user_id": "u1", "at": AT, "k": 100}, 200),
    ({"basket": [], "k": 0}, 200),
    ({"basket": ["nothing"], "store_id": "store-1"}, 200),
    ({"basket": ["1000010", "nothing"], "explain": True}, 200),
    ({"basket": "x"}, 422),
    ({}, 422),
    ([], 422),
    ({"basket": ["7" * 300_000]}, 413),
]


@pytest.mark.slow
def test_real_answers_and_refusals_match_the_document(client: httpx.Client) -> None:
    document = client.get("/openapi.json").json()
    assert document["components"]["schemas"]["RequestBody"]["properties"]["profile"]["enum"] == [
        "default",
        "premium",
        None,
    ]
    assert document["paths"].keys() == DOCUMENT["paths"].keys()
    for path, operations in document["paths"].items():
        operation = operations.get("post")
        for body, status in ASKED if operation else ():
            sent = {"instances": [body]} if "predict" in path else body
            answer = client.post(path, json=sent)
            assert answer.status_code == status, answer.text
            content = operation["responses"][str(status)]["content"]
            schema = content[answer.headers["content-type"]]["schema"]["$ref"]
            validator(schema.rpartition("/")[2]).validate(answer.json())
    ready = document["paths"]["/healthz"]["get"]["responses"]["200"]["content"]["application/json"]
    assert client.get("/healthz").json() == ready["example"]


def test_the_document_names_every_rung_and_reason() -> None:
    response = SCHEMAS["Response"]["properties"]
    assert response["rung"]["enum"] == ["full", "fewer", "cached", "segment", "popular", "empty"]
    reason, none = response["degraded_reason"]["anyOf"]
    assert (set(reason["enum"]), none) == (set(REASONS), {"type": "null"})
    kinds: list[type[RankingFailed]] = [RankingFailed, *RankingFailed.__subclasses__(), UserOverLimit]
    told = {kind.reason for kind in kinds} | {NOTHING_LEFT}
    for module in (checkout, recommender, freshness):
        told |= set(re.findall(r'"([a-z]+(?:_[a-z]+)+)"', inspect.getsource(module))) & set(REASONS)
    assert told == set(REASONS)


def test_an_answer_has_all_its_fields_and_no_unknown_term_is_null() -> None:
    item = {"item_id": "a", "score": 0.5, "source": "popular", "reason": "popular now"}
    response = Response("r1", (Recommendation(**item),), "b1").to_dict()  # type: ignore[arg-type]
    assert validator("Response").is_valid(response)
    for name in response:
        assert not validator("Response").is_valid({k: v for k, v in response.items() if k != name}), name
    for name in ("price", "promotion", "coupon"):
        assert not validator("Recommendation").is_valid({**item, name: None}), name
    assert not validator("Recommendation").is_valid({**item, "other": 1})
