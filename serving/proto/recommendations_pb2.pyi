import datetime

from google.protobuf import timestamp_pb2 as _timestamp_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Priority(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PRIORITY_UNSPECIFIED: _ClassVar[Priority]
    PRIORITY_CHECKOUT: _ClassVar[Priority]
    PRIORITY_PREFETCH: _ClassVar[Priority]
PRIORITY_UNSPECIFIED: Priority
PRIORITY_CHECKOUT: Priority
PRIORITY_PREFETCH: Priority

class RecommendRequest(_message.Message):
    __slots__ = ("basket", "user_id", "store_id", "at", "k", "request_id", "priority", "profile")
    BASKET_FIELD_NUMBER: _ClassVar[int]
    USER_ID_FIELD_NUMBER: _ClassVar[int]
    STORE_ID_FIELD_NUMBER: _ClassVar[int]
    AT_FIELD_NUMBER: _ClassVar[int]
    K_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    PROFILE_FIELD_NUMBER: _ClassVar[int]
    basket: _containers.RepeatedScalarFieldContainer[str]
    user_id: str
    store_id: str
    at: _timestamp_pb2.Timestamp
    k: int
    request_id: str
    priority: Priority
    profile: str
    def __init__(self, basket: _Optional[_Iterable[str]] = ..., user_id: _Optional[str] = ..., store_id: _Optional[str] = ..., at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., k: _Optional[int] = ..., request_id: _Optional[str] = ..., priority: _Optional[_Union[Priority, str]] = ..., profile: _Optional[str] = ...) -> None: ...

class Recommendation(_message.Message):
    __slots__ = ("item_id", "score", "source", "reason", "price", "promotion", "coupon")
    ITEM_ID_FIELD_NUMBER: _ClassVar[int]
    SCORE_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    PRICE_FIELD_NUMBER: _ClassVar[int]
    PROMOTION_FIELD_NUMBER: _ClassVar[int]
    COUPON_FIELD_NUMBER: _ClassVar[int]
    item_id: str
    score: float
    source: str
    reason: str
    price: float
    promotion: float
    coupon: str
    def __init__(self, item_id: _Optional[str] = ..., score: _Optional[float] = ..., source: _Optional[str] = ..., reason: _Optional[str] = ..., price: _Optional[float] = ..., promotion: _Optional[float] = ..., coupon: _Optional[str] = ...) -> None: ...

class RecommendResponse(_message.Message):
    __slots__ = ("request_id", "items", "bundle_id", "rung", "degraded", "degraded_reason", "stage_ms")
    class StageMsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    BUNDLE_ID_FIELD_NUMBER: _ClassVar[int]
    RUNG_FIELD_NUMBER: _ClassVar[int]
    DEGRADED_FIELD_NUMBER: _ClassVar[int]
    DEGRADED_REASON_FIELD_NUMBER: _ClassVar[int]
    STAGE_MS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    items: _containers.RepeatedCompositeFieldContainer[Recommendation]
    bundle_id: str
    rung: str
    degraded: bool
    degraded_reason: str
    stage_ms: _containers.ScalarMap[str, float]
    def __init__(self, request_id: _Optional[str] = ..., items: _Optional[_Iterable[_Union[Recommendation, _Mapping]]] = ..., bundle_id: _Optional[str] = ..., rung: _Optional[str] = ..., degraded: _Optional[bool] = ..., degraded_reason: _Optional[str] = ..., stage_ms: _Optional[_Mapping[str, float]] = ...) -> None: ...
