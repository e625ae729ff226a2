"""A server of known behaviour -> the generator reports exactly that."""

import asyncio
import queue
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipelines.bench.load.connections import OK, UNANSWERED
from pipelines.bench.load.generator import (
    Load,
    LoadPlan,
    bodies_of,
    carry_out,
    load_generator,
    open_loop,
)
from pipelines.bench.report import PERCENTILES

# A body and its head, in lower case -> status and body.
Answer = Callable[[bytes, bytes], Awaitable[tuple[int, bytes]]]


@contextmanager
def http_server(answer: Answer) -> Iterator[str]:
    """Answer HTTP/1.1 requests in a thread of its own; a status below 0 hangs up."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        serving.add(asyncio.current_task())
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
                length = int(head.partition(b"content-length:")[2].partition(b"\r\n")[0])
                status, body = await answer(await reader.readexactly(length), head)
                if status < 0:
                    break
                # Two writes: an answer need not come in one piece.
                writer.write(b"HTTP/1.1 %d Whatever\r\nContent-Length: %d\r\n\r\n" % (status, len(body)))
                await writer.drain()
                await asyncio.sleep(0)
                writer.write(body)
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()

    serving: set[asyncio.Task[None] | None] = set()
    ready: queue.Queue[tuple[asyncio.AbstractEventLoop, asyncio.Event, int]] = queue.Queue()

    async def run() -> None:
        over = asyncio.Event()
        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            ready.put((asyncio.get_running_loop(), over, server.sockets[0].getsockname()[1]))
            await over.wait()
        for task in serving:
            assert task is not None
            task.cancel()
            await asyncio.wait([task])

    thread = threading.Thread(target=asyncio.run, args=(run(),))
    thread.start()
    loop, over, port = ready.get()
    try:
        yield f"http://127.0.0.1:{port}/ask"
    finally:
        loop.call_soon_threadsafe(over.set)
        thread.join()


async def echo(body: bytes, _: bytes) -> tuple[int, bytes]:
    return 200, body


def ask(plan: LoadPlan, *bodies: bytes) -> Load:
    with asyncio.Runner(loop_factory=open_loop) as runner:
        return carry_out(replace(plan, bodies=bodies), runner)


@pytest.fixture(autouse=True)
def own_collector(monkeypatch: pytest.MonkeyPatch) -> None:
    """`carry_out` would unfreeze the modules of the session; a generator in its own process still does."""
    nothing = SimpleNamespace(**dict.fromkeys(("collect", "freeze", "disable", "unfreeze", "enable"), list))
    monkeypatch.setattr("pipelines.bench.load.generator.gc", nothing)


def test_bodies_are_built_for_the_client_or_for_v1() -> None:
    [plain], [wrapped] = (bodies_of([{"basket": ["a"]}], wrapped=way) for way in (False, True))
    assert plain == b'{"basket":["a"]}'
    assert wrapped == b'{"instances":[' + plain + b"]}"


PLAN = LoadPlan("", (), seconds=0.5, rate=100, warm_up=2, keep=True, patience_s=20)


def test_each_request_gets_its_own_answer_and_time() -> None:
    bodies = [b"x" * length for length in range(1, 51)]
    with http_server(echo) as url:
        load = ask(replace(PLAN, url=url, start=3), *bodies)
    assert load.answers == [bodies[(3 + number) % 50] for number in range(50)]
    assert load.answered.all()
    assert (load.client_ms >= load.late_ms).all()
    assert (load.late_ms >= 0).all()
    # Send times come from the seed alone: every arm gets the same ones.
    gaps = np.random.default_rng(0).exponential(1 / 100, 50)
    assert np.diff(load.due_s) == pytest.approx(gaps[1:], abs=1e-6)


def test_the_warm_up_sends_the_bodies_before_the_start() -> None:
    came: list[bytes] = []

    async def note(body: bytes, _: bytes) -> tuple[int, bytes]:
        came.append(body)
        return 200, body

    bodies = [b"%d" % number for number in range(10)]
    with http_server(note) as url:
        plan = replace(PLAN, url=url, rate=0, connections=1, seconds=60, requests=3, warm_up=3)
        ask(replace(plan, start=24), *bodies)
    assert came == [b"1", b"2", b"3", b"4", b"5", b"6"]


def test_every_request_waiting_for_a_stalled_server_is_charged_for_it() -> None:
    stalled_until: list[float] = []

    async def stall(body: bytes, _: bytes) -> tuple[int, bytes]:
        if body == b"stall" and not stalled_until:
            time.sleep(0.3)  # the whole server blocks
            stalled_until.append(asyncio.get_running_loop().time())
        return 200, body

    with http_server(stall) as url:
        load = ask(replace(PLAN, url=url, warm_up=1, start=1), b"fine", b"stall", *[b"fine"] * 200)
    # Both loops read the machine's one monotonic clock; the stalling request was the first one due.
    until = load.client_ms[0] / 1e3 + load.due_s[0]
    waited = load.due_s[load.due_s < load.due_s[0] + 0.3]
    assert len(waited) > 5, "they were asked though nothing was answered"
    assert (load.client_ms[: len(waited)] / 1e3 >= load.due_s[0] + 0.3 - waited - 1e-3).all()
    assert until - load.due_s[0] >= 0.3


def test_refused_and_broken_requests_are_counted_and_never_dropped() -> None:
    async def by_name(body: bytes, _: bytes) -> tuple[int, bytes]:
        return int(body), b'{"degraded":true}' if body == b"200" else b"{}"

    kinds = [b"200", b"429", b"503", b"500", b"-1"]
    with http_server(by_name) as url:
        load = ask(replace(PLAN, url=url, warm_up=0), *kinds)
    assert load.status.tolist() == [200, 429, 503, 500, UNANSWERED] * 10
    found = load.summary(deadline_ms=1e6)
    assert (found["answered"], found["refused"], found["failed"]) == (10, 20, 10)
    assert (found["unanswered"], found["degraded"]) == (10, 10)
    assert load.summary(deadline_ms=0.0)["late"] == 10
    assert load.summary(deadline_ms=0.0)["good_per_s"] == 0


def test_a_missing_answer_counts_as_waited_until_the_end() -> None:
    async def never(body: bytes, _: bytes) -> tuple[int, bytes]:
        await asyncio.sleep(1e6 if body == b"lost" else 0)
        return 200, body

    with http_server(never) as url:
        plan = replace(PLAN, url=url, warm_up=1, start=1, rate=20, patience_s=5)
        load = ask(plan, b"fine", b"lost", *[b"fine"] * 20)
    assert load.status.tolist() == [UNANSWERED] + [OK] * 9
    assert load.client_ms[0] / 1e3 >= load.due_s[-1] - load.due_s[0] + 5 - 1e-6
    assert load.summary(1e6)["ms"]["max"] == pytest.approx(load.client_ms[0])


def test_a_connection_that_is_lost_at_once_counts_as_waited_until_the_end() -> None:
    """A server that refuses every other request must not look fast."""
    due, ms = np.array([0.0, 1.0, 2.0, 3.0]), np.array([5.0, 0.1, 0.1, 500.0])
    status = np.array([OK, UNANSWERED, 503, OK])
    load = Load(due, ms, np.zeros(4), status, np.zeros(4, bool))
    assert load.waits_ms == pytest.approx([5.0, 2_500.0, 500.0]), "the refused one is left out"
    assert load.summary(50.0)["ms"]["max"] == pytest.approx(2_500.0)
    none = np.zeros(0)
    assert len(Load(none, none, none, none, none.astype(bool)).waits_ms) == 0


def test_prefetches_are_sent_as_such() -> None:
    heads: list[bool] = []

    async def note(body: bytes, head: bytes) -> tuple[int, bytes]:
        heads.append(b"\r\nx-priority: prefetch\r\n" in head)
        return 200, body

    with http_server(note) as url:
        plan = replace(PLAN, url=url, warm_up=0, requests=3, rate=0)
        ask(replace(plan, prefetch=True), b"a")
        ask(plan, b"a")
    assert heads == [True] * 3 + [False] * 3


def test_a_load_holds_its_start_time() -> None:
    with http_server(echo) as url:
        before = time.monotonic()
        load = ask(replace(PLAN, url=url), b"a")
    assert before <= load.began_s <= load.began_s + load.due_s[-1] <= time.monotonic()


def test_the_connection_limit_holds_and_the_wait_counts() -> None:
    inside, most = 0, 0

    async def slow(body: bytes, _: bytes) -> tuple[int, bytes]:
        nonlocal inside, most
        inside, most = inside + 1, max(most, inside + 1)
        await asyncio.sleep(0.03)
        inside -= 1
        return 200, body

    with http_server(slow) as url:
        load = ask(replace(PLAN, url=url, connections=2, rate=200), b"a", b"b")
    assert most == 2
    assert load.answered.all()
    # 100 requests, two at a time, 30 ms each: the last is answered 1.5 s after the first at the earliest.
    assert load.client_ms.max() / 1e3 >= 100 / 2 * 0.03 - np.ptp(load.due_s) - 0.05


def test_the_closed_loop_sends_one_request_after_the_other() -> None:
    with http_server(echo) as url:
        load = ask(replace(PLAN, url=url, rate=0, connections=1, seconds=60, requests=20), b"a", b"b", b"c")
    assert load.answers == [b"a", b"b", b"c"] * 6 + [b"a", b"b"]
    assert (np.diff(load.due_s) * 1e3 >= load.client_ms[:-1] - 1e-6).all()


def test_without_a_server_all_requests_count_as_unanswered() -> None:
    with socket.socket() as taken:  # its port refuses connections, and no other program can take it
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}/ask"
        load = ask(replace(PLAN, url=url, rate=40), b"a")
        assert not load.answered.any()
        assert load.summary(1e6)["unanswered"] == 20
        one_by_one = replace(PLAN, url=url, rate=0, connections=1, seconds=20, requests=20, warm_up=0)
        assert ask(one_by_one, b"a").summary(1e6)["unanswered"] == 20


def test_goodput_counts_over_the_time_in_which_answers_were_due() -> None:
    """Not until patience ended; a fallback is not the requested list."""
    due, status = np.linspace(0.0, 10.0, 101), np.full(101, OK)
    ms = np.full(101, 5.0)
    status[40], ms[40] = UNANSWERED, 20_000.0  # a caller waited 20 s for it
    ms[41] = 51.0
    degraded = np.isin(np.arange(101), [41, 50, 60, 70])
    found = Load(due, ms, np.zeros(101), status, degraded).summary(50.0)
    assert (found["good"], found["degraded_in_time"], found["degraded"], found["late"]) == (96, 3, 4, 1)
    assert found["good_per_s"] == pytest.approx(9.6)
    assert found["degraded_in_time_per_s"] == pytest.approx(0.3)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.tuples(st.sampled_from([0, 200, 400, 429, 500, 503]), st.floats(0, 1e4)), min_size=1))
def test_every_request_is_counted_once(rows: list[tuple[int, float]]) -> None:
    status, ms = (np.array(column) for column in zip(*rows, strict=True))
    none, due = np.zeros(len(rows)), np.linspace(0.0, 4.0, len(rows))
    degraded = np.arange(len(rows)) % 3 == 0
    found = Load(due, ms.astype(float), none, status, degraded & (status == OK)).summary(50.0)
    assert sum(found[kind] for kind in ("answered", "refused", "failed", "unanswered")) == len(rows)
    assert found["good"] + found["degraded_in_time"] + found["late"] == found["answered"]
    assert found["good_per_s"] == (found["good"] / 4.0 if len(rows) > 1 else None)
    known = [value for value in (found["ms"][name] for name in PERCENTILES) if value is not None]
    assert known == sorted(known)


@pytest.mark.slow
def test_a_generator_process_gives_the_same_load() -> None:
    with http_server(echo) as url, load_generator() as generator:
        for seed in (0, 1):
            load = generator.run(replace(PLAN, url=url, bodies=(b"a", b"bb"), seed=seed))
            assert load.answers == [b"a", b"bb"] * 25
            assert load.summary(1e6)["answered"] == 50


@pytest.mark.slow
def test_a_dead_generator_is_reported() -> None:
    with load_generator() as generator, pytest.raises(RuntimeError, match="died"):
        generator.run(replace(PLAN, url="http://127.0.0.1:1/"))  # no bodies


async def recommended(body: bytes, head: bytes) -> tuple[int, bytes]:
    """Answer as the endpoint does, with the request as the item."""
    asked = orjson.loads(body)
    assert head.startswith(b"post /v1/recommendations ")
    item = {"item_id": asked["basket"][0] + "!", "score": 0.5, "source": "history", "reason": "as told"}
    answer = {"request_id": asked["request_id"], "items": [item], "bundle_id": "b1", "rung": "full"}
    return 200, orjson.dumps(answer)


@pytest.fixture
def best_sellers(tmp_path: Path) -> str:
    file = tmp_path / "best_sellers.json"
    file.write_text('["bread", "milk"]')
    return str(file)


def test_the_load_can_go_through_our_client(best_sellers: str) -> None:
    bodies = [orjson.dumps({"basket": [f"i{n}"], "user_id": "u", "k": 1}) for n in range(7)]
    with http_server(recommended) as url:
        plan = replace(PLAN, url=f"client+{url.removesuffix('/ask')}", best_sellers=best_sellers)
        load = ask(replace(plan, deadline_ms=20_000.0), *bodies)
    assert load.answered.all()
    assert not load.degraded.any()
    items = [orjson.loads(answer)["items"][0]["item_id"] for answer in load.answers]
    assert items == [f"i{n % 7}!" for n in range(50)]


def test_without_a_server_our_client_answers(best_sellers: str) -> None:
    plan = replace(PLAN, url="client+http://127.0.0.1:1", best_sellers=best_sellers)
    load = ask(plan, b'{"basket": ["milk"]}')
    assert load.answered.all()
    assert load.degraded.all()
    assert {orjson.loads(answer)["items"][0]["source"] for answer in load.answers} == {"client_fallback"}


def test_an_exception_of_the_client_counts_as_a_failure(best_sellers: str) -> None:
    plan = replace(PLAN, url="client+http://127.0.0.1:1", best_sellers=best_sellers)
    load = ask(plan, b'{"no_basket": []}')
    assert (load.status == 500).all()


def test_an_open_loop_ends_on_request(tmp_path: Path) -> None:
    over = tmp_path / "over"
    came: list[bytes] = []

    async def tell(body: bytes, _: bytes) -> tuple[int, bytes]:
        came.append(body)
        if len(came) == 10:
            over.touch()
        return 200, body

    with http_server(tell) as url:
        load = ask(replace(PLAN, url=url, seconds=600.0, warm_up=0, stop=str(over)), b"x")
    assert load.answered.all()
    assert 10 <= len(load.status) < 600 * PLAN.rate / 2
