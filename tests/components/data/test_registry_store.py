"""A registry that is replaced in one step: a reader meanwhile, and several that open a new home."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from components.data.feast_store import open_feature_store, quiet_feast


@pytest.mark.slow
def test_who_reads_the_registry_while_it_is_written_sees_all_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with quiet_feast():
        from feast.infra.registry import file as feast_file

        store = open_feature_store(tmp_path)
        seen = []

        def opened(*given: Any, **named: Any) -> Any:
            stream = open(*given, **named)  # noqa: SIM115
            seen.append({view.name for view in store.list_feature_views()})
            return stream

        monkeypatch.setattr(feast_file, "open", opened, raising=False)
        open_feature_store(tmp_path)
    assert seen
    assert all(names == {"user_history", "item_statistics"} for names in seen)
    assert not list(tmp_path.glob(".*.part"))


@pytest.mark.slow
def test_a_damaged_registry_is_made_again(tmp_path: Path) -> None:
    with quiet_feast():
        open_feature_store(tmp_path)
        file = tmp_path / "registry.db"
        file.write_bytes(file.read_bytes()[:-10])
        store = open_feature_store(tmp_path)
        assert {view.name for view in store.list_feature_views()} == {"user_history", "item_statistics"}


@pytest.mark.slow
def test_a_new_home_may_be_opened_by_several_at_once(tmp_path: Path) -> None:
    def names(_: int) -> set[str]:
        store = open_feature_store(tmp_path / "home")
        return {view.name for _ in range(20) for view in store.list_feature_views()}

    with quiet_feast(), ThreadPoolExecutor(6) as pool:
        found = list(pool.map(names, range(6)))
    assert found == [{"user_history", "item_statistics"}] * 6
