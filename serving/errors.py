"""Every error the request path knows, and what each one means to the caller.

RecommendError
 ├─ InvalidRequest        the caller must fix the request: 400, or INVALID_ARGUMENT over gRPC
 ├─ FeaturesUnavailable   answered from defaults, degraded
 └─ BundleInvalid         start-up only: a half-read bundle never serves
"""


class RecommendError(Exception):
    """Base of the errors below."""


class InvalidRequest(RecommendError):
    """The request breaks its contract; the message names the field, never the value."""


class FeaturesUnavailable(RecommendError):
    """The online store did not give the user's row in time."""


class BundleInvalid(RecommendError):
    """A bundle on disk is not what its manifest says, or cannot answer its golden requests."""
