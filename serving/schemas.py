"""CONTRACT request, recommendation, response: what the checkout sends and what it gets back."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from feature_repo.ids import MAX_ID_LENGTH as MAX_ID_LENGTH
from feature_repo.ids import is_id
from serving.errors import InvalidRequest

MAX_BASKET = 500  # lines; a longer basket is refused
MAX_K = 100  # items in one answer; a larger k is cut to this
DEFAULT_K = 10
DEFAULT_PROFILE = "default"
MAX_INSTANCES = 64  # requests in one V1 body
# The ladder, from the best answer down: all candidates ranked, as many as there was time for, a list that was
# kept, best sellers of the store, of the chain, nothing.
RUNGS = ("full", "fewer", "cached", "segment", "popular", "empty")
NOTHING_LEFT = "nothing_left"  # no fault, but all that could be offered is in the basket, sold out or banned
REASONS = (
    NOTHING_LEFT,
    "features_unavailable",  # the shopper's history could not be read in time
    "features_invalid",  # what is stored of the shopper cannot be read
    "stale_features",  # it may be old
    "deadline_near",  # too little time was left to rank all candidates, or any
    "deadline_exceeded",  # the time was over
    "overloaded",  # too many requests wait
    "user_over_limit",  # this shopper has asked too often
    "ranker_unavailable",
    "ranker_mismatch",  # the ranker has another bundle
    "scores_invalid",  # the ranker gave no numbers
    "preprocess_error",  # a fault of ours, in reading and retrieval; the log has it
    "predict_error",  # likewise, in ranking
    "postprocess_error",  # likewise, in making the list
)
FIELDS = frozenset({"request_id", "user_id", "basket", "store_id", "at", "k", "profile"})


@dataclass(frozen=True, slots=True)
class Request:
    """One question from the checkout; `at` is the time it is asked, seconds since the epoch (UTC)."""

    basket: tuple[str, ...]
    at: float
    user_id: str | None = None
    store_id: str | None = None
    k: int = DEFAULT_K
    request_id: str = ""
    profile: str = DEFAULT_PROFILE  # how candidates are found


@dataclass(frozen=True, slots=True)
class Recommendation:
    """One item of the answer: its purchase probability, the source that found it, and why it is here.

    Price, promotion (discount as a share of the price) and coupon are those of the request's time and
    store, None where nothing is known.
    """

    item_id: str
    score: float
    source: str
    reason: str
    price: float | None = None
    promotion: float | None = None
    coupon: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the item as plain JSON types, without what is not known."""
        item: dict[str, Any] = {
            "item_id": self.item_id,
            "score": round(self.score, 6),
            "source": self.source,
            "reason": self.reason,
        }
        if self.price is not None:
            item["price"] = self.price
        if self.promotion is not None:
            item["promotion"] = self.promotion
        if self.coupon is not None:
            item["coupon"] = self.coupon
        return item


@dataclass(frozen=True, slots=True)
class Response:
    """The answer: items best first, the bundle that gave it, and which of RUNGS it came from.

    `degraded` is true where the answer is less than it should be; `degraded_reason` then is one of REASONS.
    It is NOTHING_LEFT where an empty answer is the right one.
    """

    request_id: str
    items: tuple[Recommendation, ...]
    bundle_id: str
    rung: str = "full"
    degraded: bool = False
    degraded_reason: str | None = None
    stage_ms: dict[str, float] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Return the response as plain JSON types."""
        return {
            "request_id": self.request_id,
            "items": [item.to_dict() for item in self.items],
            "bundle_id": self.bundle_id,
            "degraded": self.degraded,
            "degraded_reason": self.degraded_reason,
            "rung": self.rung,
            "stage_ms": {stage: round(ms, 3) for stage, ms in self.stage_ms.items()},
        }


def parse_request(
    raw: object, *, now: float, default_id: str, profiles: Collection[str] = (DEFAULT_PROFILE,)
) -> Request:
    """Check one decoded JSON request line and return it as a `Request`.

    Args:
        raw: the decoded JSON value.
        now: the time used when `at` is absent, seconds since the epoch.
        default_id: the id used when `request_id` is absent.
        profiles: names that `profile` may have.

    Raises:
        InvalidRequest: naming the field and what was expected, never the value.
    """
    if not isinstance(raw, Mapping):
        raise InvalidRequest("a request is a JSON object")
    if not raw.keys() <= FIELDS:
        unknown = len(raw.keys() - FIELDS)
        raise InvalidRequest(f"{unknown} unknown field(s); a request has {', '.join(sorted(FIELDS))}")
    if "basket" not in raw:
        raise InvalidRequest("basket is missing: a list of item ids, which may be empty")
    basket = raw["basket"]
    if not isinstance(basket, list) or not all(isinstance(item, str) for item in basket):
        raise InvalidRequest("basket must be a list of item ids (strings)")
    if len(basket) > MAX_BASKET:
        raise InvalidRequest(f"basket has {len(basket)} lines, at most {MAX_BASKET} are allowed")
    for item in basket:
        _check_id("basket", item)
    k = raw.get("k", DEFAULT_K)
    if isinstance(k, float) and k.is_integer():  # in JSON 7.0 is whole, and so is what is read as 1e300
        k = int(k)
    if not isinstance(k, int) or isinstance(k, bool):
        raise InvalidRequest("k must be a whole number")
    if k < 0:
        raise InvalidRequest("k must be 0 or more")
    return Request(
        basket=tuple(dict.fromkeys(basket)),
        at=_time(raw.get("at"), now),
        user_id=_optional_id(raw, "user_id"),
        store_id=_optional_id(raw, "store_id"),
        k=min(k, MAX_K),
        request_id=_optional_id(raw, "request_id") or default_id,
        profile=_profile(raw.get("profile"), profiles),
    )


def parse_instances(
    document: object, now: float, default_id: str, profiles: Collection[str] = (DEFAULT_PROFILE,)
) -> list[Request]:
    """Check a decoded V1 body, {"instances": [request, ...]}, and return its requests.

    Args:
        document: the decoded JSON value.
        now: as in `parse_request`.
        default_id: likewise, for the first request; later ones get their number behind it.
        profiles: as in `parse_request`.

    Raises:
        InvalidRequest: naming the request, the field and what was expected, never the value.
    """
    if not isinstance(document, Mapping) or set(document) != {"instances"}:
        raise InvalidRequest(_NOT_INSTANCES)
    raws = document["instances"]
    if not isinstance(raws, list):
        raise InvalidRequest(_NOT_INSTANCES)
    if len(raws) > MAX_INSTANCES:
        raise InvalidRequest(f"instances has {len(raws)} requests, at most {MAX_INSTANCES} are allowed")
    if len(raws) == 1:
        return [parse_request(raws[0], now=now, default_id=default_id, profiles=profiles)]
    requests = []
    for number, raw in enumerate(raws):
        try:
            own_id = f"{default_id}-{number}"[-MAX_ID_LENGTH:] if number else default_id
            requests.append(parse_request(raw, now=now, default_id=own_id, profiles=profiles))
        except InvalidRequest as error:
            raise InvalidRequest(f"instances[{number}]: {error}") from error
    return requests


_NOT_INSTANCES = 'the body must be {"instances": [request, ...]} and nothing else'


def _optional_id(raw: Mapping[str, Any], name: str) -> str | None:
    value = raw.get(name)
    if value is None:
        return None
    if not isinstance(value, str):
        raise InvalidRequest(f"{name} must be a string")
    _check_id(name, value)
    return value


def _profile(value: object, known: Collection[str]) -> str:
    if value is None:
        return DEFAULT_PROFILE
    if not isinstance(value, str) or value not in known:
        raise InvalidRequest(f"profile must be one of {', '.join(known)}")
    return value


def _check_id(name: str, value: str) -> None:
    if not is_id(value):
        raise InvalidRequest(f"{name} ids are 1 to {MAX_ID_LENGTH} printable characters")


def _time(value: object, now: float) -> float:
    if value is None:
        return round(now * 1e6) / 1e6  # what the log can hold, so that a replay asks for the same moment
    if not isinstance(value, str):
        raise InvalidRequest("at must be an ISO 8601 time, for example 2017-12-05T18:30:00Z")
    try:
        parsed = datetime.fromisoformat(value)
    except ValueError as error:
        raise InvalidRequest("at must be an ISO 8601 time, for example 2017-12-05T18:30:00Z") from error
    return (parsed if parsed.tzinfo else parsed.replace(tzinfo=UTC)).timestamp()
