"""The one shape of every refusal."""

import json
from http import HTTPStatus

import pytest

from serving.api.problems import MAX_DETAIL_LENGTH, problem


def test_a_problem_has_the_fields_of_rfc_9457_and_of_kserve_clients() -> None:
    assert problem(413, "the body is longer than 9 bytes") == {
        "type": "about:blank",
        "title": HTTPStatus.REQUEST_ENTITY_TOO_LARGE.phrase,
        "status": 413,
        "detail": "the body is longer than 9 bytes",
        "error": "the body is longer than 9 bytes",
    }


@pytest.mark.parametrize("status", [400, 404, 405, 408, 413, 422, 429, 431, 500, 503])
def test_a_problem_is_short(status: int) -> None:
    assert len(json.dumps(problem(status, "x" * 10_000))) < 2_048
    assert len(problem(status, "x" * 10_000)["detail"]) == MAX_DETAIL_LENGTH
