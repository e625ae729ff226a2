"""A shop whose events two trainings see, one after the other, and the rows that a store holds of it."""

from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pandas as pd

from components.data.fit_statistics import fit_statistics
from components.data.materialize_features import materialize_features
from feature_repo.events import Dataset, write_dataset
from serving.stores.online_features import UserRow
from tests.chaos.rows import patient_store

WEEK_S = 7 * 86_400
START = 1_700_000_000
CUT = START + 30 * WEEK_S
END = CUT + WEEK_S  # of the data set that the earlier training had; the later one had all until LATER
LATER = CUT + 2 * WEEK_S
USERS = [str(user) for user in range(12)]
NEWCOMER = "30"  # buys for the first time when the earlier data set has ended


def iso(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


def events() -> pd.DataFrame:
    """25 baskets of each user over 32 weeks, and one in the last second of each data set."""
    random = np.random.default_rng(0)
    bought = [(user, int(at)) for user in USERS for at in random.integers(START, LATER, 25)]
    bought += [(user, at - 1) for user in USERS for at in (END, LATER)] + [(NEWCOMER, END + 3_600)]
    rows = [
        (user, f"b{number:04}", str(item), at)
        for number, (user, at) in enumerate(bought)
        for item in random.choice(40, random.integers(1, 8), replace=False)
    ]
    frame = pd.DataFrame(rows, columns=["user_id", "basket_id", "item_id", "at"])
    frame["at"] = pd.to_datetime(frame["at"], unit="s", utc=True).astype("datetime64[us, UTC]")
    frame["event_id"] = frame["basket_id"] + "-" + frame["item_id"]
    frame = frame.assign(event_type="purchase", quantity=2, price=1.5, discount=0.5, store_id="")
    return frame.sort_values(["at", "basket_id", "item_id"], ignore_index=True)


def train(events: pd.DataFrame, cut: int, folder: Path) -> None:
    """The steps of a training that make features."""
    items = pd.DataFrame({"item_id": sorted(set(events["item_id"]))})
    write_dataset(folder / "dataset", Dataset(events, items))
    fit_statistics(folder / "dataset", folder / "statistics", iso(cut))
    materialize_features(folder / "dataset", folder / "statistics", folder / "features", iso(cut))


def held(url: str) -> dict[str, UserRow]:
    store = patient_store(url)
    found = {user: row for user in [*USERS, NEWCOMER, "absent"] if (row := store.read(user))}
    store.close()
    return found
