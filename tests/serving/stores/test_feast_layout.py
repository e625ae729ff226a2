import pytest

from serving.errors import RowInvalid
from serving.stores.feast_layout import bytes_value, entity_key, timestamp
from tests.chaos.rows import AT, TIMESTAMP, proto

# Feast 0.67's bytes for user "42"; the slow tests of `publish_features` check Feast itself against them.
KEY_42 = bytes.fromhex("010000000200000007000000") + b"user_id" + bytes.fromhex("0200000002000000") + b"42"


def test_entity_key_is_feasts() -> None:
    assert entity_key("42") == KEY_42


def test_a_user_id_that_is_not_unicode_has_no_row() -> None:
    with pytest.raises(RowInvalid, match="no valid Unicode"):
        entity_key("\ud800")


@pytest.mark.parametrize("value", [b"", b"a", b"x" * 300])
def test_a_bytes_value_is_read(value: bytes) -> None:
    assert bytes_value(proto(value)) == value


@pytest.mark.parametrize("torn", [b"", b"\x0a", b"\x0a\xff", b"\x0a\x09abc", b"\x12\x02ab", b"\x0a\x01ab"])
def test_a_truncated_value_is_reported(torn: bytes) -> None:
    with pytest.raises(ValueError, match="stored value"):
        bytes_value(torn)


def test_a_timestamp_is_read_and_a_truncated_one_is_reported() -> None:
    assert timestamp(TIMESTAMP) == AT
    assert timestamp(TIMESTAMP + b"\x10\x80\xca\xb5\xee\x01") == AT + 0.5
    for torn in (b"\x08", b"\x22\x01"):
        with pytest.raises(ValueError, match="stored"):
            timestamp(torn)
