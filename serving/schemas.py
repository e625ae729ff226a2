"""CONTRACT request, its headers, recommendation, response: messages between the checkout and the endpoint.

The types check each request and describe both directions in OpenAPI. Every protocol goes through
`RequestBody`: our route and V1 decode it from bytes; V2, gRPC and files convert decoded values. An error
message names the invalid place and the expected type, never the value.
"""

from __future__ import annotations

import itertools
import math
import os
import re
import time
from collections.abc import Collection, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from feature_repo.ids import MAX_ID_LENGTH, did_you_mean, is_id
from serving.errors import InvalidRequest, NotJson

MAX_BASKET = 500  # lines; a longer basket is refused
MAX_K = 100  # items in one answer; a larger k is cut to this
DEFAULT_K = 10
DEFAULT_PROFILE = "default"
MAX_INSTANCES = 64  # requests in one V1 body
# The ladder, best answer first: all candidates ranked, as many as time allowed, a cached list, best sellers
# of the store, best sellers of the chain, nothing.
RUNGS = ("full", "fewer", "cached", "segment", "popular", "empty")
REASON_CODES = ("bought_before", "bought_together", "fits", "popular_in_store", "popular", "pinned")
NOTHING_LEFT = "nothing_left"  # no fault, but every candidate is in the basket, sold out or banned
REASONS = (
    NOTHING_LEFT,
    "features_unavailable",  # the shopper's history could not be read in time
    "features_invalid",  # the stored row of the shopper is invalid
    "stale_features",  # the stored row may be old
    "deadline_near",  # too little time was left to rank all candidates, or any
    "deadline_exceeded",  # the deadline passed during ranking
    "overloaded",  # too many requests wait
    "user_over_limit",  # this shopper has sent too many requests
    "ranker_unavailable",
    "ranker_mismatch",  # the ranker has another bundle
    "scores_invalid",  # the scores of the ranker are not finite
    "preprocess_error",  # our own fault, in reading or retrieval; see the log
    "predict_error",  # our own fault, in ranking
    "postprocess_error",  # our own fault, in making the list
)

Id = Annotated[
    str,
    Meta(
        min_length=1,
        max_length=MAX_ID_LENGTH,
        description="Printable characters, as in the data",
        # No line ends and no control characters: `str.isprintable`, which JSON Schema cannot express.
        extra_json_schema={"format": "printable"},
    ),
]
_IDS = ("user_id", "store_id", "request_id")
# In JSON, 7.0 and 1e300 are whole numbers. Both decode as a float.
_Whole = Annotated[float, Meta(ge=0, multiple_of=1)]
_NOT_JSON = "the body is not JSON (UTF-8, finite numbers, moderate nesting)"
# msgspec appends the name. We never repeat it, but name the known field that it resembles.
_UNKNOWN = "Object contains unknown field"
_FIELD = re.compile(rf"{_UNKNOWN} `(.{{1,64}}?)`")
_INSTANCE = re.compile(r" - at `\$\.instances\[\d{1,2}\]`$")
Body = TypeVar("Body", bound=msgspec.Struct)
PRIORITIES = ("checkout", "prefetch")  # the first holds without the header
HEADERS = ("x-request-id", "x-deadline-ms", "x-priority", "traceparent")
# The first half of an id is this process's own, the second counts; uuid4 costs six times as much.
_PROCESS = os.urandom(8).hex()
_NUMBERS = itertools.count()


def _be_another_process() -> None:
    global _PROCESS
    _PROCESS = os.urandom(8).hex()


os.register_at_fork(after_in_child=_be_another_process)


@dataclass(frozen=True, slots=True)
class Request:
    """One request from the checkout; `at` is its time, seconds since the epoch (UTC)."""

    basket: tuple[str, ...]
    at: float
    user_id: str | None = None
    store_id: str | None = None
    k: int = DEFAULT_K
    request_id: str = ""
    profile: str = DEFAULT_PROFILE  # how candidates are found
    explain: bool = False


class RequestBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """One request from the checkout, as sent."""

    basket: Annotated[
        list[Id],
        Meta(max_length=MAX_BASKET, description="Items of the basket, oldest first; may be empty"),
    ]
    user_id: Annotated[Id | None, Meta(description="Absent: an unknown shopper")] = None
    store_id: Id | None = None
    at: Annotated[
        Annotated[str, Meta(extra_json_schema={"format": "date-time"})] | None,
        Meta(description="ISO 8601, UTC unless it names an offset; absent: now"),
    ] = None
    k: Annotated[_Whole, Meta(description=f"Items wanted; more than {MAX_K} is {MAX_K}")] = DEFAULT_K
    profile: Annotated[str | None, Meta(description="How candidates are found; absent: default")] = None
    request_id: Annotated[Id | None, Meta(description="Absent: the server makes one")] = None
    explain: Annotated[
        bool, Meta(description="Add each item's name and reason code, and the number of unknown items")
    ] = False

    def __post_init__(self) -> None:
        if not "".join(self.basket).isprintable():
            raise ValueError("basket ids must have printable characters only")
        for name in _IDS:
            value = getattr(self, name)
            if value is not None and not value.isprintable():
                raise ValueError(f"{name} must have printable characters only")

    def to_request(self, now: float, default_id: str, profiles: Collection[str]) -> Request:
        """Return the request, with defaults for absent fields.

        Args:
            now: the time used when `at` is absent, seconds since the epoch.
            default_id: the id used when `request_id` is absent.
            profiles: names that `profile` may have.

        Raises:
            InvalidRequest: the message names the field and the expected value, never the sent one.
        """
        profile = DEFAULT_PROFILE if self.profile is None else self.profile
        if profile not in profiles:
            raise InvalidRequest(f"profile must be one of {', '.join(profiles)}")
        return Request(
            basket=tuple(dict.fromkeys(self.basket)),
            # Rounded to the log's precision, so that a replay uses the same time.
            at=round(now * 1e6) / 1e6 if self.at is None else _timestamp(self.at),
            user_id=self.user_id,
            store_id=self.store_id,
            k=int(min(self.k, MAX_K)),
            request_id=self.request_id or default_id,
            profile=profile,
            explain=self.explain,
        )


class Instances(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """The body of KServe's V1 protocol: several requests."""

    instances: Annotated[list[RequestBody], Meta(max_length=MAX_INSTANCES)]

    def to_requests(self, now: float, default_id: str, profiles: Collection[str]) -> list[Request]:
        """Return the requests; each after the first has its number appended to the default id.

        Raises:
            InvalidRequest: as `RequestBody.to_request`, with the number of the request.
        """
        requests = []
        for number, body in enumerate(self.instances):
            numbered_id = f"{default_id}-{number}"[-MAX_ID_LENGTH:] if number else default_id
            try:
                requests.append(body.to_request(now, numbered_id, profiles))
            except InvalidRequest as error:
                raise InvalidRequest(f"{error} - at `$.instances[{number}]`") from error
        return requests


class Recommendation(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, gc=False):
    """One recommended item; unknown terms are absent."""

    item_id: Id
    score: Annotated[float, Meta(ge=0, le=1, description="Probability of a purchase")]
    source: Annotated[str, Meta(description="The candidate source")]
    reason: Annotated[str, Meta(description="Why the item is recommended, for people")]
    price: Annotated[
        Annotated[float, Meta(ge=0)] | None, Meta(description="At the request's time and store")
    ] = None
    promotion: Annotated[float | None, Meta(description="Discount as a share of the price")] = None
    coupon: str | None = None
    name: Annotated[str | None, Meta(description="With `explain`: what the item is; may be empty")] = None
    reason_code: Annotated[
        Annotated[str, Meta(extra_json_schema={"enum": list(REASON_CODES)})] | None,
        Meta(description="With `explain`: the reason, for programs"),
    ] = None

    def to_dict(self) -> dict[str, Any]:
        """Return the item as plain JSON types, without unknown terms."""
        return _rounded(msgspec.to_builtins(self))


class Response(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The answer: items, best first, and how they were made."""

    request_id: Id
    items: Annotated[tuple[Recommendation, ...], Meta(max_length=MAX_K)]
    bundle_id: Annotated[str, Meta(description="The released model that answered")]
    rung: Annotated[
        str,
        Meta(
            description="Of the ladder: all candidates ranked, fewer of them, a cached list, "
            "best sellers of the store, of the chain, nothing",
            extra_json_schema={"enum": list(RUNGS)},
        ),
    ] = "full"
    degraded: Annotated[bool, Meta(description="Something was missing or late")] = False
    degraded_reason: Annotated[
        Annotated[str, Meta(extra_json_schema={"enum": list(REASONS)})] | None,
        Meta(description=f"Why the answer is degraded; {NOTHING_LEFT}: it is empty, and not degraded"),
    ] = None
    stage_ms: Annotated[
        dict[str, Annotated[float, Meta(ge=0)]], Meta(description="Milliseconds by stage")
    ] = msgspec.field(default_factory=dict)
    unknown_items: Annotated[
        Annotated[int, Meta(ge=0)] | None,
        Meta(description="With `explain`: how many items of the basket the bundle does not know"),
    ] = None

    def to_dict(self) -> dict[str, Any]:
        """Return the response as plain JSON types; without `explain`, no number of unknown items."""
        plain: dict[str, Any] = msgspec.to_builtins(self)
        if self.unknown_items is None:
            del plain["unknown_items"]
        plain["items"] = [_rounded(item) for item in plain["items"]]
        plain["stage_ms"] = {stage: round(ms, 3) for stage, ms in plain["stage_ms"].items()}
        return plain


class Predictions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The answer of KServe's V1 protocol: one response per request."""

    predictions: Annotated[list[Response], Meta(max_length=MAX_INSTANCES)]


def _rounded(item: dict[str, Any]) -> dict[str, Any]:
    item["score"] = round(item["score"], 6)
    return item


_DECODERS = {kind: msgspec.json.Decoder(kind).decode for kind in (RequestBody, Instances)}


def read_body(body: bytes, kind: type[Body]) -> Body:
    """Decode a `RequestBody` or `Instances` from bytes and check it.

    Raises:
        NotJson: the bytes are no JSON document.
        InvalidRequest: the message names the place and the expected type, never the value.
    """
    try:
        return _DECODERS[kind](body)  # type: ignore[index, return-value]
    except msgspec.ValidationError as error:
        check_json(body)  # the decoder stops at the first wrong type; the rest may not be JSON
        raise _refusal(error, kind) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise NotJson(_NOT_JSON) from None


def check_json(body: bytes) -> None:
    """Check that bytes are one JSON document.

    Raises:
        NotJson: they are not.
    """
    try:
        msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise NotJson(_NOT_JSON) from None


def parse_request(
    document: object, *, now: float, default_id: str, profiles: Collection[str] = (DEFAULT_PROFILE,)
) -> Request:
    """Check a decoded JSON object and return its request; arguments as in `RequestBody.to_request`.

    Raises:
        InvalidRequest: the message names the place and the expected value, never the sent one.
    """
    return _convert(document, RequestBody).to_request(now, default_id, profiles)


def parse_instances(
    document: object, *, now: float, default_id: str, profiles: Collection[str] = (DEFAULT_PROFILE,)
) -> list[Request]:
    """Check a decoded V1 body and return its requests; arguments as in `RequestBody.to_request`.

    Raises:
        InvalidRequest: as `parse_request`, with the number of the request.
    """
    return _convert(document, Instances).to_requests(now, default_id, profiles)


def _convert(document: object, kind: type[Body]) -> Body:
    try:
        return msgspec.convert(document, kind)
    except msgspec.ValidationError as error:
        raise _refusal(error, kind) from None


def _refusal(error: msgspec.ValidationError, kind: type[msgspec.Struct]) -> InvalidRequest:
    message = str(error)
    if message.startswith(_UNKNOWN):
        place = _INSTANCE.search(message)
        fields = (RequestBody if place else kind).__struct_fields__
        hint = did_you_mean(found[1], fields) if (found := _FIELD.match(message)) else ""
        expected = f"expected {', '.join(fields)}{place[0] if place else ''}"
        message = f"{_UNKNOWN}; {hint} {expected}" if hint else f"{_UNKNOWN}; {expected}"
    return InvalidRequest(message)


def _timestamp(text: str) -> float:
    try:
        moment = datetime.fromisoformat(text)
        seconds = (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
        datetime.fromtimestamp(seconds, UTC)  # as the log is read: no year 0, no year 10000
    except (ValueError, OverflowError):
        raise InvalidRequest(
            "at must be an ISO 8601 time of the years 1 to 9999, for example 2017-12-05T18:30:00Z"
        ) from None
    return seconds


# ------------------------------------------------------------------------------------------- headers


# Of the request that this task answers: lines of the log carry it.
TRACEPARENT: ContextVar[str | None] = ContextVar("traceparent", default=None)
# When it arrived, of perf_counter: KServe's routes pass headers alone.
ARRIVED_AT: ContextVar[float | None] = ContextVar("arrived_at", default=None)


@dataclass(frozen=True, slots=True)
class Call:
    """The part of a request that is not its body.

    `arrived` (when its last byte was read) and `deadline` (when the client stops waiting) are
    times of perf_counter.
    """

    arrived: float
    deadline: float
    request_id: str  # for a request without an id of its own
    route: str = ""  # path or protocol, for the log and traces
    priority: str = PRIORITIES[0]
    traceparent: str | None = None  # of W3C Trace Context, unchecked


def read_call(headers: Mapping[str, str], route: str, limit_s: float, arrived: float | None = None) -> Call:
    """Return the call that these headers describe.

    Args:
        headers: names in lower case; all but HEADERS are ignored.
        route: the path or the protocol.
        limit_s: the server's own deadline; a header may shorten it.
        arrived: perf_counter; None: ARRIVED_AT, or now.

    Raises:
        InvalidRequest: naming the header and the expected value, never the given one.
    """
    if arrived is None and (arrived := ARRIVED_AT.get()) is None:
        arrived = time.perf_counter()
    request_id, traceparent = headers.get("x-request-id"), headers.get("traceparent")
    TRACEPARENT.set(traceparent)
    return Call(
        arrived,
        arrived + min(limit_s, _limit_s(headers.get("x-deadline-ms"))),
        request_id if request_id and is_id(request_id) else f"{_PROCESS}{next(_NUMBERS):012x}",
        route,
        _priority(headers.get("x-priority")),
        traceparent,
    )


def _limit_s(text: str | None) -> float:
    if text is None:
        return math.inf
    try:
        limit_ms = float(text)
    except ValueError:
        limit_ms = math.nan
    if not limit_ms > 0:  # also refuses nan
        raise InvalidRequest("x-deadline-ms must be a number of milliseconds above 0")
    return limit_ms / 1e3


def _priority(text: str | None) -> str:
    if text is None:
        return PRIORITIES[0]
    if text not in PRIORITIES:
        raise InvalidRequest(f"x-priority must be {' or '.join(PRIORITIES)}")
    return text
