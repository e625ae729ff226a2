"""One settings class, read from each place; see `tests/serving/test_settings.py` for the endpoint's."""

from dataclasses import dataclass
from pathlib import Path

import pytest

from feature_repo.stream.configuration import has_files, read_values, setting


def even(value: int) -> None:
    if value % 2:
        raise ValueError("odd")


@dataclass(frozen=True, slots=True)
class Kitchen:
    plates: int = setting(4, "plates on the table", expected="an even number", check=even)
    key: str = setting("", "of the door", secret=True, verbatim=True)
    heat: float = setting(1.5, "of the stove", ge=0, le=9)


VARIABLES = {"plates": "KITCHEN_PLATES", "key": "KITCHEN_KEY", "heat": "KITCHEN_HEAT"}


class KitchenInvalid(Exception):
    pass


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def read(environ: dict[str, str], only: tuple[str, ...] = ()) -> dict[str, object]:
    return read_values(Kitchen, VARIABLES, "kitchen", environ, KitchenInvalid, only)


def test_only_named_settings_are_returned() -> None:
    assert read({}) == {}
    assert read({"KITCHEN_PLATES": " 6 ", "KITCHEN_KEY": " a "}) == {"plates": 6, "key": " a "}
    assert read({"KITCHEN_PLATES": "7", "KITCHEN_HEAT": "2"}, only=("heat",)) == {"heat": 2.0}


def test_a_table_of_the_file_has_them_too(folder: Path) -> None:
    (folder / "reco.toml").write_text("other = 1\n[kitchen]\nplates = 8\n")
    assert read({}) == {"plates": 8}
    (folder / "reco.toml").write_text("[kitchen]\nplate = 8\n")
    with pytest.raises(KitchenInvalid, match="unknown setting 'plate': did you mean 'plates'"):
        read({})
    (folder / "reco.toml").write_text("kitchen = 8\n")
    with pytest.raises(KitchenInvalid, match=r"kitchen in reco\.toml is no table"):
        read({})


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"KITCHEN_PLATES": "7"}, r"KITCHEN_PLATES is '7'; expected an even number \(odd\)$"),
        ({"KITCHEN_HEAT": "nan"}, r"KITCHEN_HEAT is 'nan'; expected a number from 0 to 9$"),
        ({"KITCHEN_HEAT": "inf"}, r"expected a number from 0 to 9$"),
    ],
)
def test_an_invalid_value_is_named(environ: dict[str, str], message: str) -> None:
    with pytest.raises(KitchenInvalid, match=message):
        read(environ)


def test_an_invalid_value_is_named_with_its_own_file(folder: Path) -> None:
    (folder / "reco.toml").write_text("[kitchen]\nheat = nan\nplates = 70001\n")
    with pytest.raises(KitchenInvalid, match=r"^plates in reco\.toml is 70001;"):
        read({})
    with pytest.raises(KitchenInvalid, match=r"^heat in reco\.toml is nan;"):
        read({}, only=("heat",))
    (folder / ".env").write_text("KITCHEN_HEAT=nan\n")
    with pytest.raises(KitchenInvalid, match=r"^KITCHEN_HEAT in \.env is 'nan';"):
        read({}, only=("heat",))


def test_files_are_found_unless_they_are_switched_off(folder: Path) -> None:
    assert not has_files({})
    (folder / ".env").write_text("")
    assert has_files({})
    assert has_files({"RECO_CONFIG": "x.toml"})
    assert not has_files({"RECO_CONFIG": "off"})
