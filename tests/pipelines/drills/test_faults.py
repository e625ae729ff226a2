"""Faults whose effect shows without a system; `test_run` shows the effect of the others."""

import contextlib
from pathlib import Path

import numpy as np
import pytest

from feature_repo.aggregates import unpack
from pipelines.drills import faults
from pipelines.drills.fault_proxy import Proxy
from pipelines.drills.faults import poisoned
from serving.stores.online_features import HISTORY_FIELD, bytes_value
from tests.chaos.listening import listening
from tests.chaos.rows import packed, proto
from tests.pipelines.drills.parts import system_of


def test_each_kind_of_poison_is_unreadable_or_an_impossible_price() -> None:
    row = {HISTORY_FIELD: proto(packed("apple", "pear"))}
    spoilt = [poisoned("42", row, number)[HISTORY_FIELD] for number in range(6)]
    cut, nonsense, other_format, *money = spoilt
    with pytest.raises(ValueError, match="cut short"):
        unpack(bytes_value(cut))
    with pytest.raises(ValueError, match="not a Feast bytes value"):
        bytes_value(nonsense)
    with pytest.raises(ValueError, match="format 99"):
        unpack(bytes_value(other_format))
    *none, absurd = money
    for value in none:
        with pytest.raises(ValueError, match="an invalid time, kind or amount"):
            unpack(bytes_value(value))
    np.testing.assert_array_equal(unpack(bytes_value(absurd)).paid, np.full(2, 1e30, np.float32))
    assert poisoned("42", row, 6)[HISTORY_FIELD] == cut, "in turns"


def test_a_spoilt_bundle_differs_in_one_byte_or_lacks_half_a_file(tmp_path: Path) -> None:
    (tmp_path / "ranker.onnx").write_bytes(b"0123456789")
    (tmp_path / "index.faiss").write_bytes(b"0123456789")
    faults.flip_a_byte(tmp_path)
    faults.cut_in_half(tmp_path)
    ranker = (tmp_path / "ranker.onnx").read_bytes()
    assert sum(one != other for one, other in zip(ranker, b"0123456789", strict=True)) == 1
    assert (tmp_path / "index.faiss").read_bytes() == b"01234"


def test_the_longest_time_with_too_few_processes_is_of_one_run() -> None:
    looks = [(0.0, 2), (0.5, 1), (1.0, 0), (1.5, 0), (2.0, 1), (2.5, 0), (3.0, 2), (4.0, 2)]
    assert faults.longest_below(1, looks) == 1.0
    assert faults.longest_below(2, looks) == 2.5
    assert faults.longest_below(1, [(0.0, 1), (1.0, 2)]) == faults.longest_below(1, []) == 0.0


def test_a_proxy_fault_is_removed_even_after_an_error() -> None:
    with listening(lambda client: None) as address, Proxy(address) as proxy:
        system = system_of(proxy=proxy)
        with contextlib.suppress(RuntimeError), faults.store_late(0.02)(system, {}):
            assert proxy.latency_s() == 0.02
            raise RuntimeError
        assert proxy.latency_s() == 0.0
        with faults.answers_cut(7)(system, {}):
            assert proxy.limit_bytes == 7
        with faults.answers_drip(1, 0.01)(system, {}):
            assert proxy.limit_bytes is None
            assert proxy.drip == (1, 0.01)
        healed: object = proxy.drip
        assert healed is None


def test_one_answer_in_n_is_late() -> None:
    late = faults.store_late_now_and_then(4, 0.2)
    with (
        listening(lambda client: None) as address,
        Proxy(address) as proxy,
        late(system_of(proxy=proxy), {}),
    ):
        waits = [proxy.latency_s() for _ in range(12)]
    assert waits == [0.0, 0.0, 0.0, 0.2] * 3
