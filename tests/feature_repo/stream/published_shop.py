"""The events of a shop with a basket a minute, and the note of a publication."""

import json
from pathlib import Path
from typing import Any

import pandas as pd

from feature_repo.events import complete_columns
from feature_repo.stream.publication import FILE as PUBLICATION

AT = "2020-01-01T00:00:00Z"
FIELDS: dict[str, Any] = {"bundle_id": "b1", "cut": AT, "until": AT, "created_at": AT, "users": 3}


def write_note(home: Path, **changed: Any) -> None:
    (home / PUBLICATION).write_text(json.dumps({"kind": "online_store", "items": 9, **FIELDS, **changed}))


def minute_shop(baskets: int = 20, lines: int = 4) -> pd.DataFrame:
    """A basket a minute, of one shopper each."""
    start = pd.Timestamp("2024-05-01T10:00:00Z")
    return complete_columns(
        pd.DataFrame(
            {
                "user_id": [f"user-{b}" for b in range(baskets) for _ in range(lines)],
                "basket_id": [f"basket-{b:03d}" for b in range(baskets) for _ in range(lines)],
                "item_id": [f"item-{line}" for _ in range(baskets) for line in range(lines)],
                "at": [start + pd.Timedelta(minutes=b) for b in range(baskets) for _ in range(lines)],
                "store_id": ["" if b % 2 else "406" for b in range(baskets) for _ in range(lines)],
            }
        )
    )
