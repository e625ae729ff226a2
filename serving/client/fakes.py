"""Stand-ins for the clients in the tests of the code that calls them."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self, Unpack

from .answers import DEFAULT_K, MAX_K, NotAnswered, Recommendations, RecommendedItem
from .client import BestSellers, RequestOptions, check_call


class FakeClient:
    """Answers with the given items, or fails with the given reason.

    `calls` holds the arguments of each call, in order.
    """

    def __init__(
        self, items: Sequence[str] = (), failure: str | None = None, *, strict: bool = False
    ) -> None:
        """Set the answer; with a failure, the items are the best sellers."""
        self.calls: list[dict[str, Any]] = []
        self._items, self._failure = items, failure
        self._fallback = BestSellers(items, strict)

    def recommend(self, basket: Sequence[str], **options: Unpack[RequestOptions]) -> Recommendations:
        """Answer as `Client` would; a call that it refuses is refused here, too."""
        check_call(basket, options)
        self.calls.append({"basket": list(basket), **options})
        if self._failure is not None:
            return self._fallback.answer(NotAnswered(self._failure, "set by the test"), basket, options)
        items = [
            RecommendedItem(item, 0.5, "fake", "set by the test")
            for item in self._items
            if item not in basket
        ]
        k = min(options.get("k", DEFAULT_K), MAX_K)
        return Recommendations(options.get("request_id") or "fake", tuple(items[:k]), "fake")

    def close(self) -> None:
        """Do nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass


class AsyncFakeClient:
    """The same for code that calls an `AsyncClient`."""

    def __init__(
        self, items: Sequence[str] = (), failure: str | None = None, *, strict: bool = False
    ) -> None:
        """Take the arguments of `FakeClient`."""
        self._fake = FakeClient(items, failure, strict=strict)
        self.calls = self._fake.calls

    async def recommend(self, basket: Sequence[str], **options: Unpack[RequestOptions]) -> Recommendations:
        """Answer as `AsyncClient` would."""
        return self._fake.recommend(basket, **options)

    async def close(self) -> None:
        """Do nothing."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass
