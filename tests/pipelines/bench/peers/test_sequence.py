"""SASRec on the shop of two worlds, and the pieces that it reads."""

from pipelines.bench.peers.sequence import LENGTH, _sequences, fit_sasrec
from tests.pipelines.bench.peers.worlds import apart, shop, two_worlds


def test_a_sequence_of_one_world_goes_on_in_it() -> None:
    apart(fit_sasrec(two_worlds(), 15))


def test_long_histories_are_cut_into_pieces_that_overlap_by_one_item() -> None:
    seen = shop([[item % 3] for item in range(LENGTH + 2)], [[2]], items=3)
    first, second, short = _sequences(seen)
    assert first.tolist() == [item % 3 + 1 for item in range(LENGTH + 1)]
    assert second.tolist()[:2] == [LENGTH % 3 + 1, (LENGTH + 1) % 3 + 1]
    assert short.tolist()[:2] == [3, 0]
