"""Packs of payloads: each payload is in one record, and damage is told by name."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from libs.storage.arrow_log import PAYLOAD_SCHEMA
from libs.storage.arrow_packs import pack_batch, stored_payloads
from libs.storage.errors import CorruptRecord
from libs.storage.ids import MAX_MESSAGE_ID
from libs.storage.keys import parse_payload_key, payload_key
from libs.storage.payload_packs import (
    PACK_MESSAGES,
    PACKED_BYTES_MAX,
    PACKED_MESSAGES_MIN,
    decode_pack,
    encode_pack,
    pack_key,
    pack_of,
    pack_range,
    parse_pack_key,
    put_payloads,
    without,
)
from libs.storage.payloads import decode_payload, encode_inline
from tests.forms import examples
from tests.unit.storage.damage import Row, damage

FIRST_ID = 3 << 48 | 1000

payloads = st.binary(max_size=12) | st.none()
packs = st.lists(payloads, max_size=PACK_MESSAGES)
in_log_order = st.lists(packs, min_size=1, max_size=5).map(
    lambda some: [
        (pack_key(FIRST_ID + PACK_MESSAGES * at), encode_pack(pack)) for at, pack in enumerate(some)
    ]
)


def here(first_id: int, payloads: list[bytes | None]) -> dict[int, bytes]:
    return {first_id + at: one for at, one in enumerate(payloads) if one is not None}


def exact(rows: list[Row]) -> dict[int, bytes]:
    return {
        one: payload
        for key, value in rows
        for one, payload in decode_pack(parse_pack_key(key), value).items()
    }


def columnar(rows: list[Row]) -> dict[int, bytes]:
    batch = pack_batch(rows)
    assert batch.schema == PAYLOAD_SCHEMA
    batch.validate(full=True)
    assert set(batch.column("uri").to_pylist()) <= {None}
    assert set(batch.column("ingest_shard").to_pylist()) <= {3}
    ids = batch.column("message_id").to_pylist()
    assert ids == sorted(set(ids))
    return dict(zip(ids, batch.column("payload").to_pylist(), strict=True))


@given(packs)
def test_a_pack_gives_back_what_was_put_into_it(pack: list[bytes | None]) -> None:
    assert decode_pack(FIRST_ID, encode_pack(pack)) == here(FIRST_ID, pack)


@given(packs, st.sets(st.integers(FIRST_ID, FIRST_ID + PACK_MESSAGES)))
def test_a_pack_without_some_messages_has_the_others(
    pack: list[bytes | None], gone: set[int]
) -> None:
    left = {one: kept for one, kept in here(FIRST_ID, pack).items() if one not in gone}

    value = without(FIRST_ID, here(FIRST_ID, pack), gone)

    assert (value is None) == (not left)
    assert value is None or decode_pack(FIRST_ID, value) == left


@settings(deadline=None)
@given(
    st.lists(
        st.none() | st.sampled_from([0, 1, PACKED_BYTES_MAX, PACKED_BYTES_MAX + 1, 65_535]),
        max_size=3 * PACK_MESSAGES,
    )
)
def test_each_payload_is_put_once_and_large_ones_into_records_of_their_own(
    sizes: list[int | None],
) -> None:
    given = [None if size is None else bytes(size) for size in sizes]
    rows: list[Row] = []

    put_payloads(lambda *row: rows.append(row), FIRST_ID, given)

    alone: dict[int, Any] = {}
    packed: dict[int, bytes] = {}
    for key, value in rows:
        if pack_range().start <= key < pack_range().end:
            first_id = parse_pack_key(key)
            some = decode_pack(first_id, value)
            assert len(some) >= PACKED_MESSAGES_MIN
            assert {pack_of(FIRST_ID, one) for one in some} == {first_id}
            assert not packed.keys() & some.keys()
            packed |= some
        else:
            assert parse_payload_key(key) not in alone
            alone[parse_payload_key(key)] = decode_payload(value)
    assert len({key for key, _ in rows}) == len(rows)
    assert not alone.keys() & packed.keys()
    assert {**alone, **packed} == here(FIRST_ID, given)
    assert all(len(one) <= PACKED_BYTES_MAX for one in packed.values())
    assert all(
        one in alone for one, kept in here(FIRST_ID, given).items() if len(kept) > PACKED_BYTES_MAX
    )


def test_keys_of_packs_lie_in_the_order_of_their_first_messages() -> None:
    start, end = pack_range(5, 9)

    inside = [one for one in range(12) if start <= pack_key(one) < end]

    assert inside == [5, 6, 7, 8, 9]
    assert pack_range().start < pack_key(MAX_MESSAGE_ID) < pack_range().end
    for first_id in (-1, MAX_MESSAGE_ID + 1):
        with pytest.raises(ValueError, match="first_id"):
            pack_key(first_id)


# --- As columns -------------------------------------------------------------


@settings(deadline=None)
@given(in_log_order)
def test_the_columns_say_what_the_exact_decoder_says(rows: list[Row]) -> None:
    assert columnar(rows) == exact(rows)


@settings(max_examples=examples(300), deadline=None)
@given(in_log_order, st.data())
def test_damaged_bytes_are_refused_or_read_as_by_the_exact_decoder(
    rows: list[Row], data: st.DataObject
) -> None:
    damage(rows, data)
    try:
        expected = exact(rows)
    except CorruptRecord:
        with pytest.raises(CorruptRecord, match="payload pack"):
            columnar(rows)
        return
    assert columnar(rows) == expected


@given(st.binary(max_size=40) | st.binary(max_size=40).map(lambda rest: b"\x01" + rest))
def test_any_bytes_are_a_pack_or_refused(data: bytes) -> None:
    try:
        expected = decode_pack(FIRST_ID, data)
    except CorruptRecord:
        with pytest.raises(CorruptRecord, match="payload pack"):
            pack_batch([(pack_key(FIRST_ID), data)])
        return
    assert columnar([(pack_key(FIRST_ID), data)]) == expected


@pytest.mark.parametrize("names", [["message_id"], ["payload"], ["uri", "ingest_shard"]])
def test_columns_that_are_not_asked_for_are_not_made(names: list[str]) -> None:
    rows = [(pack_key(FIRST_ID), encode_pack([b"a", None, b"c"]))]
    schema = pa.schema([PAYLOAD_SCHEMA.field(name) for name in names])

    batch = stored_payloads(rows, schema)

    assert batch.schema == schema
    assert batch.to_pylist() == stored_payloads(rows).select(names).to_pylist()


def test_records_of_both_kinds_are_told_by_their_keys() -> None:
    alone = stored_payloads([(payload_key(7), encode_inline(b"alone"))])
    packed = stored_payloads([(pack_key(8), encode_pack([b"packed"]))])

    assert [row["payload"] for row in alone.to_pylist()] == [b"alone"]
    assert [row["payload"] for row in packed.to_pylist()] == [b"packed"]
    assert stored_payloads([]).num_rows == 0
