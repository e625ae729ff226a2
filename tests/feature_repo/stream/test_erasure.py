"""The list of forgotten users: the events it covers, its privacy, and its atomic replacement."""

import json
import stat
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from feature_repo.facts import Fact
from feature_repo.stream.erasure import FILE, Forgotten, ForgottenInvalid, forget, microseconds, stamp

NOON = microseconds(datetime(2026, 3, 2, 12, tzinfo=UTC))


def test_the_list_covers_earlier_events_of_its_users_only(tmp_path: Path) -> None:
    forget(tmp_path, "u1", NOON)
    forgotten = Forgotten.load(tmp_path)
    assert forgotten.covers("u1", NOON)
    assert not forgotten.covers("u1", NOON + 1)
    assert not forgotten.covers("u10", 0)
    assert not forgotten.covers("U1", 0)
    assert (forgotten.until("u1"), forgotten.until("u10"), len(forgotten)) == (NOON, None, 1)


def test_the_file_names_no_user_and_only_its_owner_may_read_it(tmp_path: Path) -> None:
    forget(tmp_path, "käte", NOON)
    forget(tmp_path / "other", "käte", NOON)
    texts = [(home / FILE).read_text() for home in (tmp_path, tmp_path / "other")]
    assert "käte" not in texts[0]
    assert "k\\u00e4te" not in texts[0]
    first, second = ({*json.loads(text)["until"]} for text in texts)
    assert not first & second  # each home has its own salt: two lists cannot be joined
    assert stat.S_IMODE((tmp_path / FILE).stat().st_mode) == 0o600
    assert [file.name for file in tmp_path.glob("*") if file.is_file()] == [FILE]


def test_a_user_forgotten_twice_has_the_later_time(tmp_path: Path) -> None:
    for at in (NOON, NOON + 5, NOON + 3):
        forget(tmp_path, "u1", at)
    forget(tmp_path, "u2", NOON)
    forgotten = Forgotten.load(tmp_path)
    assert [forgotten.until(user) for user in ("u1", "u2")] == [NOON + 5, NOON]


def test_a_reader_sees_an_added_user(tmp_path: Path) -> None:
    stamps = [stamp(tmp_path)]
    for user in ("u1", "u2"):
        forget(tmp_path, user, NOON)
        stamps.append(stamp(tmp_path))
    assert stamps[0] is None
    assert len({*stamps}) == 3


def test_a_home_without_a_list_has_no_forgotten_users(tmp_path: Path) -> None:
    for home in (None, tmp_path, tmp_path / "no such folder"):
        assert not Forgotten.load(home).covers("u1", 0)


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"salt": "xx", "until": {}}', '{"salt": "", "until": {"a": 1}}']
)
def test_a_damaged_list_is_an_error_and_not_an_empty_one(tmp_path: Path, text: str) -> None:
    (tmp_path / FILE).write_text(text)
    with pytest.raises(ForgottenInvalid, match="is not a list of forgotten users"):
        Forgotten.load(tmp_path)


def test_many_events_are_covered_like_single_events(tmp_path: Path) -> None:
    forget(tmp_path, "u1", NOON)
    forget(tmp_path, "u3", NOON + 60_000_000)
    forgotten = Forgotten.load(tmp_path)
    users = ["u1", "u2", None, "u3", "u1", "u10", "u3"]
    at = np.array([NOON, 0, 0, NOON + 1, NOON + 1, 0, NOON + 60_000_001])
    mask = forgotten.covered(pa.array(users, pa.string()), at)
    assert mask.tolist() == [
        bool(u) and forgotten.covers(str(u), int(t)) for u, t in zip(users, at, strict=True)
    ]
    assert mask.tolist() == [True, False, False, True, False, False, False]
    table = pa.table({"user_id": users, "at": pa.array(at).cast(pa.timestamp("us", "UTC"))})
    chunks = pa.concat_tables([table.slice(0, 3), table.slice(3)])
    assert forgotten.without(chunks)["user_id"].to_pylist() == ["u2", None, "u1", "u10", "u3"]
    assert Forgotten().without(chunks) is chunks


def test_a_row_keeps_only_later_events(tmp_path: Path, row_of: Any) -> None:
    forget(tmp_path, "u1", NOON)
    forgotten = Forgotten.load(tmp_path)
    second = NOON / 1e6
    row = row_of(
        [(second - 9, ["old"], 1.0, 0.0), (second, ["tea"], 1.0, 0.0), (second + 1, ["milk"], 1.0, 0.0)]
    )
    assert forgotten.cut("u2", row) is row
    cut = forgotten.cut("u1", row)
    assert cut.items.tolist() == ["milk"]  # the list of items lacks the others too
    assert cut.at.tolist() == [second + 1]
    assert forgotten.cut("u1", cut) is cut
    assert len(forgotten.cut("u1", row.before(second + 1))) == 0


def test_an_earlier_coupon_of_a_forgotten_user_is_dropped_and_a_general_one_stays(tmp_path: Path) -> None:
    forget(tmp_path, "u1", NOON)
    coupons = [
        Fact(str(number), "coupon", "tea", "TEA", NOON / 1e6 + late, None, user)
        for number, (user, late) in enumerate([("u1", 0), ("u1", 1), ("u10", 0), (None, 0)])
    ]
    assert Forgotten.load(tmp_path).facts_that_count(coupons) == coupons[1:]
