"""Every error the request path knows, and what each one means to the caller.

RecommendError
 ├─ InvalidRequest        the caller must fix the request: 400, or INVALID_ARGUMENT over gRPC
 ├─ FeaturesUnavailable   answered from defaults, degraded
 │   └─ RowInvalid        the same, but only this user's row is at fault, not the store
 ├─ FactsUnavailable      answered with the facts last read
 ├─ Overloaded            too many wait for the model: this one is answered without it
 ├─ DeadlineExceeded      a TimeoutError: too late to ask the model, answered without it
 ├─ ScoresInvalid         the model's scores of this request are no numbers: answered without them
 └─ BundleInvalid         start-up only: a half-read bundle never serves
"""


class RecommendError(Exception):
    """Base of the errors below."""


class InvalidRequest(RecommendError):
    """The request breaks its contract; the message names the field, never the value."""


class FeaturesUnavailable(RecommendError):
    """The online store did not give the user's row in time."""


class RowInvalid(FeaturesUnavailable):
    """What the online store holds of a user is not a row of Feast's."""


class FactsUnavailable(RecommendError):
    """The store of facts could not be read or written."""


class Overloaded(RecommendError):
    """More requests wait for the model than may; prefetches are refused before checkouts."""


class DeadlineExceeded(RecommendError, TimeoutError):
    """The request's deadline passed before the model was asked; its rows were not run."""


class ScoresInvalid(RecommendError):
    """The model gave scores that are not finite for this request's rows, whatever it was joined with."""


class BundleInvalid(RecommendError):
    """A bundle on disk is not what its manifest says, or cannot answer its golden requests."""
