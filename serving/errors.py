"""Every error of the request path. `docs/reference/errors.md` has what each means for the caller."""

from feature_repo.errors import UNREACHABLE, USAGE, RecoError


class RecommendError(RecoError):
    """Base of the errors of a request."""


class InvalidRequest(RecommendError):
    """The request breaks its contract; the message names the field, never the value."""

    exit_code = USAGE


class NotJson(InvalidRequest):
    """The body is no JSON document."""


class FeaturesUnavailable(RecommendError):
    """The online store did not give the user's row in time."""

    exit_code = UNREACHABLE


class FeaturesLate(FeaturesUnavailable):
    """The request's deadline passed before the online store had its full timeout."""


class RowInvalid(FeaturesUnavailable):
    """The online store's value for a user is not a row of Feast's."""


class FactsUnavailable(RecommendError):
    """The fact store could not be read or written."""

    exit_code = UNREACHABLE


class RulesUnread(RecommendError):
    """The rules file is invalid or cannot be read, and no earlier rules are known."""

    exit_code = USAGE


class RankingFailed(RecommendError):
    """The candidates could not be scored, for a known reason."""

    reason = "predict_error"


class RankerUnavailable(RankingFailed):
    """The remote ranker cannot be reached, or answers with an error."""

    reason = "ranker_unavailable"


class RowsRefused(RankerUnavailable):
    """The remote ranker refuses the rows of a call; it may accept those of another request."""


class RankerMismatch(RankingFailed):
    """The remote ranker's scores are those of another bundle."""

    reason = "ranker_mismatch"


class Overloaded(RankingFailed):
    """More requests wait than can be answered in time; prefetches are refused before checkouts."""

    reason = "overloaded"


class UserOverLimit(Overloaded):
    """One shopper sends too many requests; they are refused so that other shoppers do not wait."""

    reason = "user_over_limit"


class ScoresInvalid(RankingFailed):
    """The model's scores for this request's rows are not finite, alone or in a batch with others."""

    reason = "scores_invalid"


class DeadlineNear(RankingFailed):
    """The request has less time left than ranking its candidates takes, by recent measurements."""

    reason = "deadline_near"


class DeadlineExceeded(RankingFailed, TimeoutError):
    """The request's deadline passed before its candidates were scored."""

    reason = "deadline_exceeded"


class BundleInvalid(RecommendError):
    """A bundle on disk differs from its manifest, or cannot answer its golden requests."""


class NoChampion(RecommendError):
    """No bundle was promoted under this home yet, or its pointer cannot be read."""

    exit_code = USAGE
