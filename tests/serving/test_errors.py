"""Every error of the request path is in its module's picture and derives from the base error."""

import serving.errors
from serving.errors import RecommendError


def test_each_error_is_in_the_picture() -> None:
    names = {kind.__name__ for kind in RecommendError.__subclasses__() if kind.__module__ == "serving.errors"}
    assert {"InvalidRequest", "FeaturesUnavailable", "FactsUnavailable", "BundleInvalid"} <= names
    for name in names:
        assert f"─ {name} " in (serving.errors.__doc__ or "")
