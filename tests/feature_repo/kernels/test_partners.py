"""Partners of items against a dictionary."""

from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from feature_repo.kernels.pairs import link_to
from feature_repo.queries import bought_together, strongest_partners
from feature_repo.statistics import NO_ITEM, Statistics


@given(st.lists(st.integers(0, 79), unique=True, max_size=12))
def test_partners_are_those_that_a_dictionary_collects(toy_tables: Statistics, items: list[int]) -> None:
    partners = bought_together(toy_tables, np.array(items, np.int64))
    weights = toy_tables.link_weights
    expected: dict[int, list[np.ndarray]] = {}
    for item in items:
        for partner, count in zip(toy_tables.neighbours[item], toy_tables.together_count[item], strict=True):
            if partner != NO_ITEM:
                strength = count * weights[item, :3] * weights[partner, 3:]
                expected.setdefault(int(partner), []).append(strength)
    assert partners.codes.tolist() == list(expected)
    assert partners.links.tolist() == [len(links) for links in expected.values()]
    if expected:
        sums = np.array([np.sum(links, 0) for links in expected.values()]).T
        largest = np.array([np.max(links, 0) for links in expected.values()]).T
        np.testing.assert_allclose(partners.sums, sums, rtol=1e-5)
        np.testing.assert_allclose(partners.largest, largest, rtol=1e-5)
        codes = np.array(list(expected))
        for code, strongest in zip(
            codes, strongest_partners(toy_tables, np.array(items), codes).tolist(), strict=True
        ):
            by_item = {
                item: float(count * weights[item, 0])
                for item in items
                for partner, count in zip(
                    toy_tables.neighbours[item], toy_tables.together_count[item], strict=True
                )
                if partner == code
            }
            assert by_item[strongest] == max(by_item.values())
    wanted = np.arange(80)
    weights, given_items = toy_tables.link_weights, np.array(items, np.int64)
    found = toy_tables.marked(
        link_to,
        wanted,
        given_items,
        weights[given_items, 0],
        toy_tables.neighbours,
        toy_tables.together_count,
    )
    np.testing.assert_allclose(
        found * weights[wanted, 3],
        [sum(link[0] for link in expected.get(code, [])) for code in range(80)],
        rtol=1e-5,
    )


def test_items_without_partners_have_no_links(toy_tables: Statistics) -> None:
    lonely = replace(toy_tables, neighbours=np.full_like(toy_tables.neighbours, NO_ITEM))
    assert len(bought_together(lonely, np.arange(5)).codes) == 0
    assert strongest_partners(lonely, np.arange(5), np.array([7, 9])).tolist() == [NO_ITEM, NO_ITEM]
