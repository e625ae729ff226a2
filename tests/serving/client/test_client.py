import asyncio
import json
import math
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from serving.api import http_routes
from serving.client import answers, attempts, client
from serving.client.answers import NotAnswered, Recommendations, RecommendedItem
from serving.client.client import AsyncClient, Client, InvalidCall
from serving.client.fakes import FakeClient
from tests.chaos.listening import listening
from tests.chaos.procs import eventually
from tests.programs import run_python

BEST = ["b1", "b2", "b3", "b4", "b5"]
PATIENT_MS = 20_000.0  # for a call that must be answered on a busy machine
SHORT_MS = 60.0  # for a call without an answer
SLACK_S = 2.0  # of a busy machine

NEVER, RESET = "never", "reset"
Say = Callable[[int, dict[str, Any]], bytes | str]


class Server:
    """A real socket that reads requests and sends the prepared answers."""

    def __init__(self, say: Say, tls: ssl.SSLContext | None) -> None:
        self.requests: list[tuple[dict[str, str], dict[str, Any]]] = []
        self.connections = 0
        self._say, self._tls, self._lock = say, tls, threading.Lock()
        self._listening = listening(self._serve)
        _, self.port = self._listening.__enter__()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def close(self) -> None:
        self._listening.__exit__(None, None, None)

    def _serve(self, one: socket.socket) -> None:
        with self._lock:
            self.connections += 1
        if self._tls is not None:
            one = self._tls.wrap_socket(one, server_side=True)
        with one, one.makefile("rb") as lines:
            while self._answer(one, lines):
                pass

    def _answer(self, one: socket.socket, lines: Any) -> bool:
        first = lines.readline()
        if not first:
            return False
        headers = {"line": first.decode().strip()}
        while (line := lines.readline().strip()) and b":" in line:
            name, _, value = line.decode().partition(":")
            headers[name.lower()] = value.strip()
        body = lines.read(int(headers.get("content-length", 0)))
        if not body:  # the client's deadline passed before it had sent one
            return False
        document = json.loads(body)
        with self._lock:
            number = len(self.requests)
            self.requests.append((headers, document))
        said = self._say(number, document)
        if said == RESET:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            return False
        if isinstance(said, bytes):
            one.sendall(said)
            return not said.startswith(b"HTTP/1.1 200 half")
        lines.readline()  # until the client leaves
        return False


def http(status: int, body: bytes) -> bytes:
    return b"HTTP/1.1 %d said\r\ncontent-length: %d\r\n\r\n%s" % (status, len(body), body)


def answer_to(document: dict[str, Any]) -> Recommendations:
    return Recommendations(
        document["request_id"],
        (
            RecommendedItem("i1", 0.25, "history", "bought 3 times", 3.99, 0.25, "SODA25"),
            RecommendedItem(
                "i2", 0.125, "together", "goes with b1", name="bread", reason_code="bought_together"
            ),
        ),
        "bundle",
        stage_ms={"total": 2.5},
        unknown_items=1,
    )


def good(number: int, document: dict[str, Any]) -> bytes:
    return http(200, json.dumps(asdict(answer_to(document))).encode())


def then(*first: bytes | str) -> Say:
    """Send these answers, then valid ones."""
    return lambda number, document: first[number] if number < len(first) else good(number, document)


def always(said: bytes | str) -> Say:
    return lambda number, document: said


Serve = Callable[..., Server]
HALF = b"HTTP/1.1 200 half\r\ncontent-length: 1000\r\n\r\n{"
HALF_NEVER = b"HTTP/1.1 200 whole\r\ncontent-length: 1000\r\n\r\n{"


@pytest.fixture
def serve() -> Iterator[Serve]:
    servers: list[Server] = []

    def start(say: Say, tls: ssl.SSLContext | None = None) -> Server:
        servers.append(Server(say, tls))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


Ask = Callable[..., Recommendations]


@pytest.fixture(params=["sync", "async"])
def ask(request: pytest.FixtureRequest) -> Ask:
    """One call with each kind of client: both classes behave the same."""

    def call(
        url: str, basket: Any = ("b2",), options: dict[str, Any] | None = None, **asked: Any
    ) -> Recommendations:
        given: dict[str, Any] = {"deadline_ms": PATIENT_MS, **(options or {})}
        if request.param == "sync":
            with Client(url, BEST, **given) as client:
                return client.recommend(basket, **asked)

        async def once() -> Recommendations:
            async with AsyncClient(url, BEST, **given) as client:
                return await client.recommend(basket, **asked)

        return asyncio.run(once())

    return call


def check_fallback(
    answer: Recommendations, reason: str, items: Sequence[str] = ("b1", "b3", "b4", "b5")
) -> None:
    assert (answer.degraded, answer.degraded_reason) == (True, reason)
    assert [item.item_id for item in answer.items] == list(items)
    assert {item.source for item in answer.items} <= {client.SOURCE}
    assert answer.rung == ("popular" if items else "empty")


# ----------------------------------------------------------------------------------------- answers


def test_the_answer_is_the_endpoints(serve: Serve, ask: Ask) -> None:
    server = serve(good)
    at = datetime(2017, 12, 5, 18, 30, tzinfo=UTC)
    answer = ask(server.url, ["b2"], user_id="u", store_id="s", k=5, at=at, request_id="r1")
    ((headers, document),) = server.requests
    assert answer == answer_to({"request_id": "r1"})
    assert document == {
        "basket": ["b2"],
        "user_id": "u",
        "store_id": "s",
        "k": 5,
        "at": "2017-12-05T18:30:00+00:00",
        "request_id": "r1",
    }
    assert headers["line"] == f"POST {http_routes.RECOMMENDATIONS} HTTP/1.1"
    assert headers["host"] == f"127.0.0.1:{server.port}"
    assert 0 < float(headers["x-deadline-ms"]) <= PATIENT_MS * attempts.SERVER_SHARE


@pytest.mark.parametrize(("token", "sent"), [("t" * 16, f"Bearer {'t' * 16}"), ("", None)])
def test_a_token_goes_with_each_request(serve: Serve, ask: Ask, token: str, sent: str | None) -> None:
    server = serve(good)
    assert not ask(server.url, options={"token": token}).degraded
    assert server.requests[0][0].get("authorization") == sent


@pytest.mark.parametrize("token", ["secret of a till\n", "two words", "schlüssel"])
def test_a_token_that_no_header_may_hold_is_refused_and_not_shown(token: str) -> None:
    with pytest.raises(ValueError, match="token holds a space") as error:
        Client("http://recommender", BEST, token=token)
    assert token not in str(error.value)


def test_a_request_without_an_id_gets_a_generated_one(serve: Serve, ask: Ask) -> None:
    server = serve(good)
    answer = ask(server.url)
    assert answer.request_id == server.requests[0][1]["request_id"] != ""


# ------------------------------------------------------------------------------------------ deadline


@pytest.mark.parametrize("said", [NEVER, HALF_NEVER, b"HTTP/1.1 200 O"], ids=["never", "half", "status"])
def test_a_server_that_hangs_costs_the_deadline(serve: Serve, ask: Ask, said: bytes | str) -> None:
    server = serve(always(said))
    check_fallback(ask(server.url, deadline_ms=SHORT_MS), answers.DEADLINE_EXCEEDED)
    assert len(server.requests) <= 1, "what is slow is not asked twice"


def test_a_name_service_that_hangs_costs_the_deadline_and_one_thread(ask: Ask) -> None:
    over, asked = threading.Event(), []

    def hang(host: str, port: int) -> Sequence[str]:
        asked.append(host)
        over.wait()
        raise OSError

    with Client("http://recommender.shop", BEST, deadline_ms=SHORT_MS, resolve=hang) as asking:
        for _ in range(3):
            check_fallback(asking.recommend(["b2"]), answers.DEADLINE_EXCEEDED)
        assert asked == ["recommender.shop"]
    options = {"deadline_ms": SHORT_MS, "resolve": hang}
    check_fallback(ask("http://recommender.shop", options=options), answers.DEADLINE_EXCEEDED)
    over.set()


def test_a_blocked_event_loop_does_not_block_the_caller(serve: Serve) -> None:
    with Client(serve(good).url, BEST, deadline_ms=PATIENT_MS) as asking:
        assert not asking.recommend([]).degraded
        assert asking._loop_thread is not None
        over = threading.Event()
        asking._loop_thread._loop.call_soon_threadsafe(over.wait)
        check_fallback(asking.recommend(["b2"], deadline_ms=SHORT_MS), answers.DEADLINE_EXCEEDED)
        over.set()


# ------------------------------------------------------------------------------------------- retries


def later(retry_after: str) -> bytes:
    return http(429, b"{}").replace(b"\r\n", b"\r\nRetry-After: %s\r\n" % retry_after.encode(), 1)


NO_WAIT = ("0", "", "soon", "-1", "1e3", "nan", "Fri, 31 Dec 1999 23:59:59 GMT")
TOO_LATE = ("3600", "9" * 400, "Fri, 31 Dec 2199 23:59:59 GMT")


@pytest.mark.parametrize(
    "first",
    [RESET, HALF, http(503, b"{}"), http(429, b"{}"), http(500, b""), *map(later, NO_WAIT)],
    ids=repr,
)
def test_one_failure_is_hidden_by_a_retry(serve: Serve, ask: Ask, first: bytes | str) -> None:
    server = serve(then(first))
    assert ask(server.url, request_id="r") == answer_to({"request_id": "r"})
    assert len(server.requests) == 2


@pytest.mark.parametrize(
    ("said", "reason", "tries"),
    [
        (RESET, answers.CONNECTION_FAILED, 2),
        (http(503, b"{}"), answers.OVERLOADED, 2),
        (http(502, b"{}"), answers.SERVER_ERROR, 2),
        *((later(when), answers.OVERLOADED, 1) for when in TOO_LATE),
        (http(200, b"{}"), answers.MALFORMED_ANSWER, 1),
        *((http(status, b"{}"), answers.INVALID_REQUEST, 1) for status in (400, 413, 422)),
        *((http(status, b"{}"), answers.UNEXPECTED_STATUS, 1) for status in (404, 301, 302)),
    ],
    ids=lambda value: value.splitlines()[0].decode() if isinstance(value, bytes) else None,
)
def test_a_failure_gives_a_fallback_after_a_retry_unless_it_would_repeat_or_come_too_late(
    serve: Serve, ask: Ask, said: bytes | str, reason: str, tries: int
) -> None:
    server = serve(always(said))
    check_fallback(ask(server.url), reason)
    assert len(server.requests) == tries


def test_a_retry_waits_as_long_as_the_endpoint_asks(serve: Serve, ask: Ask) -> None:
    server = serve(then(later("1")))
    began = time.monotonic()
    assert ask(server.url, request_id="r") == answer_to({"request_id": "r"})
    assert time.monotonic() - began >= 1
    assert len(server.requests) == 2


def test_retries_add_at_most_a_tenth_to_the_load(serve: Serve) -> None:
    calls = 200
    # One good answer among four keeps the breaker closed: only the budget limits the retries.
    server = serve(lambda n, document: good(n, document) if n % 4 == 3 else http(503, b"{}"))
    with Client(server.url, BEST, deadline_ms=PATIENT_MS) as asking:
        replies = [asking.recommend(["b2"]) for _ in range(calls)]
    assert {answer.degraded_reason for answer in replies} == {None, answers.OVERLOADED}
    assert 0 < len(server.requests) - calls <= attempts.RETRY_SHARE * calls + 1


# ------------------------------------------------------------------------------------------- breaker


def test_a_server_that_keeps_failing_gets_no_more_requests(serve: Serve) -> None:
    server = serve(always(http(500, b"")))
    with Client(server.url, BEST, deadline_ms=PATIENT_MS) as asking:
        for _ in range(attempts.FAILURES):
            check_fallback(asking.recommend(["b2"]), answers.SERVER_ERROR)
        asked = len(server.requests)
        check_fallback(asking.recommend(["b2"]), answers.CIRCUIT_OPEN)
        assert len(server.requests) == asked


def test_calls_without_a_fair_time_open_no_breaker_and_change_no_address(
    serve: Serve,
) -> None:
    server = serve(always(NEVER))
    both = ["127.0.0.1", "127.0.0.2"]
    url = f"http://recommender.shop:{server.port}"
    with Client(url, BEST, deadline_ms=PATIENT_MS, resolve=lambda host, port: both) as asking:
        for _ in range(attempts.FAILURES + 1):
            answer = asking.recommend(["b2"], deadline_ms=attempts.FAIR_S * 500)
            check_fallback(answer, answers.DEADLINE_EXCEEDED)
        assert asking._loop_thread is not None
        addresses = asking._loop_thread._caller._addresses
        eventually(lambda: addresses._addresses != ())
        assert addresses._addresses[0] == both[0]


def test_the_calls_of_a_client_with_a_short_deadline_open_the_breaker(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "FAIR_S", 10.0)  # longer than the client's own deadline
    with Client(serve(always(NEVER)).url, BEST, deadline_ms=2 * SHORT_MS) as asking:
        # A call that begins late on a busy machine does not count.
        eventually(lambda: asking.recommend(["b2"]).degraded_reason == answers.CIRCUIT_OPEN)


def test_refused_requests_leave_the_breaker_closed(serve: Serve) -> None:
    with Client(serve(always(http(400, b"{}"))).url, BEST, deadline_ms=PATIENT_MS) as asking:
        for _ in range(2 * attempts.FAILURES):
            check_fallback(asking.recommend(["b2"]), answers.INVALID_REQUEST)


# ------------------------------------------------------------------------------------------ addresses


def test_a_look_up_that_fails_in_any_way_is_followed_by_another(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attempts, "NO_NAME_TTL_S", 0.0)
    errors: list[Exception] = [socket.gaierror(socket.EAI_NONAME, "unknown"), RuntimeError("of a library")]

    def resolve(host: str, port: int) -> list[str]:
        if errors:
            raise errors.pop()
        return ["127.0.0.1"]

    url = f"http://recommender.shop:{serve(good).port}"
    with Client(url, BEST, deadline_ms=1_000.0, resolve=resolve) as asking:
        for _ in range(2):
            check_fallback(asking.recommend(["b2"]), answers.NAME_UNRESOLVED)
        assert not asking.recommend([]).degraded


def test_a_known_address_outlives_the_name_service(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempts, "NAME_TTL_S", 0.0)
    over, asked = threading.Event(), []

    def once(host: str, port: int) -> Sequence[str]:
        asked.append(host)
        if len(asked) > 1:
            over.wait()
        return ["127.0.0.1"]

    server = serve(good)
    url = f"http://recommender.shop:{server.port}"
    with Client(url, BEST, deadline_ms=PATIENT_MS, resolve=once) as asking:
        assert not any(asking.recommend([]).degraded for _ in range(5))
    assert len(asked) == 2
    assert server.requests[0][0]["host"] == f"recommender.shop:{server.port}"
    over.set()


def test_the_retry_and_later_calls_use_the_next_address(serve: Serve) -> None:
    server = serve(good)
    both = ["127.0.0.2", "127.0.0.1"]  # the first one refuses connections
    url = f"http://recommender.shop:{server.port}"
    with Client(url, BEST, deadline_ms=PATIENT_MS, resolve=lambda host, port: both) as asking:
        assert not any(asking.recommend([]).degraded for _ in range(5))
        side = asking._loop_thread
        assert side is not None
        assert side._caller._budget.saved == pytest.approx(5 * attempts.RETRY_SHARE)


def test_an_address_that_stays_silent_until_the_deadline_is_left(serve: Serve) -> None:
    server = serve(good)
    both = ["127.0.0.2", "127.0.0.1"]  # the first one accepts connections and never answers
    url = f"http://recommender.shop:{server.port}"
    with (
        socket.create_server(("127.0.0.2", server.port)),
        Client(url, BEST, deadline_ms=1_000.0, resolve=lambda host, port: both) as asking,
    ):
        check_fallback(asking.recommend(["b2"], deadline_ms=SHORT_MS), answers.DEADLINE_EXCEEDED)
        eventually(lambda: not asking.recommend([]).degraded)


async def test_a_caller_that_leaves_early_says_nothing_about_an_address(
    serve: Serve,
) -> None:
    server, both = serve(always(NEVER)), ["127.0.0.1", "127.0.0.2"]
    url = f"http://recommender.shop:{server.port}"
    async with AsyncClient(url, BEST, deadline_ms=PATIENT_MS, resolve=lambda host, port: both) as asking:
        call = asyncio.create_task(asking.recommend([]))
        while not server.requests:
            await asyncio.sleep(0.01)
        call.cancel()
        await asyncio.wait({call})
        assert call.cancelled()
        await asyncio.gather(*asking._caller._tasks, return_exceptions=True)
        assert await asking._caller._addresses.first() == both[0]


# ------------------------------------------------------------------------------------------ arguments


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"k": -1}, "k is -1, expected 0 or more"),
        ({"k": 5.0}, "k is of type float, expected int"),
        ({"k": True}, "k is of type bool, expected int"),
        ({"k": None}, "k is of type NoneType, expected int"),
        ({"user_id": 1228}, "user_id is of type int, expected str"),
        ({"at": 5}, "at is of type int, expected datetime"),
        ({"explain": "yes"}, "explain is of type str, expected bool"),
        ({"user": "1228"}, "no argument 'user': there is user_id"),
        ({"deadline_ms": math.nan}, "deadline_ms is nan, expected milliseconds"),
        ({"deadline_ms": "soon"}, "deadline_ms is of type str, expected float"),
        ({"basket": "b2"}, "basket is of type str, expected a list of item ids"),
        ({"basket": None}, "basket is of type NoneType"),
        ({"basket": iter(["b2"])}, "basket is of type list_iterator"),
        ({"basket": [1041453, 995242]}, "no item of the basket is of type str"),
    ],
)
def test_a_programming_error_raises_and_is_not_sent(
    serve: Serve, ask: Ask, wrong: dict[str, Any], says: str
) -> None:
    server = serve(good)
    call = {"basket": [], **wrong}
    with pytest.raises(InvalidCall, match=says):
        ask(server.url, **call)
    with pytest.raises(InvalidCall, match=says):
        FakeClient().recommend(**call)
    assert not server.requests


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        ({"deadline_ms": 0}, answers.DEADLINE_EXCEEDED),
        ({"deadline_ms": -3.5}, answers.DEADLINE_EXCEEDED),
        ({"basket": ["b2", math.nan]}, answers.INVALID_REQUEST),
    ],
    ids=["no time", "less than no time", "an item that is no text"],
)
def test_a_call_that_cannot_succeed_is_not_sent(
    serve: Serve, ask: Ask, call: dict[str, Any], reason: str
) -> None:
    server = serve(good)
    check_fallback(ask(server.url, **call), reason)
    assert not server.requests


class Rows:
    """A lazy list that fails after the database is gone."""

    def __len__(self) -> int:
        return 2

    def __contains__(self, item: object) -> bool:
        raise RuntimeError("the database is gone")

    def __iter__(self) -> Iterator[str]:
        yield "b1"
        raise RuntimeError("the database is gone")


def test_an_unreadable_basket_raises_nothing(serve: Serve, ask: Ask) -> None:
    server = serve(good)
    check_fallback(ask(server.url, Rows()), answers.CLIENT_ERROR, BEST[1:])
    with pytest.raises(NotAnswered, match="RuntimeError") as raised:
        ask(server.url, Rows(), {"strict": True})
    assert raised.value.reason == answers.CLIENT_ERROR
    assert not server.requests


@pytest.mark.parametrize(("k", "items"), [(0, []), (2, ["b2", "b4"]), (99, ["b2", "b4", "b5"])])
def test_the_best_sellers_are_k_without_the_basket(k: int, items: list[str]) -> None:
    with FakeClient(BEST + BEST, failure="server_error") as asking:
        check_fallback(asking.recommend(["b1", "b3", "other"], k=k), "server_error", items)


@pytest.mark.parametrize(
    "url", ["recommender:8080", "ftp://recommender", "http://", "", "http://[::1", "http://recommender:70000"]
)
def test_an_invalid_address_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="expected http"):
        Client(url, BEST)


@pytest.mark.parametrize("deadline_ms", [0, -1, math.nan, math.inf])
def test_an_invalid_deadline_is_refused(deadline_ms: float) -> None:
    with pytest.raises(ValueError, match="milliseconds above 0"):
        AsyncClient("http://127.0.0.1", BEST, deadline_ms=deadline_ms)


def test_a_strict_client_raises(serve: Serve, ask: Ask) -> None:
    with pytest.raises(NotAnswered, match="k must be 0 or more") as raised:
        ask(serve(always(http(400, b"k must be 0 or more"))).url, options={"strict": True})
    assert raised.value.reason == answers.INVALID_REQUEST


# ------------------------------------------------------------------------------- threads, connections


def test_callers_together_share_a_thread_and_few_connections(serve: Serve) -> None:
    server, replies = serve(always(NEVER)), list[Recommendations]()
    asking = Client(server.url, BEST, deadline_ms=PATIENT_MS)
    callers = [
        threading.Thread(target=lambda: replies.append(asking.recommend(["b2"])))
        for _ in range(attempts.MAX_CONNECTIONS + 8)
    ]
    for caller in callers:
        caller.start()
    eventually(
        lambda: asking._loop_thread is not None and len(asking._loop_thread._caller._tasks) == len(callers)
    )
    eventually(lambda: len(server.requests) == attempts.MAX_CONNECTIONS)
    ours = [thread for thread in threading.enumerate() if thread.name.startswith("recommend-")]
    assert len(ours) == 1
    assert server.connections == attempts.MAX_CONNECTIONS
    asking.close()
    for caller in callers:
        caller.join()
    assert {answer.degraded_reason for answer in replies} == {answers.CLOSED}
    assert not any(thread.is_alive() for thread in ours)


async def test_hung_calls_return_their_connections(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempts, "FAILURES", 1_000)
    well = threading.Event()
    server = serve(lambda number, document: good(number, document) if well.is_set() else NEVER)
    async with AsyncClient(server.url, BEST, deadline_ms=PATIENT_MS) as asking:
        many = [asking.recommend(["b2"], deadline_ms=SHORT_MS) for _ in range(3 * attempts.MAX_CONNECTIONS)]
        hung = await asyncio.gather(*many)
        assert {answer.degraded_reason for answer in hung} == {answers.DEADLINE_EXCEEDED}
        well.set()
        again = await asyncio.gather(*(asking.recommend([]) for _ in range(2 * attempts.MAX_CONNECTIONS)))
        assert not any(answer.degraded for answer in again)


def test_a_closed_client_answers_without_the_endpoint(serve: Serve) -> None:
    server = serve(good)
    asking = Client(server.url, BEST, deadline_ms=PATIENT_MS)
    assert not asking.recommend([]).degraded
    for _ in range(2):
        asking.close()
        check_fallback(asking.recommend(["b2"]), answers.CLOSED)
    assert len(server.requests) == 1


@pytest.mark.parametrize("hangs", [False, True])
def test_closing_ends_a_call_in_flight(serve: Serve, monkeypatch: pytest.MonkeyPatch, hangs: bool) -> None:
    async def hang(_: attempts.EndpointCaller) -> None:
        await asyncio.Event().wait()

    if hangs:
        monkeypatch.setattr(attempts.EndpointCaller, "close", hang)
        monkeypatch.setattr(client, "CLOSING_S", 0.1)
    server, replies = serve(always(NEVER)), list[Recommendations]()
    asking = Client(server.url, BEST, deadline_ms=PATIENT_MS)
    caller = threading.Thread(target=lambda: replies.append(asking.recommend(["b2"])))
    caller.start()
    eventually(lambda: len(server.requests) == 1)
    asking.close()
    caller.join(SLACK_S)
    check_fallback(replies[0], answers.CLOSED)


# --------------------------------------------------------------------------------------- best sellers


@pytest.mark.parametrize("text", ["{}", "[1]", "no JSON"])
def test_an_invalid_file_of_best_sellers_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "best.json").write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=r"best\.json is not a JSON list .* write it with"):
        client.read_best_sellers(tmp_path / "best.json")


def test_a_certificate_is_checked_by_the_hosts_name(serve: Serve, certificates: Path) -> None:
    """We connect to an address; another host has the same one."""
    ours = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    ours.load_cert_chain(certificates / "cert.pem", certificates / "key.pem")
    server = serve(good, ours)
    theirs = ssl.create_default_context(cafile=str(certificates / "ca.pem"))
    for host, tls, reason in [
        ("recommender.shop", theirs, None),
        ("other.shop", theirs, answers.CONNECTION_FAILED),
        ("recommender.shop", None, answers.CONNECTION_FAILED),
    ]:
        url = f"https://{host}:{server.port}"
        with Client(url, BEST, deadline_ms=PATIENT_MS, tls=tls, resolve=lambda *_: ["127.0.0.1"]) as asking:
            assert asking.recommend(["b2"]).degraded_reason == reason


# ------------------------------------------------------------------------------------- own processes


@pytest.mark.slow
def test_the_first_call_imports_nothing(serve: Serve) -> None:
    """Imports would take longer than the deadline of a call."""
    program = """
import sys
from serving.client.client import Client
with Client(sys.argv[1], [], deadline_ms=20_000) as client:
    before = set(sys.modules)
    assert not client.recommend([]).degraded
    late = set(sys.modules) - before
print(*late)
"""
    assert run_python("-c", program, serve(good).url).split() == []


@pytest.mark.slow
def test_a_fork_during_the_first_call_can_use_the_client(serve: Serve) -> None:
    program = """
import os, sys, threading
from serving.client import client as module
real, inside, forked = module.EndpointCaller, threading.Event(), threading.Event()
def connect(*given):
    inside.set()
    forked.wait(60)
    return real(*given)
module.EndpointCaller = connect
client = module.Client(sys.argv[1], [], deadline_ms=20_000)
first = threading.Thread(target=client.recommend, args=([],))
first.start()
inside.wait()
late = client.recommend([], deadline_ms=50)
assert late.degraded_reason == "deadline_exceeded", "another thread holds the lock"
child = os.fork()
forked.set()
if not child:
    os._exit(0 if not client.recommend([]).degraded else 3)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
first.join()
client.close()
"""
    run_python("-c", program, serve(good).url, timeout_s=60)


@pytest.mark.slow
def test_a_forked_process_can_use_the_client(serve: Serve) -> None:
    program = """
import os, sys
from serving.client.client import Client
client = Client(sys.argv[1], [], deadline_ms=20_000)
assert not client.recommend([]).degraded
child = os.fork()
if not child:
    os._exit(0 if not client.recommend([]).degraded else 3)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert not client.recommend([]).degraded
client.close()
"""
    server = serve(good)
    run_python("-c", program, server.url, timeout_s=60)
    assert (len(server.requests), server.connections) == (3, 2)
