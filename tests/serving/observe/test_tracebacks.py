"""A traceback says where and what kind of fault it was, and nothing of what a shopper sent."""

import io
import logging

import pytest

from serving.errors import RankerUnavailable
from serving.observe.stderr_log import log_to
from serving.observe.tracebacks import MOST, wordless

CANARY = "CANARY-SHOPPER"


def raised(error: Exception, behind: Exception | None = None) -> Exception:
    """The error as it is once it was raised, while another one was handled if there is one."""
    try:
        try:
            raise behind or error
        except KeyError:
            raise error  # noqa: B904 - what is behind it comes by itself
    except type(error) as caught:
        return caught


def test_it_says_where_and_what_kind_and_not_which_value() -> None:
    said = wordless(raised(ValueError(CANARY), KeyError(CANARY)))
    assert CANARY not in said
    assert said.count("in raised") == 2
    assert said.splitlines()[-1] == "KeyError"
    assert "\nValueError\nwhich came after:\n" in said


def test_the_words_of_our_own_errors_and_of_the_system_s_stay() -> None:
    assert wordless(raised(RankerUnavailable("no route"))).endswith("\nRankerUnavailable: no route")
    assert "No space left" in wordless(raised(OSError(28, "No space left on device"), KeyError(CANARY)))


def test_errors_in_a_ring_have_an_end() -> None:
    error = raised(KeyError(CANARY))
    error.__cause__ = ValueError(CANARY)
    error.__cause__.__cause__ = error
    assert wordless(error).count("which came after") == MOST - 1


def test_the_endpoint_s_log_is_without_words(monkeypatch: pytest.MonkeyPatch) -> None:
    written, root = io.BytesIO(), logging.getLogger()
    monkeypatch.setattr(root, "handlers", [])
    kept = root.level, logging.getLogger("kserve").level
    try:
        log_to(written)
        logging.getLogger("serving").error("predict failed", exc_info=raised(KeyError(CANARY)))
        root.handlers[0].close()
    finally:
        root.setLevel(kept[0])
        logging.getLogger("kserve").setLevel(kept[1])
    said = written.getvalue().decode()
    assert "predict failed\n" in said
    assert said.endswith("\nKeyError\n")
    assert CANARY not in said
