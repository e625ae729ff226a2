import itertools

import pytest

from serving.checkout.call_headers import Call, read_call
from serving.errors import InvalidRequest


def read(limit_s: float = 0.05, **headers: str) -> Call:
    return read_call(
        {name.replace("_", "-"): text for name, text in headers.items()}, "V1", limit_s, arrived=100.0
    )


def test_without_headers_a_call_is_a_checkout_s_with_the_server_s_deadline() -> None:
    call = read()
    assert (call.arrived, call.deadline, call.priority, call.route) == (100.0, 100.05, "checkout", "V1")
    assert call.traceparent is None
    assert not call.gone()


def test_a_header_may_only_shorten_the_deadline() -> None:
    assert read(x_deadline_ms="20").deadline == 100.02
    assert read(x_deadline_ms="12.5").deadline == 100.0125
    assert read(x_deadline_ms="9000").deadline == 100.05
    assert read(x_deadline_ms="inf").deadline == 100.05


@pytest.mark.parametrize("text", ["", "soon", "0", "-1", "nan", "1 2"])
def test_an_invalid_deadline_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest, match="x-deadline-ms must be a number of milliseconds above 0"):
        read(x_deadline_ms=text)


def test_the_priority_is_one_of_two() -> None:
    assert read(x_priority="prefetch").priority == "prefetch"
    with pytest.raises(InvalidRequest, match="x-priority must be checkout or prefetch"):
        read(x_priority="urgent")


def test_a_given_id_is_kept_and_generated_ids_are_distinct() -> None:
    assert read(x_request_id="till-4").request_id == "till-4"
    made = [read(x_request_id=bad).request_id for bad in ("", "a\x00b", "x" * 129)]
    assert len({*made, *(read().request_id for _ in range(100))}) == 103
    assert all(one != other for one, other in itertools.pairwise(made))
    assert read(traceparent="00-aa-bb-01").traceparent == "00-aa-bb-01"
