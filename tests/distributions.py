"""The distributions that pyproject.toml requires, by the names that package indexes use."""

import re
import tomllib
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]


@cache
def declared(*extras: str) -> set[str]:
    """The distributions that pyproject.toml requires: base and the named extras."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lines = [
        *project["dependencies"],
        *(x for extra in extras for x in project["optional-dependencies"][extra]),
    ]
    return {canonical(re.split(r"[\[<>=;~! ]", line)[0]) for line in lines}


def canonical(distribution: str) -> str:
    return re.sub(r"[-_.]+", "-", distribution).lower()
