"""The replay: its events and their times, the injected faults, and the shopper's requests."""

import json
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pandas as pd
import pytest
from click.testing import CliRunner, Result

from feature_repo.events import EVENT_SCHEMA, Dataset, EventsInvalid, write_dataset
from feature_repo.stream.delivery import Delivery
from feature_repo.stream.kafka import KafkaSettings
from feature_repo.stream.messages import MessageInvalid, parse_event
from feature_repo.stream.replay_events import (
    Disturbance,
    Shopper,
    choose,
    encode,
    order,
    poison,
    replay_events,
)
from tests.feature_repo.stream.published_shop import minute_shop
from tests.feature_repo.stream.stream_place import NOWHERE

TOPIC, ENDPOINT = "checkout.events", "http://endpoint:8080"


class Paper(Delivery):
    """A delivery without a broker, which keeps the messages for the test."""

    def __init__(self, settings: KafkaSettings = NOWHERE) -> None:
        super().__init__(NOWHERE)
        self.times, self.sent, self.full_for = list[float](), list[tuple[str | None, bytes]](), 0

    @property
    def is_full(self) -> bool:
        self.full_for -= 1
        return self.full_for >= 0

    def send(self, topic: str, key: str | None, value: bytes) -> None:
        assert topic == TOPIC
        self.times.append(time.monotonic())
        self.sent.append((key, value))

    def flush(self, timeout_s: float) -> bool:
        time.sleep(timeout_s)
        return True

    def messages(self) -> list[tuple[str, bytes]]:
        return [(key or "", value) for key, value in self.sent]


@pytest.fixture
def paper() -> Iterator[Paper]:
    delivery = Paper()
    yield delivery
    delivery.close()


def test_a_message_holds_the_events_columns_without_unknown_values() -> None:
    events = minute_shop(baskets=2, lines=1)
    events.loc[1, ["quantity", "price", "discount"]] = [3, 1.99, 0.25]
    events["at"] += pd.Timedelta(microseconds=7)
    (key, first), (_, second) = encode(events)
    assert key == "user-0"
    assert json.loads(first) == {
        "event_id": events.loc[0, "event_id"],
        "event_type": "purchase",
        "user_id": "user-0",
        "basket_id": "basket-000",
        "item_id": "item-0",
        "at": "2024-05-01T10:00:00.000007Z",
        "quantity": 1,
        "discount": 0,
        "store_id": "406",
    }
    fields = json.loads(second)
    assert (fields["quantity"], fields["price"], fields["discount"]) == (3, 1.99, 0.25)
    assert set(fields) == set(EVENT_SCHEMA.names) - {"store_id"}


def test_since_until_and_limit_choose_the_events() -> None:
    events = minute_shop().sample(frac=1, random_state=0)
    chosen = choose(events, "2024-05-01T10:05:00Z", "2024-05-01T10:07:00Z")
    assert list(chosen["basket_id"]) == ["basket-005"] * 4 + ["basket-006"] * 4
    assert list(choose(events, limit=5)["basket_id"]) == ["basket-000"] * 4 + ["basket-001"]
    with pytest.raises(EventsInvalid, match="the data reach from 2024-05-01T10:00:00Z"):
        choose(events, "2025-01-01")
    with pytest.raises(EventsInvalid, match="--until 'soon' is no time"):
        choose(events, until="soon")


def test_every_event_is_sent_once_and_in_order_as_fast_as_possible(paper: Paper) -> None:
    events = choose(minute_shop())
    counts = replay_events(events, TOPIC, paper, 0)
    assert paper.messages() == encode(events)
    assert counts.messages == 80


def test_events_follow_the_clock_of_the_data(paper: Paper) -> None:
    began = time.monotonic()
    replay_events(choose(minute_shop(baskets=4, lines=2)), TOPIC, paper, speed=240.0)
    due = np.repeat([0.0, 0.25, 0.5, 0.75], 2)
    # Never early; the delay depends on the machine.
    assert (np.array(paper.times) - began >= due).all()


def test_a_hard_stream_has_the_requested_shares_and_is_reproducible() -> None:
    hard = Disturbance(duplicates=0.05, out_of_order=0.1, poison=0.01, within=50, seed=3)
    rows, when, counts = order(10_000, hard)
    assert (counts.duplicates, counts.delayed, counts.poison) == (500, 1_000, 100)
    assert len(rows) == 10_600
    found = Counter(rows.tolist())
    assert found.pop(-1) == 100
    assert set(found) == set(range(10_000))
    assert sum(n - 1 for n in found.values()) == 500
    assert (np.diff(when) >= 0).all()
    sent = rows >= 0
    assert (when[sent] >= rows[sent]).all()
    assert (when[sent] - rows[sent]).max() <= 50
    again, _, _ = order(10_000, hard)
    assert (rows == again).all()
    other, _, _ = order(10_000, Disturbance(0.05, 0.1, 0.01, 50, seed=4))
    assert (rows != other).any()


@pytest.mark.parametrize("number", range(9))
def test_each_kind_of_poison_breaks_the_contract(number: int) -> None:
    [(user, good)] = encode(minute_shop(1, 1).astype({"quantity": "int64"}))
    _, value = poison(number, good)
    with pytest.raises(MessageInvalid):
        parse_event(user.encode(), value, time.time())
    assert parse_event(user.encode(), good, time.time())


# -------------------------------------------------------------------------------------------- shopper


@pytest.fixture
def asked(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The requests at an endpoint; every second answer is degraded, the fifth is broken.

    Its parameter, if it has one, is the token that it wants.
    """
    asked: list[dict[str, Any]] = []

    def answer(post: httpx.Request) -> httpx.Response:
        assert post.url == f"{ENDPOINT}/v1/models/checkout:predict"
        if post.headers.get("authorization") != getattr(request, "param", None):
            return httpx.Response(401, json={})
        asked.extend(json.loads(post.content)["instances"])
        predictions = [{"degraded": len(asked) % 2 == 0}]
        return httpx.Response(500 if len(asked) == 5 else 200, json={"predictions": predictions})

    client = partial(httpx.Client, transport=httpx.MockTransport(answer))
    monkeypatch.setattr("feature_repo.stream.replay_events.httpx.Client", client)
    return asked


def test_the_shopper_sends_half_of_each_basket_once_at_its_time(
    paper: Paper, asked: list[dict[str, Any]]
) -> None:
    shopper = Shopper(ENDPOINT)
    counts = replay_events(
        choose(minute_shop(6, 3)), TOPIC, paper, 0, Disturbance(duplicates=0.5, within=3), shopper
    )
    shopper.close()
    assert asked[:2] == [
        {
            "user_id": "user-0",
            "basket": ["item-0", "item-1"],
            "at": "2024-05-01T10:00:00Z",
            "request_id": "basket-000",
            "store_id": "406",
        },
        {
            "user_id": "user-1",
            "basket": ["item-0", "item-1"],
            "at": "2024-05-01T10:01:00Z",
            "request_id": "basket-001",
        },
    ]
    assert [question["request_id"] for question in asked] == [f"basket-{b:03d}" for b in range(6)]
    assert (counts.asked, counts.degraded, counts.errors) == (5, 3, 1)
    assert counts.messages == 18 + 9


def test_the_shopper_sends_requests_for_purchases_not_for_impressions(
    asked: list[dict[str, Any]], paper: Paper
) -> None:
    """An archive holds both, and an impression may have the id and time of the basket."""
    bought = minute_shop(2, 4)
    shown = bought.assign(event_type="impression", event_id=bought["event_id"] + "-shown")
    other = shown.assign(basket_id="request", event_id=shown["event_id"] + "-other")
    again = bought.head(1).assign(event_id="scanned twice")
    events = choose(pd.concat([shown, other, bought, again]))
    shopper = Shopper(ENDPOINT)
    counts = replay_events(events, TOPIC, paper, 0, shopper=shopper)
    shopper.close()
    assert [(question["request_id"], question["basket"]) for question in asked] == [
        ("basket-000", ["item-0", "item-1"]),
        ("basket-001", ["item-0", "item-1"]),
    ]
    assert counts.messages == len(events) == 25


def test_an_endpoint_that_is_away_costs_no_events(paper: Paper, caplog: pytest.LogCaptureFixture) -> None:
    counts = replay_events(choose(minute_shop(6, 3)), TOPIC, paper, 0, shopper=Shopper("http://127.0.0.1:1"))
    assert (counts.messages, counts.errors, counts.asked) == (18, 6, 0)
    assert sum("did not answer" in record.message for record in caplog.records) == 1


def test_a_slow_broker_makes_the_replay_wait_and_report_it(
    paper: Paper, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("feature_repo.stream.replay_events.REPORT_S", 0.05)
    paper.full_for = 20
    reports = list[str]()
    counts = replay_events(choose(minute_shop()), TOPIC, paper, 0, report=reports.append)
    assert any("waiting for it" in text for text in reports)
    assert counts.messages == len(paper.messages()) == 80


class Unconfirmed(Paper):
    """A broker that confirms no message."""

    def flush(self, timeout_s: float) -> bool:
        return False


def replayed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, delivery: type[Delivery], *arguments: str
) -> Result:
    """Run the command on the shop with another delivery."""
    from pipelines.cli.shell import main

    monkeypatch.setattr("feature_repo.stream.delivery.Delivery", delivery)
    monkeypatch.setattr("pipelines.cli.events.CONFIRM_S", 0)
    monkeypatch.setattr("feature_repo.stream.kafka.create_topics", lambda settings: None)
    write_dataset(tmp_path / "dataset", Dataset(minute_shop(), pd.DataFrame({"item_id": ["item-0"]})))
    command = ["--home", str(tmp_path), "replay-events", "--data", str(tmp_path / "dataset")]
    return CliRunner().invoke(main, [*command, *arguments])


def test_the_command_ends_with_3_when_the_broker_does_not_confirm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = replayed(tmp_path, monkeypatch, Unconfirmed, "--output", "json")
    assert done.exit_code == 3
    assert json.loads(done.stdout)["messages"] == 80
    assert "has not confirmed everything: replay the data again" in done.stderr


def test_the_command_ends_with_3_when_the_endpoint_answers_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = replayed(tmp_path, monkeypatch, Paper, "--endpoint", "http://127.0.0.1:1")
    assert done.exit_code == 3
    assert "http://127.0.0.1:1 answered no question ([Errno 111] Connection refused): start it" in done.stderr


@pytest.mark.parametrize("asked", ["Bearer the-token-of-the-till"], indirect=True)
def test_the_shopper_has_the_first_token_of_the_callers(
    asked: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = replayed(tmp_path, monkeypatch, Paper, "--endpoint", ENDPOINT)
    assert (refused.exit_code, asked) == (3, [])
    assert f"{ENDPOINT} answered no question (status 401: b'{{" in refused.stderr
    assert "): give one of its tokens in RECO_CALLER_TOKENS" in refused.stderr
    monkeypatch.setenv("RECO_CALLER_TOKENS", "the-token-of-the-till, the-token-of-the-app")
    assert replayed(tmp_path, monkeypatch, Paper, "--endpoint", ENDPOINT).exit_code == 0
    assert len(asked) == 20


@pytest.mark.slow
def test_the_command_replays_a_data_set(tmp_path: Path, broker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from pipelines.cli.shell import main

    monkeypatch.setenv("RECO_KAFKA_BOOTSTRAP", broker.bootstrap)
    arguments = ["--home", str(tmp_path), "replay-events", "--data", "toy", "--limit", "1000"]
    arguments += ["--output", "json"]
    done = CliRunner().invoke(main, [*arguments, "--poison", "0.01", "--duplicates", "0.02"])
    assert done.exit_code == 0, done.output
    document = json.loads(done.stdout)
    assert (document["events"], document["messages"], document["refused"]) == (1_000, 1_030, 0)
    assert document["unconfirmed_bytes"] == 0
    broker.stop()
    away = CliRunner().invoke(main, arguments)
    assert away.exit_code == 3
    assert "RECO_KAFKA_BOOTSTRAP" in away.stderr
