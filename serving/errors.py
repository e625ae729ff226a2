"""Every error the request path knows, and what each one means to the caller.

RecommendError
 ├─ InvalidRequest        the caller must fix the request: 422, or INVALID_ARGUMENT over gRPC
 │   └─ NotJson           the body cannot be decoded: 400
 ├─ FeaturesUnavailable   answered from defaults, degraded
 │   ├─ FeaturesLate      the same, but the request had too little time for the store to be at fault
 │   └─ RowInvalid        the same, but only this user's row is at fault, not the store
 ├─ FactsUnavailable      answered with the facts last read
 ├─ RankingFailed         answered from a lower rung; `reason` is told as degraded_reason
 │   ├─ RankerUnavailable     the remote ranker is not there or refuses
 │   │   └─ RowsRefused           it is well, but does not take the rows of this call
 │   ├─ RankerMismatch        the remote ranker has another bundle
 │   ├─ Overloaded            too many wait for the model, or for their turn; a prefetch gets 429
 │   │   └─ UserOverLimit         the same, because of this shopper's own requests
 │   ├─ ScoresInvalid         the scores of this request are no numbers
 │   ├─ DeadlineNear          too little time is left to begin
 │   └─ DeadlineExceeded      a TimeoutError: the scores did not come in time
 ├─ ClientGone            nobody waits for the answer: none is made
 ├─ BundleInvalid         a half-read bundle never serves: no start, or the one before goes on answering
 └─ NoChampion            no start, or the bundle before goes on answering: no pointer names a champion
"""

from feature_repo.errors import UNREACHABLE, USAGE, RecoError


class RecommendError(RecoError):
    """Base of the errors below."""


class InvalidRequest(RecommendError):
    """The request breaks its contract; the message names the field, never the value."""

    exit_code = USAGE


class NotJson(InvalidRequest):
    """The body is no JSON document."""


class FeaturesUnavailable(RecommendError):
    """The online store did not give the user's row in time."""

    exit_code = UNREACHABLE


class FeaturesLate(FeaturesUnavailable):
    """The request's own time was over before the store had the time that it may take."""


class RowInvalid(FeaturesUnavailable):
    """What the online store holds of a user is not a row of Feast's."""


class FactsUnavailable(RecommendError):
    """The store of facts could not be read or written."""

    exit_code = UNREACHABLE


class RankingFailed(RecommendError):
    """The candidates could not be scored, for a known reason."""

    reason = "predict_error"


class RankerUnavailable(RankingFailed):
    """The remote ranker cannot be reached, or answers with an error."""

    reason = "ranker_unavailable"


class RowsRefused(RankerUnavailable):
    """The remote ranker does not take the rows of a call; it may take those of another request."""


class RankerMismatch(RankingFailed):
    """The remote ranker's scores are those of another bundle."""

    reason = "ranker_mismatch"


class Overloaded(RankingFailed):
    """More requests wait than can be answered in time; prefetches are refused before checkouts."""

    reason = "overloaded"


class UserOverLimit(Overloaded):
    """One shopper asks more often than any does: others shall not wait for that."""

    reason = "user_over_limit"


class ScoresInvalid(RankingFailed):
    """The model gave scores that are not finite for this request's rows, whatever it was joined with."""

    reason = "scores_invalid"


class DeadlineNear(RankingFailed):
    """What is left of the request's time is less than what the candidates would take, as learnt."""

    reason = "deadline_near"


class DeadlineExceeded(RankingFailed, TimeoutError):
    """The time of the request was over before its candidates were scored."""

    reason = "deadline_exceeded"


class ClientGone(RecommendError):
    """The client hung up before its candidates were scored."""


class BundleInvalid(RecommendError):
    """A bundle on disk is not what its manifest says, or cannot answer its golden requests."""


class NoChampion(RecommendError):
    """Nothing was promoted under this home yet, or its pointer cannot be read."""

    exit_code = USAGE
