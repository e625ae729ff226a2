"""The OpenAPI document -> generated requests, good and bad; each answer is checked against the document.

    python -m tests.fuzz.requests --cases 2000

Schemathesis sends them to a real endpoint. No answer may be a 5xx, or have a status, a media type or a body
that is not in the document. Valid requests must be accepted and invalid ones refused.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

# Two of the document's operations take bodies and get nearly all examples; the others need few.
FIXED, WITH_BODIES = 280, 2


def ask(http: str, cases: int, seed: int, folder: Path) -> dict[str, Any]:
    """Let Schemathesis send about so many requests; return their number and the failures."""
    report = folder / "report.json"
    done = subprocess.run(
        [
            *(str(Path(sys.executable).with_name("st")), "run", f"{http}/openapi.json"),
            *("--seed", str(seed), "--max-examples", str(max((cases - FIXED) // WITH_BODIES, 1))),
            *("--generation-database", "none", "--continue-on-failure", "--no-color"),
            *("--report-json-path", str(report)),
        ],
        env={**os.environ, "SCHEMATHESIS_HOOKS": "tests.fuzz.printable"},
        capture_output=True,
        text=True,
        check=False,
    )
    if not report.is_file():
        raise RuntimeError(f"schemathesis did not run: {done.stdout[-2_000:]}{done.stderr[-2_000:]}")
    found = json.loads(report.read_bytes())
    wrong = "" if done.returncode == 0 else done.stdout[-8_000:]
    return {
        "cases": found["test_cases"]["generated"],
        "seconds": round(found["running_time"]),
        "wrong": wrong,
    }


def main() -> int:
    """Fuzz an endpoint with the toy bundle and print the summary; return 1 if an answer was wrong."""
    from serving.settings import Settings
    from tests.serving.conftest import build_bundle, start

    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.requests")
    parser.add_argument("--cases", type=int, default=2_000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="reco-fuzz-") as scratch:
        folder = Path(scratch)
        settings = Settings(
            home=folder, store_url="memory:", log=False, request_log=False, deadline_ms=10_000.0
        )
        running = start(build_bundle(folder / "toy"), settings)
        try:
            found = ask(running.http, given.cases, given.seed, folder)
        finally:
            running.process.terminate()
            running.process.wait()
    sys.stdout.write(json.dumps(found, indent=1) + "\n")
    return 1 if found["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
