"""Every error the request path knows, and what each one means to the caller.

RecommendError
 ├─ InvalidRequest        400/422  the caller must fix the request
 ├─ RequestTooLarge       413      the body is over the limit
 ├─ FeaturesUnavailable   200      answered from defaults, degraded
 ├─ Overloaded            429      try again later
 └─ BundleInvalid         start-up only: a half-read bundle never serves
"""


class RecommendError(Exception):
    """Base of the errors below; `status` is the HTTP status the endpoint answers with."""

    status = 500


class InvalidRequest(RecommendError):
    """The request breaks its contract; the message names the field, never the value."""

    status = 400


class RequestTooLarge(RecommendError):
    """The body is longer than the endpoint reads."""

    status = 413


class FeaturesUnavailable(RecommendError):
    """The online store did not give the user's row in time."""

    status = 200


class Overloaded(RecommendError):
    """More requests wait than the endpoint can answer before their deadline."""

    status = 429


class BundleInvalid(RecommendError):
    """A bundle on disk is not what its manifest says, or cannot answer its golden requests."""
