"""Examples know nothing of their own moment or later; a planted leak is caught."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from components import build_examples as module
from components.build_examples import Basket, build_examples, replay
from components.examples import (
    ContractViolation,
    read_graph,
    read_manifest,
    read_ranker_examples,
    read_retriever_examples,
    write_manifest,
)
from components.fit_statistics import Purchases, fit, fit_vocabulary, purchases_of
from feature_repo.aggregates import empty_history, fold
from feature_repo.schema import DENSE_NAMES
from feature_repo.statistics import write_statistics
from feature_repo.toy_shop import toy_dataset
from feature_repo.transforms import Query
from serving.retrieval import Quotas
from serving.retrieval import retrieve as retrieve_candidates

CUT = pd.Timestamp("2024-06-10", tz="UTC")


@pytest.fixture(scope="module")
def purchases() -> Purchases:
    return purchases_of(toy_dataset(users=12, weeks=28).events)


def history_at(baskets: Iterator[Basket]) -> dict[tuple[int, int], tuple[list[int], list[float]]]:
    return {(b.user, b.at): (b.history.items.tolist(), b.history.count.tolist()) for b in baskets}


def truncated(purchases: Purchases, at: int) -> Purchases:
    """The purchases as they stood at `at`, that moment included."""
    rows = {name: getattr(purchases, name)[purchases.at <= at] for name in module_columns()}
    return replace(purchases, **rows)


def module_columns() -> tuple[str, ...]:
    return ("item", "user", "store", "basket", "at", "paid", "discount", "quantity")


def leaks(
    purchases: Purchases, replayed: dict[tuple[int, int], tuple[list[int], list[float]]]
) -> list[tuple[int, int]]:
    """Return the baskets whose history differs from one counted by hand from strictly earlier rows."""
    found = []
    for (user, at), (items, counts) in replayed.items():
        own = (purchases.user == user) & (purchases.at < at)
        pairs = {
            (b, i) for b, i in zip(purchases.basket[own].tolist(), purchases.item[own].tolist(), strict=True)
        }
        expected = np.unique([i for _, i in pairs], return_counts=True)
        if items != expected[0].tolist() or counts != expected[1].tolist():
            found.append((user, at))
    return found


def test_histories_hold_what_came_strictly_before(purchases: Purchases) -> None:
    assert leaks(purchases, history_at(replay(purchases))) == []


def test_a_planted_leak_is_caught(purchases: Purchases) -> None:
    def leaking() -> Iterator[Basket]:
        for basket in replay(purchases):
            yield replace(
                basket, history=fold(basket.history, basket.at, basket.items, basket.paid, basket.discount)
            )

    replayed = history_at(leaking())
    assert len(leaks(purchases, replayed)) == len(replayed)


def test_two_baskets_at_one_moment_do_not_see_each_other() -> None:
    at = pd.Timestamp("2024-01-01", tz="UTC")
    rows = [("b1", "milk", at), ("b2", "tea", at), ("b3", "milk", at + pd.Timedelta(hours=1))]
    events = pd.DataFrame(rows, columns=["basket_id", "item_id", "at"]).assign(
        event_type="purchase", user_id="u", store_id="", quantity=1, price=1.0, discount=0.0
    )
    baskets = list(replay(purchases_of(events)))
    assert [b.history.basket_count for b in baskets] == [0, 0, 2]


def test_later_events_change_nothing_of_an_earlier_basket(purchases: Purchases) -> None:
    whole = history_at(replay(purchases))
    for at in np.quantile(purchases.at, [0.3, 0.7]).astype(int):
        for key, history in history_at(replay(truncated(purchases, int(at)))).items():
            assert whole[key] == history


@pytest.mark.slow
def test_examples_do_not_depend_on_what_follows_the_cut(toy_line: Path, tmp_path: Path) -> None:
    from components.fit_statistics import fit_statistics
    from feature_repo.events import Dataset, read_dataset, write_dataset

    data = read_dataset(toy_line / "dataset")
    write_dataset(
        tmp_path / "dataset", Dataset(data.events[data.events["at"] < CUT], data.items, {"name": "cut"})
    )
    fit_statistics(tmp_path / "dataset", tmp_path / "statistics", CUT.isoformat())
    build_examples(
        tmp_path / "dataset", tmp_path / "statistics", tmp_path / "examples", CUT.isoformat(), {"windows": 3}
    )
    for part in ("ranker_train", "ranker_calibration", "retriever"):
        for file in sorted((toy_line / "examples" / part).glob("*.npy")):
            assert file.read_bytes() == (tmp_path / "examples" / part / file.name).read_bytes(), (
                f"{part}/{file.name}"
            )


@pytest.mark.slow
def test_each_list_holds_a_purchase_and_no_more_negatives_than_asked(toy_line: Path) -> None:
    train = read_ranker_examples(toy_line / "examples", "train")
    assert train.dense.shape == (len(train.label), len(DENSE_NAMES))
    for begin, end in zip(train.start[:-1], train.start[1:], strict=True):
        label = train.label[begin:end]
        assert label.any()
        assert (label == 0).sum() <= 60
    calibration = read_ranker_examples(toy_line / "examples", "calibration")
    assert np.diff(calibration.start).max() > 61
    assert len(read_retriever_examples(toy_line / "examples").basket) > 1_000


@pytest.mark.slow
def test_what_happens_after_a_base_changes_nothing_in_the_examples_before_it(tmp_path: Path) -> None:
    """One user, two windows: without the newest four weeks the older window's lists are the same bytes."""
    from components.fit_statistics import fit_statistics
    from feature_repo.events import Dataset, write_dataset

    data = toy_dataset(users=1, weeks=40)
    cut = data.events["at"].max().normalize()
    base = cut - pd.Timedelta(weeks=4)
    built = []
    for name, events in (("whole", data.events), ("early", data.events[data.events["at"] < base])):
        write_dataset(tmp_path / name, Dataset(events, data.items, {"name": name}))
        fit_statistics(tmp_path / "whole", tmp_path / "statistics", cut.isoformat())
        params = {"windows": 2, "stranger_ratio": 0.0}
        build_examples(
            tmp_path / name, tmp_path / "statistics", tmp_path / f"{name}-out", cut.isoformat(), params
        )
        built.append(read_ranker_examples(tmp_path / f"{name}-out", "train"))
    whole, early = built
    assert 0 < len(early.label) < len(whole.label)
    np.testing.assert_array_equal(whole.dense[: len(early.label)], early.dense)
    np.testing.assert_array_equal(whole.label[: len(early.label)], early.label)
    lists = len(early.start) - 1
    np.testing.assert_array_equal(whole.categorical[: len(early.label)], early.categorical)
    np.testing.assert_array_equal(whole.history[:lists], early.history)
    np.testing.assert_array_equal(whole.basket[:lists], early.basket)


@pytest.mark.slow
def test_early_windows_without_a_catalogue_are_left_out(tmp_path: Path) -> None:
    """A young shop: one basket stands long before the others, too little to fit anything on."""
    from components.fit_statistics import fit_statistics
    from feature_repo.events import Dataset, write_dataset

    data = toy_dataset(users=20, weeks=14)
    first = data.events[data.events["basket_id"] == data.events["basket_id"].iloc[0]].copy()
    first["at"] -= pd.Timedelta(weeks=12)
    events = pd.concat([first.assign(basket_id="long ago", event_id="long ago"), data.events])
    events = events.drop_duplicates(["event_id"])
    write_dataset(tmp_path / "dataset", Dataset(events, data.items, {"name": "young"}))
    cut = data.events["at"].max().isoformat()
    fit_statistics(tmp_path / "dataset", tmp_path / "statistics", cut)
    build_examples(tmp_path / "dataset", tmp_path / "statistics", tmp_path / "out", cut, {"windows": 5})
    assert 0 < len(read_manifest(tmp_path / "out")["bases"]) < 5


def test_hidden_items_are_not_in_the_query(purchases: Purchases, monkeypatch: pytest.MonkeyPatch) -> None:
    queries = []

    def retrieve(query: Query, *rest: Any) -> Any:
        queries.append(query)
        return retrieve_candidates(query, *rest)

    monkeypatch.setattr(module, "retrieve", retrieve)
    items = toy_dataset(users=12, weeks=28).items.set_index("item_id")
    seen = purchases.before(CUT)
    window = module._Window(fit(seen, items, fit_vocabulary(seen, items), CUT), purchases.item_ids)
    rng = np.random.default_rng(0)
    built = found = wanted = 0
    for basket in replay(seen):
        one = module._ranker_list(window, basket, purchases.store_ids, Quotas(), rng, None)
        if one is None:
            continue
        built += 1
        dense, label = one.dense, one.label
        hidden = max(1, round(0.2 * len(basket.items)))
        size = dense[0, DENSE_NAMES.index("basket_size")] if len(dense) else 0
        assert size == len(queries[-1].basket) == len(basket.items) - hidden
        found += int(label.sum())
        wanted += hidden
    assert built > 100
    assert 0.5 * wanted < found <= wanted, "most hidden items are candidates, and nothing else is a purchase"


def test_strangers_come_with_any_part_of_their_basket(purchases: Purchases) -> None:
    items = toy_dataset(users=12, weeks=28).items.set_index("item_id")
    seen = purchases.before(CUT)
    window = module._Window(fit(seen, items, fit_vocabulary(seen, items), CUT), purchases.item_ids)
    rng = np.random.default_rng(0)
    sizes = set()
    for basket in replay(seen):
        one = module._ranker_list(window, basket, purchases.store_ids, Quotas(), rng, None, stranger=True)
        if one is not None:
            sizes.add(int(one.dense[0, DENSE_NAMES.index("basket_size")]))
    assert {0, 1, 2, 3} <= sizes
    assert max(sizes) <= max(len(basket.items) for basket in replay(seen)) - 1


# --------------------------------------------------------------------- what rankers see of the request


@pytest.fixture(scope="module")
def windows(purchases: Purchases) -> tuple[module._Window, module._Window]:
    """A window whose catalogue is smaller, and the one at the cut."""
    items = toy_dataset(users=12, weeks=28).items.set_index("item_id")
    seen = purchases.before(CUT)
    vocabulary = fit_vocabulary(seen, items)
    first = pd.Timestamp(seen.at[0], unit="s", tz="UTC") + pd.Timedelta(weeks=3)
    final = module._Window(fit(seen, items, vocabulary, CUT), purchases.item_ids)
    early = module._Window(fit(seen.before(first), items, vocabulary, first), purchases.item_ids, final.code)
    assert len(early.statistics.item_ids) < len(final.statistics.item_ids)
    return early, final


def test_a_code_means_the_same_item_in_every_window(
    windows: tuple[module._Window, module._Window],
) -> None:
    early, final = windows
    assert early.input_code[0] == final.input_code[0] == 0
    assert final.input_code.tolist() == list(range(len(final.statistics.item_ids) + 1))
    meant = final.statistics.item_ids[early.input_code[1:] - 1]
    assert meant.tolist() == early.statistics.item_ids.tolist()


def test_candidates_history_and_basket_are_in_the_codes_of_the_cut(
    purchases: Purchases, windows: tuple[module._Window, module._Window]
) -> None:
    early, final = windows
    rng = np.random.default_rng(0)
    seen = 0
    for basket in replay(purchases.before(CUT)):
        one = module._ranker_list(early, basket, purchases.store_ids, Quotas(), rng, None)
        if one is None or not len(one.label):
            continue
        seen += 1
        items, levels = one.categorical[:, 0], one.categorical[:, 1:]
        np.testing.assert_array_equal(final.statistics.categorical[items - 1], levels)
        bought = set((final.code[basket.items] + 1).tolist())
        assert set(one.basket[0].tolist()) - {0} < bought
        assert set(items[one.label == 1].tolist()) <= bought - set(one.basket[0].tolist())
        before = final.code[basket.history.items] + 1
        assert set(one.history[0].tolist()) - {0} <= set(before.tolist())
        assert ((one.history > 0) == (one.history_weight > 0)).all()
    assert seen > 50


def test_a_stranger_has_no_history(
    purchases: Purchases, windows: tuple[module._Window, module._Window]
) -> None:
    nobody = empty_history(np.int64)
    basket = next(b for b in replay(purchases.before(CUT)) if len(b.items) > 5 and len(b.history.items))
    rng = np.random.default_rng(0)
    one = module._ranker_list(
        windows[1], replace(basket, history=nobody), purchases.store_ids, Quotas(), rng, None, True
    )
    assert one is not None
    assert not one.history.any()
    assert not one.history_weight.any()


def test_lists_are_put_together_in_their_order(
    purchases: Purchases, windows: tuple[module._Window, module._Window]
) -> None:
    rng = np.random.default_rng(0)
    every = [
        module._ranker_list(windows[1], basket, purchases.store_ids, Quotas(), rng, 5)
        for basket in list(replay(purchases.before(CUT)))[-30:]
    ]
    lists = [one for one in every if one is not None]
    together = module._concatenate_lists(lists)
    assert len(together.start) == len(lists) + 1 > 10
    for i, one in enumerate(lists):
        rows = slice(together.start[i], together.start[i + 1])
        np.testing.assert_array_equal(together.dense[rows], one.dense)
        np.testing.assert_array_equal(together.categorical[rows], one.categorical)
        np.testing.assert_array_equal(together.history[i], one.history[0])
        np.testing.assert_array_equal(together.basket[i], one.basket[0])


def test_no_lists_have_the_shapes_of_some() -> None:
    nothing = module._concatenate_lists([])
    assert nothing.start.tolist() == [0]
    assert nothing.dense.shape == (0, len(DENSE_NAMES))
    assert nothing.categorical.shape == (0, 4)
    assert len(nothing.history) == len(nothing.history_weight) == len(nothing.basket) == 0


def test_the_graph_is_that_of_the_oldest_window_in_the_codes_of_the_cut(
    purchases: Purchases, windows: tuple[module._Window, module._Window], tmp_path: Path
) -> None:
    early, final = windows
    for name, window in (("early", early), ("final", final)):
        write_statistics(tmp_path / name, window.statistics, {})
    module._write_graph(tmp_path, tmp_path / "final", tmp_path / "early", purchases.item_ids)
    write_manifest(tmp_path)
    neighbours, weights = read_graph(tmp_path)
    assert neighbours.shape == weights.shape == (len(final.statistics.item_ids) + 1, module.GRAPH_DEGREE)
    np.testing.assert_allclose(weights.sum(1)[weights.any(1)], 1, rtol=1e-5)
    assert not weights[0].any()
    assert not weights[neighbours == 0].any()
    known = set(early.statistics.item_ids.tolist())
    for code, item in enumerate(final.statistics.item_ids.tolist()):
        if item not in known:
            assert not weights[code + 1].any()
            continue
        row = early.statistics.code_of[item]
        near = early.statistics.neighbours[row, : module.GRAPH_DEGREE]
        near = near[near >= 0]
        share = early.statistics.together_count[row, : len(near)] / np.sqrt(
            early.statistics.basket_count[near]
        )
        expected = dict(zip(early.statistics.item_ids[near].tolist(), share / share.sum(), strict=True))
        found = {
            str(final.statistics.item_ids[other - 1]): float(weight)
            for other, weight in zip(neighbours[code + 1], weights[code + 1], strict=True)
            if weight
        }
        assert found == pytest.approx(expected, rel=1e-5)


def test_too_short_a_history_says_so(tmp_path: Path) -> None:
    from components.fit_statistics import fit_statistics
    from feature_repo.events import write_dataset

    write_dataset(tmp_path / "dataset", toy_dataset(users=20, weeks=6))
    fit_statistics(tmp_path / "dataset", tmp_path / "statistics", "2024-02-01T00:00:00Z")
    with pytest.raises(ValueError, match="bring more history"):
        build_examples(
            tmp_path / "dataset", tmp_path / "statistics", tmp_path / "examples", "2024-02-01T00:00:00Z", {}
        )


def test_an_unknown_parameter_is_named(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="negatvies"):
        build_examples(tmp_path, tmp_path, tmp_path, "2024-02-01", {"negatvies": 3})


def test_half_written_and_foreign_examples_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ContractViolation, match="no finished examples"):
        read_manifest(tmp_path)
    write_manifest(tmp_path)
    monkeypatch.setattr("components.examples.schema_hash", lambda: "other")
    with pytest.raises(ContractViolation, match="feature schema"):
        read_manifest(tmp_path)
