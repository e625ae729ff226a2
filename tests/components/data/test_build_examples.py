"""Lists, pairs and codes of the examples; that none knows its own moment: see test_point_in_time.py."""

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from components.data import build_examples as module
from components.data.build_examples import build_examples, replay
from components.data.examples import (
    GRAPH_DEGREE,
    RankerExamples,
    read_graph,
    read_manifest,
    read_ranker_examples,
    read_retriever_examples,
    write_manifest,
)
from components.data.fit_statistics import Purchases, fit, fit_statistics, fit_vocabulary, purchases_of
from feature_repo import aggregates
from feature_repo.aggregates import no_events, pack, summary_of
from feature_repo.events import EVENT_SCHEMA, Dataset, read_dataset, write_dataset
from feature_repo.queries import Query, User
from feature_repo.schema import DENSE_NAMES, user_values
from feature_repo.statistics import write_statistics
from feature_repo.stream.archive import rows_of, with_version
from feature_repo.toy_shop import toy_dataset
from serving.stages.retrieval import Quotas
from serving.stages.retrieval import retrieve as retrieve_candidates
from tests.components.conftest import whole_events
from tests.conftest import TOY_EXAMPLES

CUT = pd.Timestamp("2024-06-10", tz="UTC")

Windows = tuple[module._Window, module._Window]


@pytest.fixture(scope="module")
def purchases() -> Purchases:
    return purchases_of(toy_dataset(users=12, weeks=28).events)


@pytest.fixture(scope="module")
def windows(purchases: Purchases) -> Windows:
    """A window whose catalogue is smaller, and the one at the cut."""
    items = toy_dataset(users=12, weeks=28).items.set_index("item_id")
    seen = purchases.before(CUT)
    vocabulary = fit_vocabulary(seen, items)
    first = pd.Timestamp(seen.at[0], unit="s", tz="UTC") + pd.Timedelta(weeks=3)
    final = module._Window(fit(seen, items, vocabulary, CUT), purchases.item_ids)
    early = module._Window(fit(seen.before(first), items, vocabulary, first), purchases.item_ids, final.code)
    assert len(early.statistics.item_ids) < len(final.statistics.item_ids)
    return early, final


def bought(rows: list[tuple[str, str, float]]) -> Purchases:
    """Purchases of one user: basket, item and seconds since the start of the year."""
    events = whole_events(pd.DataFrame(rows, columns=["basket_id", "item_id", "at"]))
    events["at"] = pd.Timestamp("2024-01-01", tz="UTC") + pd.to_timedelta(events["at"], unit="s")
    return purchases_of(events)


def listed(
    purchases: Purchases, window: module._Window, basket: module.Basket, rng: np.random.Generator, **how: Any
) -> RankerExamples | None:
    """The list of a basket, with all negatives unless `how` says otherwise."""
    given = {"negatives": None, "user": window.user(basket)} | how
    return module._ranker_list(
        window, basket, store_ids=purchases.store_ids, quotas=Quotas(), rng=rng, **given
    )


def built(
    root: Path, name: str, data: Dataset, cut: pd.Timestamp, params: dict[str, Any], fitted_on: str = ""
) -> Path:
    """Write a data set and build its examples, with statistics of its own or of a data set before it."""
    write_dataset(root / name, data)
    statistics = root / f"{fitted_on or name} statistics"
    if not fitted_on:
        fit_statistics(root / name, statistics, cut.isoformat())
    build_examples(root / name, statistics, root / f"{name} examples", cut.isoformat(), params)
    return root / f"{name} examples"


def test_two_baskets_at_one_moment_do_not_see_each_other() -> None:
    baskets = list(replay(bought([("b1", "milk", 0), ("b2", "tea", 0), ("b3", "milk", 3_600)])))
    assert [summary_of(b.history, b.at)[1].baskets for b in baskets] == [0, 0, 2]


def test_a_replay_since_a_moment_is_the_end_of_the_whole_one() -> None:
    purchases = purchases_of(toy_dataset().events)
    since = float(np.quantile(purchases.at, 0.8))
    bought = {int(basket): float(at) for basket, at in zip(purchases.basket, purchases.at, strict=True)}
    whole = [one for one in replay(purchases) if bought[one.basket] >= since]
    late = list(replay(purchases, since=since))
    assert 0 < len(late) < len(bought)
    assert [(b.basket, b.user, b.at, b.store) for b in late] == [
        (b.basket, b.user, b.at, b.store) for b in whole
    ]
    for one, other in zip(late, whole, strict=True):
        np.testing.assert_array_equal(one.items, other.items)
        names = purchases.item_ids
        assert pack(one.history.named(names)) == pack(other.history.named(names))


def test_the_oldest_lines_of_a_very_long_history_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in the row that the endpoint reads."""
    monkeypatch.setattr(aggregates, "MAX_PURCHASES", 3)
    purchases = bought([(f"b{day}", f"i{day}", 86_400 * day) for day in range(6)])
    assert [b.history.distinct().tolist() for b in replay(purchases)] == [
        [], [0], [0, 1], [0, 1, 2], [1, 2, 3], [2, 3, 4],
    ]  # fmt: skip


def test_an_item_scanned_twice_has_the_same_features_in_training_and_serving() -> None:
    """The row that serves holds both lines; the purchases that train hold one. What follows is equal."""
    start = pd.Timestamp("2024-01-01", tz="UTC")
    rows = [
        ("b1", "milk", 0.1, 0), ("b1", "tea", 0.7, 0), ("b1", "milk", 0.2, 0), ("b1", "milk", None, 0),
        ("b2", "tea", 0.3, 2), ("b3", "milk", 9.9, 3), ("b3", "milk", 0.4, 3), ("b4", "tea", 0.7, 5),
    ]  # fmt: skip
    events = pd.DataFrame(rows, columns=["basket_id", "item_id", "price", "day"])
    events["at"] = start + pd.to_timedelta(events.pop("day"), unit="D")
    events = whole_events(events, quantity=3, discount=0.1)
    *_, last = replay(purchases_of(events))
    table = pa.Table.from_pandas(events[EVENT_SCHEMA.names], EVENT_SCHEMA, preserve_index=False)
    [(_, served)] = rows_of(with_version(table))
    assert (len(last.history), len(served.before(last.at))) == (4, 7)
    trained, asked = User(last.history, last.at), User(served, last.at)
    np.testing.assert_array_equal(user_values(trained), user_values(asked))
    assert trained.history.count.tolist() == asked.history.count.tolist() == [2, 2]
    assert trained.events.paid.tolist() == asked.events.paid.tolist()
    assert trained.events.discount.tolist() == asked.events.discount.tolist()


def test_purchases_are_distinct_to_the_microsecond() -> None:
    first, second = replay(bought([("b2", "milk", 0), ("b1", "tea", 1e-6)]))
    assert (len(first.history), len(second.history)) == (0, 1)
    assert second.at - first.at == pytest.approx(1e-6, rel=0.2)


def test_a_basket_with_answers_is_as_of_the_first_question() -> None:
    """The answers are the impressions since the previous purchase, back to a pause of half an hour."""
    start = pd.Timestamp("2024-01-01", tz="UTC")
    half = 30 * 60
    rows: list[tuple[str, str, str, float]] = [
        ("purchase", "b1", "milk", 0),
        *(("impression", "r1", item, 18_000) for item in ("tea", "jam")),
        *(("purchase", "b2", item, 18_600) for item in ("tea", "bread")),
        ("purchase", "b3", "milk", 18_660),  # r1 was the answer to b2
        ("impression", "r2", "jam", 30_000),
        ("purchase", "b4", "milk", 30_000),  # at once
        ("impression", "r3", "jam", 40_000),
        ("purchase", "b5", "jam", 40_000 + half + 1),  # that was another visit
        ("impression", "r4", "milk", 50_000),  # and so was this
        ("impression", "r5", "tea", 50_000 + half + 1),
        ("impression", "r6", "jam", 50_000 + 2 * half + 1),  # asked again, after half an hour
        ("purchase", "b6", "bread", 50_000 + 3 * half + 1),
    ]
    events = whole_events(pd.DataFrame(rows, columns=["event_type", "basket_id", "item_id", "at"]))
    events["at"] = start + pd.to_timedelta(events["at"], unit="s")
    purchases = purchases_of(events)
    found = {
        str(purchases.basket_ids[b.basket]): (
            round(b.at - start.timestamp()),
            purchases.item_ids[b.shown].tolist(),
            len(b.history),
        )
        for b in replay(purchases)
    }
    assert found == {
        "b1": (0, [], 0),
        "b2": (18_000, ["jam", "tea"], 1),
        "b3": (18_660, [], 5),
        "b4": (30_000, ["jam"], 6),
        "b5": (40_000 + half + 1, [], 9),
        "b6": (50_000 + half + 1, ["jam", "tea"], 11),
    }


def test_an_account_that_buys_all_day_teaches_with_so_many_baskets(purchases: Purchases) -> None:
    first = next(replay(purchases))
    day, most = 86_400.0, module.MOST_BASKETS
    robot = [replace(first, user=7, at=number * day / 10) for number in range(600)]  # ten each day
    other = [replace(first, user=8, at=number * day) for number in range(60)]
    kept = list(module.most_of_each(iter([*robot, *other])))
    at = np.array([basket.at / day for basket in kept if basket.user == 7])
    assert len(at) == 2 * most + 40, "60 days are two windows of four weeks, and four days"
    assert max(np.searchsorted(at, at + 28) - np.arange(len(at))) == most
    assert [basket for basket in kept if basket.user == 8] == other


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
def test_events_after_a_base_change_no_examples_before_it(tmp_path: Path) -> None:
    """One user, two windows: the older window's lists are the same bytes, whatever the newest weeks hold.

    Nothing at all, or poison: their purchases become other items, known and unknown, at huge prices.
    """
    data = toy_dataset(users=1, weeks=40)
    cut = data.events["at"].max().normalize()
    base = cut - pd.Timedelta(weeks=4)
    poisoned, late = data.events.copy(), data.events["at"] >= base
    poisoned.loc[late, "item_id"] = [f"item-{7 * number % 160:03d}" for number in range(late.sum())]
    poisoned.loc[late, ["price", "quantity"]] = [9e8, 1_000]
    made = []
    for name, events in {"whole": data.events, "early": data.events[~late], "poisoned": poisoned}.items():
        params = {"windows": 2, "stranger_ratio": 0.0}
        fitted_on = "" if name == "whole" else "whole"
        shop = Dataset(events, data.items, {"name": name})
        made.append(read_ranker_examples(built(tmp_path, name, shop, cut, params, fitted_on), "train"))
    whole, early, poison = made
    assert 0 < len(early.label) < len(whole.label)
    rows, lists = len(early.label), len(early.start) - 1
    for world in (whole, poison):
        for name, count in {
            **dict.fromkeys(("dense", "label", "categorical"), rows),
            **dict.fromkeys(("history", "history_weight", "basket"), lists),
        }.items():
            np.testing.assert_array_equal(
                getattr(world, name)[:count], getattr(early, name), err_msg=name, strict=True
            )


@pytest.mark.slow
def test_early_windows_without_a_catalogue_are_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A young shop: one basket stands long before the others, too little to fit anything on."""
    data = toy_dataset(users=20, weeks=14)
    first = data.events[data.events["basket_id"] == data.events["basket_id"].iloc[0]].copy()
    first["at"] -= pd.Timedelta(weeks=12)
    events = pd.concat([first.assign(basket_id="long ago", event_id="long ago"), data.events])
    events = events.drop_duplicates(["event_id"])
    young = Dataset(events, data.items, {"name": "young"})
    with caplog.at_level(logging.INFO):
        examples = built(tmp_path, "young", young, data.events["at"].max(), {"windows": 5})
    own = [one for one in caplog.records if one.name == "components.data.build_examples"]
    said = [one.getMessage() for one in own if one.levelno == logging.INFO]
    assert [line.split()[0] for line in said] == ["counting", "replaying"], "each part says that it begins"
    assert 0 < len(read_manifest(examples)["bases"]) < 5


def test_a_long_basket_keeps_items_of_all_ids(purchases: Purchases, windows: Windows) -> None:
    basket = replace(next(replay(purchases.before(CUT))), items=np.arange(len(purchases.item_ids)))
    row = module._retriever_row(windows[1], basket)
    assert row is not None
    assert len(np.unique(row.basket)) == module.BASKET_WIDTH < len(windows[1].statistics.item_ids)
    assert (row.basket[0, 0], row.basket[0, -1]) == (1, len(windows[1].statistics.item_ids))


def test_hidden_items_are_not_in_the_query(
    purchases: Purchases, windows: Windows, monkeypatch: pytest.MonkeyPatch
) -> None:
    queries = []

    def retrieve(query: Query, *rest: Any) -> Any:
        queries.append(query)
        return retrieve_candidates(query, *rest)

    monkeypatch.setattr(module, "retrieve", retrieve)
    seen, (_, window) = purchases.before(CUT), windows
    rng = np.random.default_rng(0)
    built = found = wanted = 0
    for basket in replay(seen):
        one = listed(purchases, window, basket, rng)
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


def test_taken_items_are_hidden_and_left_items_are_negatives(purchases: Purchases, windows: Windows) -> None:
    seen, (_, window) = purchases.before(CUT), windows
    basket = next(b for b in replay(seen) if len(b.history) > 50 and len(b.items) >= 6)
    visible = window.code[basket.items[1:]]
    query = Query(window.statistics, basket.at, visible, len(visible), window.user(basket))
    candidates = retrieve_candidates(query, None, Quotas()).codes
    at_cut = window.statistics.item_ids
    taken = next(code for code in basket.items if window.code[code] in candidates)
    left = np.searchsorted(purchases.item_ids, at_cut[candidates[-3:]])
    assert not np.isin(left, basket.items).any()
    answered = replace(basket, shown=np.sort(np.r_[taken, left]))
    rng = np.random.default_rng(0)
    often = 0
    for _ in range(20):
        one = listed(purchases, window, answered, rng, negatives=6)
        assert one is not None
        asked_for = {
            code: int(label) for code, label in zip(one.categorical[:, 0] - 1, one.label, strict=True)
        }
        assert asked_for[window.code[taken]] == 1
        assert [asked_for[window.code[code]] for code in left] == [0, 0, 0], "half of the six may be these"
        other = listed(purchases, window, basket, rng, negatives=6)
        often += other is not None and bool(np.isin(window.code[left] + 1, other.categorical[:, 0]).all())
    assert often < 20, "nobody was shown anything: negatives are drawn"


def test_left_items_are_at_most_half_of_the_negatives(purchases: Purchases, windows: Windows) -> None:
    """A checkout that asks after each scan shows a lot; the list must still look like what serving ranks."""
    seen, (_, window) = purchases.before(CUT), windows
    basket = next(b for b in replay(seen) if len(b.history) > 50 and len(b.items) >= 6)
    others = np.setdiff1d(np.arange(len(purchases.item_ids)), basket.items)
    shown = others[: len(others) // 2]
    rng = np.random.default_rng(0)
    left = [0, 0]
    for _ in range(20):
        answered = replace(basket, shown=shown)
        one = listed(purchases, window, answered, rng, negatives=6)
        assert one is not None
        negatives = one.categorical[one.label == 0, 0] - 1
        was_shown = np.isin(negatives, window.code[shown])
        left[0] += int(was_shown.sum())
        left[1] += int((~was_shown).sum())
        assert was_shown.sum() >= 3
    assert left[1] > 10, "the other half is drawn from all"


def test_strangers_come_with_any_part_of_their_basket(purchases: Purchases, windows: Windows) -> None:
    seen, (_, window) = purchases.before(CUT), windows
    rng = np.random.default_rng(0)
    sizes = set()
    for basket in replay(seen):
        one = listed(purchases, window, basket, rng, stranger=True)
        if one is not None:
            sizes.add(int(one.dense[0, DENSE_NAMES.index("basket_size")]))
    assert {0, 1, 2, 3} <= sizes
    assert max(sizes) <= max(len(basket.items) for basket in replay(seen)) - 1


# --------------------------------------------------------------------- what rankers see of the request


def test_a_code_means_the_same_item_in_every_window(
    windows: Windows,
) -> None:
    early, final = windows
    assert early.input_code[0] == final.input_code[0] == 0
    assert final.input_code.tolist() == list(range(len(final.statistics.item_ids) + 1))
    meant = final.statistics.item_ids[early.input_code[1:] - 1]
    assert meant.tolist() == early.statistics.item_ids.tolist()


def test_candidates_history_and_basket_are_in_the_codes_of_the_cut(
    purchases: Purchases, windows: Windows
) -> None:
    early, final = windows
    rng = np.random.default_rng(0)
    seen = 0
    for basket in replay(purchases.before(CUT)):
        one = listed(purchases, early, basket, rng)
        if one is None or not len(one.label):
            continue
        seen += 1
        items, levels = one.categorical[:, 0], one.categorical[:, 1:]
        np.testing.assert_array_equal(final.statistics.categorical[items - 1], levels)
        bought = set((final.code[basket.items] + 1).tolist())
        assert set(one.basket[0].tolist()) - {0} < bought
        assert set(items[one.label == 1].tolist()) <= bought - set(one.basket[0].tolist())
        before = final.code[basket.history.distinct()] + 1
        assert set(one.history[0].tolist()) - {0} <= set(before.tolist())
        assert ((one.history > 0) == (one.history_weight > 0)).all()
    assert seen > 50


def test_a_stranger_has_no_history(purchases: Purchases, windows: Windows) -> None:
    nobody = no_events(np.int64)
    basket = next(b for b in replay(purchases.before(CUT)) if len(b.items) > 5 and len(b.history))
    rng = np.random.default_rng(0)
    one = listed(purchases, windows[1], basket, rng, user=User(nobody, basket.at), stranger=True)
    assert one is not None
    assert not one.history.any()
    assert not one.history_weight.any()


def test_lists_are_put_together_in_their_order(purchases: Purchases, windows: Windows) -> None:
    rng = np.random.default_rng(0)
    every = [
        listed(purchases, windows[1], basket, rng, negatives=5)
        for basket in list(replay(purchases.before(CUT)))[-30:]
    ]
    lists = [one for one in every if one is not None]
    together = module._joined([module.NO_LISTS, *lists])
    assert len(together.start) == len(lists) + 1 > 10
    for i, one in enumerate(lists):
        rows = slice(together.start[i], together.start[i + 1])
        np.testing.assert_array_equal(together.dense[rows], one.dense)
        np.testing.assert_array_equal(together.categorical[rows], one.categorical)
        np.testing.assert_array_equal(together.history[i], one.history[0])
        np.testing.assert_array_equal(together.basket[i], one.basket[0])


def test_the_graph_is_that_of_the_oldest_window_in_the_codes_of_the_cut(
    purchases: Purchases, windows: Windows, tmp_path: Path
) -> None:
    early, final = windows
    for name, window in (("early", early), ("final", final)):
        write_statistics(tmp_path / name, window.statistics, {})
    module._write_graph(tmp_path, tmp_path / "final", tmp_path / "early", purchases.item_ids)
    write_manifest(tmp_path)
    neighbours, weights = read_graph(tmp_path)
    assert neighbours.shape == weights.shape == (len(final.statistics.item_ids) + 1, GRAPH_DEGREE)
    np.testing.assert_allclose(weights.sum(1)[weights.any(1)], 1, rtol=1e-5)
    assert not weights[0].any()
    assert not weights[neighbours == 0].any()
    known = set(early.statistics.item_ids.tolist())
    for code, item in enumerate(final.statistics.item_ids.tolist()):
        if item not in known:
            assert not weights[code + 1].any()
            continue
        row = early.statistics.code_of[item]
        near = early.statistics.neighbours[row, :GRAPH_DEGREE]
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
    with pytest.raises(ValueError, match="bring more history"):
        built(tmp_path, "short", toy_dataset(users=20, weeks=6), pd.Timestamp("2024-02-01", tz="UTC"), {})


@pytest.mark.slow
def test_examples_do_not_depend_on_events_after_the_cut(toy_line: Path, tmp_path: Path) -> None:
    data = read_dataset(toy_line / "dataset")
    early = Dataset(data.events[data.events["at"] < CUT], data.items, {"name": "cut"})
    examples = built(tmp_path, "early", early, CUT, TOY_EXAMPLES)
    for part in ("ranker_train", "ranker_calibration", "retriever"):
        files = sorted((toy_line / "examples" / part).glob("*.npy"))
        assert files
        for file in files:
            assert file.read_bytes() == (examples / part / file.name).read_bytes(), file
