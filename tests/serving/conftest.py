"""A small bundle with graphs of known arithmetic, an online store in Feast's layout, a running endpoint."""

import asyncio
import contextlib
import ipaddress
import json
import math
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import faiss
import httpx
import numpy as np
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from prometheus_client import REGISTRY

from feature_repo.aggregates import UserEvents, pack
from feature_repo.schema import BASKET_LENGTH, CATEGORICAL, DENSE_NAMES, FRESH, HISTORY_LENGTH
from feature_repo.statistics import NO_ITEM, SOLD_7D, Statistics, write_statistics
from serving.answer.recommender import Asked, Recommender, answer_golden, open_bundle, open_recommender
from serving.checkout.budgets import FIRST
from serving.checkout.checkout import Checkout, Rank, Turn, rank_here
from serving.release.bundle import Bundle, RankingSettings, load_bundle, seal_bundle
from serving.release.golden import GoldenRequest, write_golden
from serving.schemas import Call, Request, Response
from serving.settings import Settings
from serving.stages.profiles import ItemFilter, Profile
from serving.stages.retrieval import Quotas
from serving.stores.online_features import open_store
from tests.chaos.rows import write_store

CUT = datetime(2017, 11, 27, 5, tzinfo=UTC)
ITEMS, TYPES, STORES, WIDTH = 240, 12, 3, 8
V1 = "/v1/models/checkout:predict"


def build_statistics(items: int = ITEMS) -> tuple[Statistics, dict[str, list[str]]]:
    """Item 10 goes with 11, 12, ...; smaller codes sell better; type = code modulo TYPES."""
    rng = np.random.default_rng(7)
    code = np.arange(items)
    sold = (5_000.0 / (code + 10)).astype(np.float32) + 5
    neighbours = np.full((items, 20), NO_ITEM, np.int32)
    for step in range(1, 11):
        neighbours[:, step - 1] = np.where(code + step < items, code + step, NO_ITEM)
    together = np.where(neighbours >= 0, np.float32(12) - np.arange(1, 21, dtype=np.float32).clip(max=11), 0)
    categorical = np.stack([code % TYPES + 1, code % 4 + 1, code % 2 + 1], axis=1).astype(np.int32)
    vocabulary = {
        "type": ["", *(f"type {n}" for n in range(TYPES))],
        "category": ["", *(f"category {n}" for n in range(4))],
        "department": ["", "grocery", "household"],
    }
    shuffled = [np.roll(code, -3 * store)[:100] for store in range(STORES)]
    statistics = Statistics(
        item_ids=np.array([f"{1_000_000 + n}" for n in code]),
        categorical=categorical,
        is_private=(code % 3 == 0).astype(np.float32),
        price=rng.uniform(1, 9, items).astype(np.float32),
        discount_ratio=rng.uniform(0, 0.5, items).astype(np.float32),
        purchases_4w=sold / 10,
        purchases_13w=sold / 4,
        basket_count=sold,
        buyer_count=sold / 2,
        repeat_ratio=rng.uniform(0, 1, items).astype(np.float32),
        interval_days=rng.uniform(5, 60, items).astype(np.float32),
        age_days=rng.uniform(30, 700, items).astype(np.float32),
        neighbours=neighbours,
        together_count=together.astype(np.float32),
        type_lift=rng.normal(0, 1, (TYPES + 1, TYPES + 1)).astype(np.float16),
        popular=code[:120].astype(np.int32),
        store_ids=np.array([f"store-{n}" for n in range(STORES)]),
        store_popular=np.stack(shuffled).astype(np.int32),
        total_baskets=np.array(4_000.0),
        fresh=rng.uniform(0, 9, (items, len(FRESH))).astype(np.float32),
        manufacturer=np.zeros(items, np.int32),
    )
    statistics.fresh[:, SOLD_7D] = 0  # so that no best seller of the week takes the tower's place
    return statistics, vocabulary


def write_graph(graph: str, weights: dict[str, np.ndarray], file: Path) -> None:
    """Write a graph, given in ONNX's own notation, with its weights."""
    from onnx import checker, helper, numpy_helper, parser

    parsed = parser.parse_graph(graph)
    parsed.initializer.extend(numpy_helper.from_array(array, name) for name, array in weights.items())
    model = helper.make_model(parsed, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    checker.check_model(model)
    file.write_bytes(model.SerializeToString())


TOWER = f"""
query_tower (
    int64[n,{HISTORY_LENGTH}] history,
    float[n,{HISTORY_LENGTH}] history_weight,
    int64[n,{BASKET_LENGTH}] basket
) => (float[n,{WIDTH}] vector) {{
    now_rows = Gather(table, basket)
    now = ReduceMean<keepdims=0>(now_rows, one)
    past_rows = Gather(table, history)
    weight = Unsqueeze(history_weight, two)
    weighted = Mul(past_rows, weight)
    past = ReduceMean<keepdims=0>(weighted, one)
    vector = Add(now, past)
}}
"""
RANKER = f"""
ranker (
    float[n,{len(DENSE_NAMES)}] dense, int64[n,{len(CATEGORICAL)}] categorical
) => (float[n] score) {{
    squashed = Tanh(dense)
    column = MatMul(squashed, w)
    linear = Squeeze(column, one)
    type_column = Slice(categorical, one, two, one)
    kind = Squeeze(type_column, one)
    type_bias = Gather(bias, kind)
    logit = Add(linear, type_bias)
    score = Sigmoid(logit)
}}
"""


def write_graphs(items: int, path: Path) -> None:
    """Query = mean basket vector + weighted history vector; score = sigmoid(w . tanh(features) + bias)."""
    rng = np.random.default_rng(3)
    vectors = rng.normal(0, 1, (items + 1, WIDTH)).astype(np.float32)
    vectors[0] = 0
    flat = faiss.IndexFlatIP(WIDTH)
    flat.add(vectors[1:])
    faiss.write_index(flat, str(path / "index.faiss"))
    axes = {"one": np.array([1], np.int64), "two": np.array([2], np.int64)}
    write_graph(TOWER, {"table": vectors, **axes}, path / "query_tower.onnx")
    weight = rng.normal(0, 0.2, (len(DENSE_NAMES), 1)).astype(np.float32)
    weight[DENSE_NAMES.index("user_has_item")] = 3.0  # items bought before come first
    bias = rng.normal(-2, 0.3, (TYPES + 1,)).astype(np.float32)
    write_graph(RANKER, {"w": weight, "bias": bias, **axes}, path / "ranker.onnx")


def seal_golden(path: Path, records: Sequence[GoldenRequest], settings: RankingSettings, cut: str) -> None:
    """Seal a bundle whose golden answers are its own."""
    seal_bundle(path, cut=cut, settings=settings, made_from={})
    bundle = load_bundle(path)
    write_golden(path, [replace(golden, expected=answer_golden(bundle, golden)) for golden in records])
    seal_bundle(path, cut=cut, settings=settings, made_from={})


def build_bundle(path: Path, items: int = ITEMS) -> Path:
    """Write and seal a bundle with one golden request."""
    path.mkdir(parents=True)
    statistics, vocabulary = build_statistics(items)
    write_statistics(path / "statistics", statistics, vocabulary)
    write_graphs(items, path)
    premium = Profile(Quotas(tower=120), items=ItemFilter("price", 0.8))
    settings = RankingSettings(Quotas(), 0.95, profiles={"premium": premium})
    write_golden(path, [])
    (path / "certificates.json").write_text("[]")  # the registry reads them, the endpoint does not
    request = {"request_id": "golden-0", "basket": ["1000010"], "at": CUT.isoformat(), "k": 10}
    seal_golden(path, [GoldenRequest(request, None)], settings, CUT.isoformat())
    return path


def weekly(baskets: list[list[str]]) -> list[tuple[float, list[str], float, float]]:
    """One basket a week, the last one a week before the cut, as `row_of` takes them."""
    first = CUT.timestamp() - len(baskets) * 7 * 86_400
    return [
        (first + week * 7 * 86_400, basket, 10.0 * len(basket), 1.0)
        for week, basket in enumerate(reversed(baskets))
    ]


USERS = {
    "u1": [["1000005", "1000050"], ["1000005", "1000051", "1000120"], ["1000005", "1000010"]],
    "u2": [["1000200", "1000201"]] * 4,
}


def write_users(file: Path, row_of: Callable[..., UserEvents]) -> None:
    """Write an online store with the rows of `USERS`."""
    rows = {user: pack(row_of(weekly(baskets)), user) for user, baskets in USERS.items()}
    write_store(file, rows, CUT.timestamp())


@pytest.fixture(scope="session")
def toy_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_bundle(tmp_path_factory.mktemp("bundles") / "toy")


@pytest.fixture(scope="session")
def toy_store(tmp_path_factory: pytest.TempPathFactory, row_of: Callable[..., UserEvents]) -> str:
    file = tmp_path_factory.mktemp("store") / "online_store.db"
    write_users(file, row_of)
    return f"sqlite:///{file}"


def refused_start(bundle: Path, settings: Settings, **environment: str) -> tuple[int, str]:
    """Start an endpoint that must refuse to; return its exit code and its message, which is no traceback."""
    done = subprocess.run(
        [sys.executable, "-m", "serving.server", "--bundle", str(bundle)],
        env={**settings.to_env(), **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert "Traceback" not in done.stderr
    return done.returncode, done.stderr


def metric(name: str, **labels: str) -> float:
    """The value of a metric in this process; 0 before it counts for the first time with these labels."""
    names = {family.name for family in REGISTRY.collect()}
    assert {name, re.sub("_(total|sum|count|bucket)$", "", name)} & names, "no such metric"
    return REGISTRY.get_sample_value(name, labels) or 0.0


def call(limit_s: float = 1e6, waited_s: float = 0.0, priority: str = "checkout") -> Call:
    """A call that has so many seconds in all, and has waited for some of them."""
    arrived = time.perf_counter() - waited_s
    return Call(arrived, arrived + limit_s, "given", priority=priority)


def find_in(seconds: Iterable[float], recommender: Recommender, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make retrievals take so long, one after the other, by a clock that jumps: no test waits."""
    near, now, jumped, left = recommender.near, time.perf_counter, [0.0], iter(seconds)

    def slow(asked: Asked) -> np.ndarray:
        jumped[0] += next(left, 0.0)
        return near(asked)

    monkeypatch.setattr(recommender, "near", slow)
    monkeypatch.setattr(time, "perf_counter", lambda: now() + jumped[0])


def tensors(**inputs: Any) -> dict[str, Any]:
    """The body of V2 with these inputs: BYTES, unless they are numbers."""
    made = []
    for name, value in inputs.items():
        values = value if isinstance(value, list) else [value]
        datatype = "INT32" if values and isinstance(values[0], int) else "BYTES"
        made.append({"name": name, "datatype": datatype, "shape": [len(values)], "data": values})
    return {"inputs": made}


def ask(client: httpx.Client, request: dict[str, Any]) -> dict[str, Any]:
    answer = client.post(V1, json={"instances": [request]})
    assert answer.status_code == 200, answer.text
    (prediction,) = answer.json()["predictions"]
    return prediction


def connect(http: str) -> socket.socket:
    host, port = http.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=5)


@pytest.fixture(scope="session")
def toy_opened(toy_bundle: Path) -> Bundle:
    """The toy bundle in memory, once: each opening holds some twenty files."""
    return open_bundle(toy_bundle)


@pytest.fixture
def recommender(toy_bundle: Path, toy_opened: Bundle, toy_store: str) -> Recommender:
    """The toy bundle with the toy store, of the test's own."""
    return open_recommender(toy_bundle, open_store(toy_store), open_bundle=lambda _: toy_opened)


@dataclass
class Running:
    """An endpoint in a process of its own."""

    process: subprocess.Popen
    http: str
    grpc: str
    ready: dict
    settings: Settings
    stderr: list[str]  # its lines so far
    reader: threading.Thread


StartEndpoint = Callable[..., Running]


def start(bundle: Path | None, settings: Settings, timeout_s: float = 120) -> Running:
    """Start `python -m serving.server` on ports that the system chooses and wait for its ready line.

    Without a bundle it serves, and follows, the champion of the settings' home.
    """
    settings = replace(settings, http_port=0, grpc_port=0)
    served = ["--home", str(settings.home)] if bundle is None else ["--bundle", str(bundle)]
    process = subprocess.Popen(
        [sys.executable, "-m", "serving.server", *served],
        env=settings.to_env(),
        stderr=subprocess.PIPE,
        text=True,
    )
    lines: list[str] = []
    found = threading.Event()

    def read() -> None:
        assert process.stderr is not None
        for line in process.stderr:
            lines.append(line)
            if '"event": "ready"' in line:
                found.set()
        found.set()

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    found.wait(timeout_s)
    ready = [json.loads(line) for line in lines if '"event": "ready"' in line]
    if not ready:
        process.kill()
        pytest.fail("the endpoint did not start:\n" + "".join(lines))
    return Running(process, ready[0]["http"], ready[0]["grpc"], ready[0], settings, lines, reader)


@contextlib.contextmanager
def starting() -> Iterator[StartEndpoint]:
    """Start endpoints that end with the block, by their process id."""
    started: list[Running] = []

    def begin(bundle: Path | None, settings: Settings) -> Running:
        started.append(start(bundle, settings))
        return started[-1]

    try:
        yield begin
    finally:
        for running in started:
            if running.process.poll() is None:
                running.process.kill()  # its children end, too
            running.process.wait()
            running.reader.join()
            if running.process.stderr:
                running.process.stderr.close()


@pytest.fixture
def start_endpoint() -> Iterator[StartEndpoint]:
    with starting() as begin:
        yield begin


@pytest.fixture
def start_toy(
    toy_bundle: Path, toy_store: str, start_endpoint: StartEndpoint, tmp_path: Path
) -> Callable[..., Running]:
    """Start an endpoint of the test's own with the toy bundle; the arguments are its other settings."""

    def begin(**settings: Any) -> Running:
        usual: dict[str, Any] = {
            "home": tmp_path,
            "store_url": toy_store,
            "deadline_ms": 30_000.0,
            "log": False,
        }
        return start_endpoint(toy_bundle, Settings(**usual | settings))

    return begin


@pytest.fixture(scope="session")
def endpoint(toy_bundle: Path, toy_store: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """One endpoint for all tests that only send requests; its deadline is long, this machine is busy."""
    home = tmp_path_factory.mktemp("home")
    settings = Settings(home=home, store_url=toy_store, deadline_ms=30_000.0, log_segment_s=0.5)
    with starting() as begin:
        yield begin(toy_bundle, settings)


@pytest.fixture(scope="session")
def client(endpoint: Running) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=endpoint.http, timeout=10) as client:
        yield client


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """ca.pem signed cert.pem (with key.pem) for the address 127.0.0.1 and the name recommender.shop."""
    folder = tmp_path_factory.mktemp("certificates")
    now = datetime.now(UTC)
    keys = {name: ec.generate_private_key(ec.SECP256R1()) for name in ("ca", "cert")}
    names = {name: x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)]) for name in keys}
    for name in keys:
        builder = (
            x509.CertificateBuilder(names["ca"], names[name], keys[name].public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - timedelta(hours=1))
            .not_valid_after(now + timedelta(days=1))
            .add_extension(x509.BasicConstraints(name == "ca", None), critical=True)
        )
        if name == "cert":
            own = x509.IPAddress(ipaddress.ip_address("127.0.0.1")), x509.DNSName("recommender.shop")
            builder = builder.add_extension(x509.SubjectAlternativeName(own), critical=False)
        signed = builder.sign(keys["ca"], hashes.SHA256())
        (folder / f"{name}.pem").write_bytes(signed.public_bytes(serialization.Encoding.PEM))
    key = keys["cert"].private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    (folder / "key.pem").write_bytes(key)
    return folder


def experienced(
    checkout: Checkout,
    retrieval_s: float = 0.0,
    ranking_s: float = 0.0,
    reranking_s: float = 0.0,
    features_s: float = 0.0,
) -> Checkout:
    """Train the budgets with these stage times, which never decay; the ranking's is for 200 candidates."""
    budgets = checkout.service.budgets
    for _ in range(FIRST):
        budgets.features.learn(features_s, math.inf)
        budgets.retrieval.learn(retrieval_s, math.inf)
        budgets.ranking.learn(ranking_s, math.inf, 200)
        budgets.reranking.learn(reranking_s, math.inf)
    return checkout


class Counting:
    """Ranks here, and counts the calls; a failure can be injected."""

    def __init__(self, error: Exception | None = None, wait_s: float = 0.0, fails: float = math.inf) -> None:
        """Take the error to raise, the duration, and the number of failures before the first success."""
        self.turns: list[Turn] = []
        self.error, self.wait_s, self.fails = error, wait_s, fails

    async def __call__(self, turn: Turn) -> np.ndarray:
        self.turns.append(turn)
        await asyncio.sleep(self.wait_s)
        if self.error is not None and len(self.turns) <= self.fails:
            raise self.error
        return await rank_here(turn)


def ask_all(recommender: Recommender, rank: Rank, *requests: Request, limit_s: float = 1e6) -> list[Response]:
    async def ask() -> list[Response]:
        checkout, given = Checkout(recommender, 1e6, rank), call(limit_s)
        return await asyncio.gather(*(checkout.answer(request, given) for request in requests))

    return asyncio.run(ask())


def ids(response: Response) -> list[str]:
    return [item.item_id for item in response.items]


def shown(response: Response) -> list[tuple[str, float, str, str]]:
    return [(item.item_id, item.score, item.source, item.reason) for item in response.items]
