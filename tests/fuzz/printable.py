"""What Schemathesis makes for the format `printable` of our OpenAPI document: ids."""

from typing import Any

import schemathesis
from hypothesis import strategies as st

UNKNOWN = "x-schemathesis-unknown-property"  # anybody may send any other header


@schemathesis.hook
def filter_headers(context: Any, headers: dict[str, str] | None) -> bool:
    return UNKNOWN not in (headers or {})


@schemathesis.hook
def filter_case(context: Any, case: Any) -> bool:
    return UNKNOWN not in (case.headers or {})


schemathesis.openapi.format(
    "printable", st.text(st.characters(codec="utf-8"), min_size=1, max_size=128).filter(str.isprintable)
)
