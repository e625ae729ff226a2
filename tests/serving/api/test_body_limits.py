import asyncio
from collections.abc import Iterable
from typing import Any

import orjson
import pytest

from serving.api.body_limits import Limits
from serving.api.problems import problem
from serving.errors import Overloaded
from serving.settings import Settings

SETTINGS = Settings(body_limit_bytes=1_024, body_timeout_ms=50.0)


async def echo(scope: Any, receive: Any, send: Any) -> None:
    """Answers with what came through: the headers and the body."""
    body = (await receive())["body"] if scope["method"] != "GET" else b""
    headers = {name.decode(): value.decode() for name, value in scope["headers"]}
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send(
        {"type": "http.response.body", "body": orjson.dumps({"headers": headers, "body": body.decode()})}
    )


def ask(
    chunks: Iterable[bytes], *, headers: dict[str, str] | None = None, method: str = "POST", ends: bool = True
) -> tuple[int, dict[str, Any]]:
    """Send the chunks; `ends=False` leaves the body open for ever. Status 0 means no answer was given."""
    waiting = list(chunks)
    sent: list[Any] = []

    async def receive() -> dict[str, Any]:
        if waiting:
            chunk = waiting.pop(0)
            return {"type": "http.request", "body": chunk, "more_body": bool(waiting) or not ends}
        await asyncio.sleep(60)
        raise AssertionError

    async def send(message: Any) -> None:
        sent.append(message)

    raw = [(name.lower().encode(), value.encode()) for name, value in (headers or {}).items()]
    scope = {"type": "http", "method": method, "path": "/", "headers": raw}
    asyncio.run(Limits(echo, SETTINGS)(scope, receive, send))
    if not sent:
        return 0, {}
    return sent[0]["status"], orjson.loads(sent[1]["body"])


def test_a_good_body_goes_through_whole_and_as_json() -> None:
    status, answer = ask(
        [b'{"a"', b": 1}"], headers={"Content-Type": "text/plain", "CE-Id": "7", "X-Request-Id": "r"}
    )
    assert status == 200
    assert answer == {
        "body": '{"a": 1}',
        "headers": {"x-request-id": "r", "content-type": "application/json"},
    }


def test_a_prefetch_that_there_is_no_time_for_is_a_429() -> None:
    async def refuses(scope: Any, document: object) -> bytes:
        raise Overloaded("overloaded: ask later")

    sent: list[Any] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"{}", "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/own", "headers": []}
    asyncio.run(Limits(echo, SETTINGS, {"/own": refuses})(scope, receive, send))
    assert sent[0]["status"] == 429
    assert orjson.loads(sent[1]["body"]) == problem(429, "overloaded: ask later")
    assert (b"content-type", b"application/problem+json") in sent[0]["headers"]


def test_a_get_goes_through_untouched() -> None:
    assert ask([], method="GET")[0] == 200


@pytest.mark.parametrize("announced", [True, False], ids=["announced", "chunked"])
def test_a_long_body_is_refused(announced: bool) -> None:
    chunks = [b" " * 600, b" " * 600]
    status, answer = ask(chunks, headers={"content-length": "1200"} if announced else {}, ends=False)
    assert status == 413
    assert answer == problem(413, "the body is longer than 1024 bytes")


def test_a_body_that_does_not_end_is_refused() -> None:
    assert ask([b"{"], ends=False)[0] == 408


def test_a_client_that_goes_away_gets_no_answer() -> None:
    sent: list[Any] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(
        Limits(echo, SETTINGS)({"type": "http", "method": "POST", "path": "/", "headers": []}, receive, send)
    )
    assert sent == []


@pytest.mark.parametrize(
    "body",
    [
        b"{",
        b'{"k": NaN}',
        b'{"k": Infinity}',
        b'{"k": 1e400}',
        b'"\\ud800"',
        b"\xff\xfe",
        b"[" * 1_000 + b"1",
    ],
    ids=["cut", "nan", "infinity", "1e400", "surrogate", "not utf-8", "deep"],
)
def test_what_is_not_json_is_refused(body: bytes) -> None:
    status, answer = ask([body])
    assert status == 400
    assert answer["detail"].startswith("the body is not JSON")


def test_binary_tensors_are_refused() -> None:
    assert ask([b"{}"], headers={"Inference-Header-Content-Length": "2"})[0] == 400


def test_a_path_of_ours_takes_posts_only_and_no_other_body_is_read() -> None:
    async def never(scope: Any, document: object) -> bytes:
        raise AssertionError

    async def receive() -> dict[str, Any]:
        raise AssertionError("the body of what is no POST is nobody's")

    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    for method in ("GET", "PUT", "DELETE", "TRACE"):
        scope = {"type": "http", "method": method, "path": "/own", "headers": [(b"content-length", b"9")]}
        asyncio.run(Limits(echo, SETTINGS, {"/own": never})(scope, receive, send))
        start, body = sent[-2:]
        assert start["status"] == 405
        assert (b"allow", b"POST") in start["headers"]
        assert orjson.loads(body["body"]) == problem(405, "method not allowed here")


def test_a_fault_of_ours_is_a_problem_document_too_and_is_raised_for_the_log() -> None:
    sent: list[Any] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"{}", "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    async def broken(scope: Any, document: object) -> bytes:
        raise ZeroDivisionError

    scope = {"type": "http", "method": "POST", "path": "/broken", "headers": []}
    with pytest.raises(ZeroDivisionError):
        asyncio.run(Limits(echo, SETTINGS, {"/broken": broken})(scope, receive, send))
    assert sent[0]["status"] == 500
    assert orjson.loads(sent[1]["body"]) == problem(500, "internal error")
