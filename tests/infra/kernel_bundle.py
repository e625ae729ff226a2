"""`python -m tests.infra.kernel_bundle DIR`: a toy bundle whose golden requests use every compiled loop.

To seal it compiles them, so set-up makes one; the endpoint's image is built with it, too.
"""

import base64
import shutil
import sys
from pathlib import Path

from feature_repo.aggregates import pack
from serving.release.bundle import load_bundle
from serving.release.golden import GoldenRequest
from tests.conftest import make_row
from tests.serving.conftest import CUT, build_bundle, seal_golden, weekly

ITEM_IDS = ("1000005", "1000010", "1000031")


def build_kernel_bundle(path: Path) -> Path:
    """Write a bundle with a shopper who has bought and seen items, one who has only bought, and a stranger.

    A row without views hands the loops arrays that cannot be written: other types to compile for.
    """
    shutil.rmtree(path, ignore_errors=True)
    settings = load_bundle(build_bundle(path)).settings
    at = CUT.timestamp() - 86_400
    views = [(at, ITEM_IDS[0], 1), (at, ITEM_IDS[1], 2)]
    bought = weekly([[*ITEM_IDS], [ITEM_IDS[0]]])
    rows = {"u1": pack(make_row(bought, views), "u1"), "u2": pack(make_row(bought, []), "u2")}
    asked = {"at": CUT.isoformat(), "k": 10, "store_id": "store-1"}
    records = [
        *(
            GoldenRequest(
                {**asked, "request_id": f"known-{user}", "user_id": user, "basket": [ITEM_IDS[1]]},
                base64.b64encode(row).decode(),
            )
            for user, row in rows.items()
        ),
        GoldenRequest({**asked, "request_id": "unknown", "basket": list(ITEM_IDS)}, None),
    ]
    seal_golden(path, records, settings, CUT.isoformat())
    return path


if __name__ == "__main__":
    build_kernel_bundle(Path(sys.argv[1]))
