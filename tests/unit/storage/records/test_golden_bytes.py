"""The library against the pinned bytes: written so, read so, and nothing else taken for it."""

from pathlib import Path

import pytest

from libs.storage.errors import CorruptRecord
from libs.storage.layout import keys
from libs.storage.layout.ids import message_id
from libs.storage.layout.primitives import Reader, terminated
from tests.unit.storage.records import (
    golden,
    golden_archived,
    golden_dedupe,
    golden_delayed,
    golden_events,
    golden_execution,
    golden_own,
    golden_packs,
    golden_redrive,
    golden_replay,
    golden_tasks,
)
from tests.unit.storage.records.golden import Row

REFERENCE = Path(__file__).parents[4] / "docs/reference/encodings.md"

OWN = (
    golden_own,
    golden_archived,
    golden_dedupe,
    golden_delayed,
    golden_events,
    golden_execution,
    golden_packs,
    golden_redrive,
    golden_replay,
    golden_tasks,
)
OWN_KEYS = [row for records in OWN for row in records.KEYS]
OWN_VALUES = [row for records in OWN for row in records.VALUES]
KEY_ROWS = golden.KEYS + OWN_KEYS
ROWS = KEY_ROWS + golden.VALUES + OWN_VALUES

each_row = pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
each_key = pytest.mark.parametrize("row", KEY_ROWS, ids=lambda row: row.name)


@each_row
def test_golden_bytes_decode_to_their_value(row: Row) -> None:
    assert row.decode(row.data) == row.value


@pytest.mark.parametrize("row", [row for row in ROWS if row.encode], ids=lambda row: row.name)
def test_a_value_encodes_to_its_golden_bytes(row: Row) -> None:
    assert row.encode is not None
    assert row.encode().hex() == row.hex


@pytest.mark.parametrize("name", golden_own.CONSTANT_KEYS)
def test_keys_without_a_suffix_are_their_golden_bytes(name: str) -> None:
    key, golden_hex = golden_own.CONSTANT_KEYS[name]
    assert key.hex() == golden_hex


@pytest.mark.parametrize("row", OWN_KEYS + OWN_VALUES, ids=lambda row: row.name)
def test_the_reference_page_shows_our_golden_bytes(row: Row) -> None:
    assert f"`{row.hex}`" in REFERENCE.read_text()


def test_golden_queue_ids_and_binary_terminate_as_the_design_says() -> None:
    rows = {b"orders": "6f726465727300", b"a\x00b\x01c\xffd": "6101016201026301036400"}
    for raw, golden_hex in rows.items():
        assert terminated(raw).hex() == golden_hex
        assert Reader("row", bytes.fromhex(golden_hex)).terminated("bytes") == raw


def test_the_golden_message_id_is_shard_then_sequence() -> None:
    assert message_id(shard=1, sequence=1) == 0x1000000000001


@each_row
def test_bytes_cut_anywhere_raise_an_error_naming_the_record(row: Row) -> None:
    for length in set(range(len(row.data))) - set(row.ends):
        with pytest.raises(CorruptRecord) as caught:
            row.decode(row.data[:length])
        assert caught.value.record == row.record
        assert row.record in str(caught.value)


@each_row
def test_bytes_cut_where_an_optional_part_begins_are_a_whole_record(row: Row) -> None:
    for length in row.ends:
        assert row.decode(row.data[:length]) is not None


@each_row
@pytest.mark.parametrize("extra", [b"\x00", b"\xff"], ids=bytes.hex)
def test_bytes_after_the_end_raise_an_error_naming_the_record(row: Row, extra: bytes) -> None:
    with pytest.raises(CorruptRecord) as caught:
        row.decode(row.data + extra)
    assert caught.value.record == row.record


@each_key
def test_a_key_of_an_unknown_version_raises(row: Row) -> None:
    for version in (0x00, 0x02, 0xFF):
        with pytest.raises(CorruptRecord, match=f"unknown version {version:02x}") as caught:
            row.decode(bytes((version,)) + row.data[1:])
        assert caught.value.record == row.record


@each_key
def test_a_key_of_another_type_raises(row: Row) -> None:
    for record_type in {0x00, 0x07, 0x44, 0xFF, *keys.RecordType} - {row.data[1]}:
        with pytest.raises(CorruptRecord, match=f"type {record_type:02x} instead of") as caught:
            row.decode(bytes((row.data[0], record_type)) + row.data[2:])
        assert caught.value.record == row.record


TEXTS = ["order", "eu", "worker-a", "no such", "boom", "orders", "lease_ms", "30000", "/x/", "req"]
ROWS_WITH_TEXT = [row for row in ROWS if any(text.encode() in row.data for text in TEXTS)]


@pytest.mark.parametrize("row", ROWS_WITH_TEXT, ids=lambda row: row.name)
def test_text_that_is_not_utf8_raises_an_error_naming_the_record(row: Row) -> None:
    for text in (text.encode() for text in TEXTS):
        if text in row.data:
            with pytest.raises(CorruptRecord) as caught:
                row.decode(row.data.replace(text, b"\x80" + text[1:], 1))
            assert caught.value.record == row.record


def test_every_kind_of_text_is_tried_with_bad_utf8() -> None:
    names = {row.record for row in ROWS_WITH_TEXT}
    assert names >= {
        "active key", "attempts key", "config key", "queue state key", "payload value",
        "metadata record", "log entry", "active value", "done value", "failed value",
        "attempts value", "config value", "request IDs", "outbox value", "executed", "redrive",
    }  # fmt: skip
