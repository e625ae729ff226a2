from pathlib import Path

import pytest

from tests.prose import prose


@pytest.mark.parametrize(
    ("page", "rows"),
    [
        ("| drill | proves |\n|---|---|\n| `a` | shoppers, who still get a list |\n", [3]),
        ("| who comes late | waits |\n", [1]),
        ("Text.\n\n| silent, or there is none | act |\n", [3]),
        (f"| {'word ' * 20}| {'word ' * 20}|\n", []),  # each cell is a sentence of its own
        (f"| {'word ' * 36}|\n", [1]),
        ("| `who` | <none> |\n\n```text\nwhoever\n```\n", []),
    ],
)
def test_the_cells_of_a_table_are_checked(
    page: str, rows: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prose, "ROOT", tmp_path)
    (tmp_path / "page.md").write_text(page, encoding="utf-8")
    assert [int(line.split(":")[1]) for line in prose.findings(tmp_path / "page.md")] == rows
