"""Bundle -> the file of best sellers that a client offers when the endpoint gives no answer."""

import json
from pathlib import Path

import numpy as np

from feature_repo.atomic_files import write_output
from serving.release.bundle import Bundle

NOTHING = np.empty(0, np.int64)


def write_best_sellers(bundle: Bundle, file: Path, hidden: np.ndarray = NOTHING) -> int:
    """Write the ids of a bundle's best sellers, best first, as a JSON list; return their number.

    Items that were removed from the bundle, and those of the codes in `hidden`, are left out.
    """
    popular = bundle.statistics.popular
    codes = popular[~np.isin(popular, np.concatenate([bundle.removed, hidden]))]
    write_output(file, json.dumps(bundle.statistics.item_ids[codes].tolist()))
    return len(codes)
