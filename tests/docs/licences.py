"""The lock of the endpoint -> the page of licences, as each package states its own."""

import re
from importlib.metadata import PackageNotFoundError, metadata

from tests.docs.reference import HEAD, table
from tests.docs.source import ROOT

LOCK = ROOT / "requirements" / "endpoint.lock"
PAGE = ROOT / "docs" / "reference" / "licences.md"


def pinned(lock: str) -> dict[str, str]:
    """Return the version of each package that a lock pins."""
    return dict(re.findall(r"^([\w.-]+)(?:\[.*\])?==([^\s;]+)", lock, re.MULTILINE))


def licence(name: str, version: str) -> str:
    """Return the licence that the installed package states.

    Raises:
        ValueError: another version is installed.
        PackageNotFoundError: none is: the lock may leave a package out for this Python.
    """
    stated = metadata(name)
    if stated["Version"] != version:
        raise ValueError(f"{name} {stated['Version']} is installed, expected {version}: run `make setup`")
    classified = [
        one.split(" :: ")[-1]
        for one in stated.get_all("Classifier") or []
        if one.startswith("License :: ") and not one.endswith(" :: OSI Approved")
    ]
    expression, *_ = stated.get_all("License-Expression") or [""]
    text, *_ = stated.get_all("License") or [""]
    return expression or ", ".join(classified) or text.strip().split("\n")[0]


def licences_page() -> str:
    """Return the page. A package that is not installed here keeps its row if the version is the same."""
    before = PAGE.read_text(encoding="utf-8") if PAGE.exists() else ""
    written = {
        (name, version): text
        for name, version, text in re.findall(r"^\| `(.+)` \| (\S+) \| (.+) \|$", before, re.M)
    }
    rows = []
    for name, version in sorted(pinned(LOCK.read_text(encoding="utf-8")).items()):
        try:
            text = licence(name, version)
        except PackageNotFoundError:
            text = written.get((name, version), "")
        rows.append((f"`{name}`", version, text))
    return (
        HEAD
        + (
            "# Licences\n\n"
            f"The image `checkout-endpoint` holds these {len(rows)} packages of "
            "`requirements/endpoint.lock`.\n"
            "Each licence is the one that the package's metadata states.\n"
            "This project is under Apache-2.0.\n\n"
        )
        + table(("package", "version", "licence"), rows)
    )
