"""Bundle -> the file of best sellers that a client offers when the endpoint gives no answer."""

import json
from pathlib import Path

from serving.release.bundle import Bundle


def write_best_sellers(bundle: Bundle, file: Path) -> None:
    """Write the ids of a bundle's best sellers, best first, as a JSON list; removed items are left out."""
    removed = set(bundle.removed.tolist())
    codes = [code for code in bundle.statistics.popular.tolist() if code not in removed]
    file.write_text(json.dumps(bundle.statistics.item_ids[codes].tolist()), encoding="utf-8")
