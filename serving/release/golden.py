"""CONTRACT golden requests: the requests that a bundle names, with the answers that it must give.

One line of `golden.jsonl` is {"request": ..., "history": packed row in base64 or null, "expected": [[item id,
score], ...]}. Whoever loads a bundle asks them before the bundle answers any shopper.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from feature_repo.atomic_files import read_json, read_regular
from serving.errors import BundleInvalid
from serving.schemas import Request, parse_request
from serving.stores.online_features import MemoryStore, UserRow

FILE = "golden.jsonl"
MAX_BYTES = 64 << 20  # a bundle's take 130 KB
TOLERANCE = 1e-4  # of a probability: other processors round differently
Scores = list[tuple[str, float]]  # item id and score, best first


@dataclass(frozen=True)
class GoldenRequest:
    """One request of a bundle's own, with its shopper's history and the answer that was recorded."""

    request: dict[str, Any]
    history: str | None  # a packed row in base64
    expected: Sequence[Sequence[Any]] = ()  # item id and score, best first

    def parse(self) -> Request:
        """Return the request as the path takes it."""
        return parse_request(self.request, now=0.0, default_id="golden")

    def write_row(self, store: MemoryStore) -> None:
        """Write the shopper's history, if there is any."""
        request = self.parse()
        if self.history is not None and request.user_id is not None:
            store.write(request.user_id, UserRow(base64.b64decode(self.history), request.at))

    def store(self) -> MemoryStore:
        """Return a store that knows this request's shopper alone."""
        store = MemoryStore()
        self.write_row(store)
        return store


def read_golden(bundle: Path) -> list[GoldenRequest]:
    """Return the golden requests of a bundle.

    Raises:
        BundleInvalid: the file is not there, or holds no golden requests.
    """
    file = bundle / FILE
    try:
        records = [GoldenRequest(**read_json(line)) for line in read_regular(file, MAX_BYTES).splitlines()]
    except (OSError, ValueError, TypeError) as error:
        raise BundleInvalid(
            f"the golden requests of {bundle} can't be read "
            f"({error.__class__.__name__}: {str(error)[:200]}): assemble the bundle again"
        ) from error
    if not records:
        raise BundleInvalid(f"{file} holds no request: assemble the bundle again")
    return records


def write_golden(bundle: Path, records: Iterable[GoldenRequest]) -> None:
    """Write the golden requests of a bundle that is not sealed yet."""
    (bundle / FILE).write_text("".join(json.dumps(asdict(record)) + "\n" for record in records))


def verify_answers(bundle: Path, bundle_id: str, answer: Callable[[GoldenRequest], Scores]) -> int:
    """Ask the golden requests and compare; return their number.

    Raises:
        BundleInvalid: naming the request, the answer and the expected one; or they can't be read or asked.
    """
    records = read_golden(bundle)
    for record in records:
        try:
            scores, request_id = answer(record), record.request["request_id"]
            is_same = same_answer(scores, record.expected)
        except BundleInvalid:
            raise
        except Exception as error:
            raise BundleInvalid(
                f"the golden requests of {bundle} can't be asked "
                f"({error.__class__.__name__}: {str(error)[:200]}): assemble the bundle again"
            ) from error
        if not is_same:
            raise BundleInvalid(
                f"bundle {bundle_id} answers golden request {request_id} "
                f"with {scores[:3]}…, recorded was {list(record.expected[:3])}…: "
                "the models or this code are not those it was built with; serve it with that code, "
                "or train again with `reco run --data DIR`"
            )
    return len(records)


def same_answer(answer: Scores, expected: Sequence[Sequence[Any]]) -> bool:
    """Compare two answers: the same items, but for one on the edge of the list, with the same scores.

    Items whose scores are as good as equal may change places on another processor.
    """
    scores = dict(answer)
    pairs = [(scores[item], score) for item, score in expected if item in scores]
    if len(answer) != len(expected) or len(pairs) < len(expected) - 1:
        return False
    return all(abs(score - recorded) <= TOLERANCE for score, recorded in pairs)
