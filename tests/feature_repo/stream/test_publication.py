import json
from pathlib import Path

import pytest

from feature_repo.stream.publication import FILE, Publication, PublicationDamaged, read_publication
from tests.feature_repo.stream.published_shop import AT, FIELDS, write_note


def test_a_note_is_read_and_without_one_nothing_was_published(tmp_path: Path) -> None:
    assert read_publication(tmp_path) is None
    assert read_publication(tmp_path / "new") is None
    write_note(tmp_path, until="2020-02-01T00:00:00+00:00")
    assert read_publication(tmp_path) == Publication("b1", AT, "2020-02-01T00:00:00+00:00", AT, 3)


@pytest.mark.parametrize(
    "content",
    [
        *("", "{", "[]", "{}", "null", "[" * 100_000, "\xff"),
        *(json.dumps(FIELDS | {name: 5}) for name in ("cut", "until", "created_at")),
        *(json.dumps(FIELDS | {name: "2020-01-01T00:00:00"}) for name in ("cut", "until", "created_at")),
        json.dumps(FIELDS | {"users": None}),
        json.dumps({name: FIELDS[name] for name in FIELDS if name != "bundle_id"}),
    ],
)
def test_a_damaged_note_is_named_with_its_cure(tmp_path: Path, content: str) -> None:
    (tmp_path / FILE).write_text(content, encoding="latin-1")
    with pytest.raises(
        PublicationDamaged, match=r"online_store\.json does not say .*`reco run --data DIR` writes it"
    ):
        read_publication(tmp_path)


def test_a_folder_in_the_note_s_place_is_damage(tmp_path: Path) -> None:
    (tmp_path / FILE).mkdir()
    with pytest.raises(PublicationDamaged, match=r"online_store\.json does not say"):
        read_publication(tmp_path)
