"""The bundle's golden requests -> asked through the whole HTTP stack, before the first caller comes.

What is built or loaded at a first use is there then. Nothing of it is logged, counted or traced: the answers
come from a recommender with the bundle's models, its own ranker, a store in memory and no log.
"""

from __future__ import annotations

from typing import Any

import msgspec

from serving.answer.recommender import Recommender
from serving.api.http_routes import PREDICT, RECOMMENDATIONS, App
from serving.checkout.checkout import Checkout
from serving.errors import BundleInvalid
from serving.release.golden import read_golden
from serving.stores.online_features import MemoryStore

V2 = "/v2/models/checkout/infer"


async def rehearse(app: App, checkout: Checkout) -> None:
    """Ask each golden request over our route, V1 and V2.

    Raises:
        BundleInvalid: an answer is no 200, or a degraded one.
    """
    bundle = checkout.recommender.bundle
    records = read_golden(bundle.path)
    store = MemoryStore()
    with checkout.rehearsing(Recommender(bundle, store)):
        for record in records:
            request = record.request
            record.write_row(store)
            for path, document in (
                (RECOMMENDATIONS, request),
                (PREDICT, {"instances": [request]}),
                (V2, {"inputs": _tensors(request)}),
            ):
                status, body = await _post(app, path, msgspec.json.encode(document))
                if status != 200 or b'"degraded":false' not in body:
                    raise BundleInvalid(
                        f"bundle {bundle.bundle_id} answers golden request {request['request_id']} "
                        f"over {path} with {status} {body[:200]!r}, "
                        "expected the full path: train again with `reco run --data DIR`"
                    )


def _tensors(request: dict[str, Any]) -> list[dict[str, Any]]:
    columns = {name: value if isinstance(value, list) else [value] for name, value in request.items()}
    return [
        {"name": n, "datatype": "INT32" if n == "k" else "BYTES", "shape": [len(c)], "data": c}
        for n, c in columns.items()
        if c != [None]
    ]


async def _post(app: App, path: str, body: bytes) -> tuple[int, bytes]:
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(b"content-length", b"%d" % len(body))],
        "client": None,
        "server": None,
    }
    status, parts = 0, []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Any) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
        else:
            parts.append(message.get("body", b""))

    await app(scope, receive, send)
    return status, b"".join(parts)
