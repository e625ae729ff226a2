"""Every error of the request path has the status that the endpoint answers with."""

import pytest

from serving import errors
from serving.errors import RecommendError

STATUS = {
    "InvalidRequest": 400,
    "RequestTooLarge": 413,
    "FeaturesUnavailable": 200,
    "Overloaded": 429,
    "BundleInvalid": 500,
}


def test_each_error_is_known_here() -> None:
    """A new error must say what it means to the caller."""
    assert {kind.__name__ for kind in RecommendError.__subclasses__()} == set(STATUS)


@pytest.mark.parametrize("name", STATUS)
def test_what_the_endpoint_answers_with(name: str) -> None:
    assert getattr(errors, name)("why").status == STATUS[name]
