"""Request lines -> response lines, through the very path that is served, with no server around it."""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from components.home import command
from pipelines.inspect.items import check_items
from serving.release.champion import read_champion
from serving.settings import Settings

if TYPE_CHECKING:
    from serving.answer.recommender import Recommender
    from serving.schemas import Request
    from serving.stores.online_features import UserRow


def open_champion(
    settings: Settings, line: dict[str, Any] | None = None, own_rules: bool = False
) -> Recommender:
    """Return the recommender that `reco serve` would serve, without the prediction log.

    Args:
        settings: of the endpoint.
        line: the request for it, which is checked before the bundle is opened: that takes a second.
        own_rules: the caller brings rules, so the file of the endpoint is not read.

    Raises:
        NoChampion: nothing was promoted.
        InvalidRequest: naming the field and the expected value.
        BundleInvalid: the bundle is broken.
        RulesUnread: the rules file cannot be read: without it, banned items would be shown.
        ItemUnknown: the bundle does not know an item of the basket.
    """
    from serving.answer.recommender import open_recommender
    from serving.errors import RulesUnread
    from serving.schemas import parse_request
    from serving.shop.fact_store import open_fact_store
    from serving.stores.online_features import open_store

    path = read_champion(settings.home).bundle(settings.home)
    if line is not None:
        parse_request({**line, "profile": None}, now=0.0, default_id="question")
    store, facts = open_store(settings.online_store_url), open_fact_store(settings.fact_store_url)
    rules = None if own_rules else settings.rules_path
    recommender = open_recommender(path, store, None, facts, rules=rules)
    if fault := recommender.facts.rules_fault:
        recommender.facts.close()
        check_it = command(settings.home, f"rules check {shlex.quote(str(rules))}")
        raise RulesUnread(f"{rules}: {fault}; no earlier rules are known here: `{check_it}` names each line")
    check_items(recommender.bundle, line["basket"] if line else ())
    return recommender


def notes_on(recommender: Recommender, line: dict[str, Any]) -> list[str]:
    """Return notes on a shopper without a history, on an unknown store, and on data too old for now."""
    from serving.schemas import parse_request

    at = {"at": recommender.bundle.manifest["cut"], "profile": None}  # then no row counts as too old
    request = parse_request({**line, **at}, now=0.0, default_id="question")
    known, notes = recommender.read(request), []
    if request.user_id is not None and known.row is None and known.degraded_reason is None:
        notes.append(f"user {request.user_id} has no history here: the answer is that of a stranger")
    if request.store_id is not None and request.store_id not in recommender.bundle.statistics.store_row:
        notes.append(f"store {request.store_id} is not in the bundle: best sellers of all stores are used")
    if "at" not in line and (note := _old_data(request, known.row)):
        notes.append(note)
    return notes


def _old_data(request: Request, row: UserRow | None) -> str:
    """Return a note on the age of the row, else of the cut, if an answer of now cannot use it."""
    from feature_repo.aggregates import DAY_S
    from feature_repo.snapshots import USER_TTL_DAYS

    whose, newest = "the bundle's", request.at
    if row is not None:
        whose, newest = f"{request.user_id}'s", row.written_at
    days = (time.time() - newest) / DAY_S
    if days <= USER_TTL_DAYS:
        return ""
    then = datetime.fromtimestamp(newest, UTC)
    return (
        f"asked for now: {whose} newest data are {days:,.0f} days old; for their time add --at {then:%FT%TZ}"
    )


def answer_lines(recommender: Recommender, lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """Yield one response for each request line; a line that breaks the contract gives its number and why."""
    import orjson

    from serving.errors import InvalidRequest
    from serving.schemas import parse_request

    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            request = parse_request(
                orjson.loads(line),
                now=time.time(),
                default_id=f"line-{number}",
                profiles=recommender.bundle.profiles,
            )
        except orjson.JSONDecodeError as error:
            yield {"line": number, "error": f"not JSON ({error}): expected one request object a line"}
        except InvalidRequest as error:
            yield {"line": number, "error": str(error)}
        else:
            yield recommender.recommend(request).to_dict()


def evaluation_requests(bundle: Path, limit: int) -> list[dict[str, Any]]:
    """Return request lines that real baskets made when the bundle was evaluated.

    Raises:
        BundleInvalid: the bundle holds none.
    """
    import pyarrow.parquet as pq

    from serving.errors import BundleInvalid

    file = bundle / "reference_log.parquet"
    if not file.is_file():
        raise BundleInvalid(f"{bundle} holds no reference_log.parquet: run evaluate_bundle on it first")
    rows = pq.read_table(file, columns=["user_id", "basket", "store_id", "at"]).slice(0, limit).to_pylist()
    return [
        {
            name: value.isoformat() if name == "at" else value
            for name, value in row.items()
            if value is not None
        }
        for row in rows
    ]
