"""Items by their names."""

from dataclasses import replace

import pytest

from pipelines.inspect.items import ItemUnknown, check_items, find_items, has_names, named
from serving.release.bundle import Bundle, load_bundle
from tests.serving.conftest import build_bundle


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return load_bundle(build_bundle(tmp_path_factory.mktemp("bundles") / "small"))


def test_an_item_is_found_by_its_id(bundle: Bundle) -> None:
    assert find_items(bundle, ["1000011"], 9)[0]["name"] == "type 11"


def test_the_name_is_the_narrowest_level_that_has_one(bundle: Bundle) -> None:
    categorical = bundle.statistics.categorical.copy()
    without = replace(bundle, statistics=replace(bundle.statistics, categorical=categorical))
    categorical[0, 0] = categorical[1] = 0
    assert [named(without, f"100000{n}") for n in range(3)] == [
        "1000000 category 0",
        "1000001",
        "1000002 type 2",
    ]
    assert has_names(without)
    categorical[:] = 0
    assert not has_names(without)


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("TYPE 3", "; did you mean 1000003 type 3?"),
        ("grocerys", "; did you mean 1000000 type 0?"),
        ("x1000230", "; did you mean 1000230 type 2?"),
        ("caviar", ", and no similar one: train again if it is new"),
    ],
)
def test_an_unknown_item_is_refused_with_a_suggestion(bundle: Bundle, text: str, meant: str) -> None:
    check_items(bundle, ["1000000", "1000239"])
    with pytest.raises(ItemUnknown) as raised:
        check_items(bundle, ["1000000", text])
    assert f"no item {text!r} in bundle {bundle.bundle_id}{meant}" in str(raised.value)
