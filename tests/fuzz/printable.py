"""Values that Schemathesis makes for the format `printable` of our OpenAPI document: ids."""

import datetime
from typing import Any

import schemathesis
from hypothesis import strategies as st
from jsonschema import Draft202012Validator, FormatChecker

CHECKED = {"x-deadline-ms", "x-priority"}
UNKNOWN = "x-schemathesis-unknown-property"  # a client may send any other header


@schemathesis.hook
def filter_headers(context: Any, headers: dict[str, str] | None) -> bool:
    return UNKNOWN not in (headers or {})


@schemathesis.hook
def filter_case(context: Any, case: Any) -> bool:
    headers = {name.lower() for name in case.headers or {}}
    if UNKNOWN in headers:
        return False
    meant_to_be_wrong = case.meta is not None and case.meta.generation.mode.is_negative
    return not (meant_to_be_wrong and not headers & CHECKED and has_good_body(case))


def has_good_body(case: Any) -> bool:
    """Return whether a body is valid after all: Schemathesis cannot check a text against our own format."""
    document = case.operation.schema.raw_schema
    body = document["paths"][case.operation.path][case.operation.method].get("requestBody")
    if body is None:
        return False
    schema = {**body["content"]["application/json"]["schema"], "components": document["components"]}
    return Draft202012Validator(schema, format_checker=FORMATS).is_valid(case.body)


FORMATS = FormatChecker(())


@FORMATS.checks("printable")
def _is_printable(value: object) -> bool:
    return not isinstance(value, str) or value.isprintable()


@FORMATS.checks("date-time", raises=ValueError)
def _is_a_time(value: object) -> bool:
    return not isinstance(value, str) or bool(datetime.datetime.fromisoformat(value))


schemathesis.openapi.format(
    "printable", st.text(st.characters(codec="utf-8"), min_size=1, max_size=128).filter(str.isprintable)
)
