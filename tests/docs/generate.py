"""Write the generated pages: `python -m tests.docs.generate [--check]`.

Some pages are generated whole. In others only the sections between two comments are. With `--check` no page
is written; the exit code is 1 if a page is stale.
"""

import sys
from collections.abc import Callable
from pathlib import Path

from tests.docs import figures, licences, reference
from tests.docs.source import ROOT

PAGES: dict[str, Callable[[], str]] = {
    "docs/reference/commands.md": reference.commands_page,
    "docs/reference/settings.md": reference.settings_page,
    "docs/reference/metrics.md": reference.metrics_page,
    "docs/reference/parameters.md": reference.parameters_page,
    "docs/reference/licences.md": licences.licences_page,
    "docs/reference/features.md": reference.features_page,
    "docs/figures/index.md": figures.figures_page,
}
SECTIONS: dict[str, dict[str, Callable[[], str]]] = {
    "README.md": {"headline": figures.headline},
    "docs/explanation/retrieval.md": {"towers": figures.towers},
    "docs/reference/errors.md": {
        "refusals": reference.refusals,
        "rejected": reference.rejected,
        "reasons": reference.reasons,
        "errors": reference.command_errors,
    },
    "docs/reference/drills.md": {
        "proofs": reference.drill_proofs,
        "results": reference.drill_results,
        "pages": reference.drill_pages,
    },
}


def fill(text: str, sections: dict[str, Callable[[], str]]) -> str:
    """Return a page with each section between its comments as the code defines it now."""
    for name, section in sections.items():
        start, end = f"<!-- generated: {name} -->\n", f"<!-- end of {name} -->\n"
        before, found_start, rest = text.partition(start)
        _, found_end, after = rest.partition(end)
        if not (found_start and found_end):
            raise ValueError(f"no section {name!r}: expected {start.strip()} and {end.strip()}")
        text = f"{before}{start}\n{section()}\n{end}{after}"
    return text


def page(name: str) -> str:
    """Return a page with the current values of the code and the result files."""
    if name in PAGES:
        return PAGES[name]().rstrip("\n") + "\n"
    return fill((ROOT / name).read_text(encoding="utf-8"), SECTIONS[name])


def stale() -> dict[Path, str]:
    """Return each page that differs from its file, with its new text."""
    changed = {}
    for name in (*PAGES, *SECTIONS):
        path, text = ROOT / name, page(name)
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            changed[path] = text
    return changed


def main() -> int:
    """Write or check the pages."""
    check = "--check" in sys.argv[1:]
    pages = stale()
    for path, text in pages.items():
        name = path.relative_to(ROOT)
        if check:
            sys.stderr.write(f"{name} is stale: run `python -m tests.docs.generate`\n")
        else:
            path.write_text(text, encoding="utf-8")
            sys.stderr.write(f"{name} written\n")
    return int(bool(pages) and check)


if __name__ == "__main__":
    sys.exit(main())
