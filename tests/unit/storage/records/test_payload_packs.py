"""Packs of payloads: each payload is in one record, and damage is reported by name."""

from __future__ import annotations

import hashlib
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from libs.storage.arrow.log import PAYLOAD_SCHEMA
from libs.storage.arrow.packs import pack_batch, stored_payloads
from libs.storage.errors import CorruptRecord
from libs.storage.layout.ids import MAX_MESSAGE_ID
from libs.storage.layout.keys import parse_payload_key, payload_key
from libs.storage.records.payload_packs import (
    COMPRESSED_TYPE,
    PACK_MESSAGES,
    PACK_TYPE,
    PACKED_BYTES_MAX,
    PACKED_MESSAGES_MIN,
    UNTRIED_PACKS,
    decode_pack,
    encode_pack,
    pack_key,
    pack_of,
    pack_range,
    parse_pack_key,
    payload_rows,
    plain_pack,
    rest_of_pack,
)
from libs.storage.records.payloads import decode_payload, encode_inline
from tests.forms import examples
from tests.unit.storage.records.damage import Row, damage

FIRST_ID = 3 << 48 | 1000

payloads = (
    st.binary(max_size=12)
    | st.none()
    # What becomes smaller, and what does not.
    | st.integers(0, 400).map(lambda size: b"alike " * size)
    | st.integers(0, 400).map(lambda seed: hashlib.shake_128(b"%d" % seed).digest(seed))
)
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


def test_a_pack_is_compressed_where_that_saves_an_eighth() -> None:
    alike, unlike = (
        [b"alike " * 20] * 16,
        [hashlib.shake_128(b"%d" % n).digest(120) for n in range(16)],
    )

    assert encode_pack(alike)[0] == COMPRESSED_TYPE
    assert len(encode_pack(alike)) < 200
    assert encode_pack(alike, compress=False)[0] == PACK_TYPE
    assert encode_pack(unlike)[0] == PACK_TYPE
    assert encode_pack([b"alike"] * 16)[0] == PACK_TYPE
    assert plain_pack(encode_pack(alike)) == encode_pack(alike, compress=False)
    assert plain_pack(encode_pack(unlike)) == encode_pack(unlike)


def test_what_does_not_become_smaller_is_tried_now_and_then() -> None:
    unlike = [hashlib.shake_128(b"%d" % n).digest(120) for n in range(PACK_MESSAGES)]
    given = [*unlike * 2, *[b"alike " * 20] * PACK_MESSAGES * (UNTRIED_PACKS + 1)]
    kinds: list[int] = []

    kinds += [value[0] for _, value in payload_rows(FIRST_ID, given)]

    assert kinds == [PACK_TYPE] * (UNTRIED_PACKS + 1) + [COMPRESSED_TYPE] * 2

    # What is too small to be tried says nothing of what follows.
    kinds.clear()
    small = [b"too small"] * PACK_MESSAGES
    kinds += [value[0] for _, value in payload_rows(FIRST_ID, [*small, *given[-32:]])]
    assert kinds == [PACK_TYPE] + [COMPRESSED_TYPE] * 2


def test_frames_of_other_compressors_are_read() -> None:
    # One raw block in a frame that states its size.
    frame = "28b52ffd200529000068656c6c6f"
    assert decode_pack(42, bytes.fromhex("0202000300000002000000" + frame)) == {
        42: b"hel",
        43: b"lo",
    }


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("0201000600000028b52ffd200529000068656c6c6f", "5 bytes, expected 6"),
        ("0201000500000028b52ffd200529000068656c6c", "Zstandard"),
        ("0201000500000028b52ffe200529000068656c6c6f", "Zstandard"),
        ("0201000500000028b52ffd200529000068656c6c6f00", "Zstandard"),
        # A frame that does not state its size, and one that states a terabyte.
        ("0201000500000028b52ffd005829000068656c6c6f", "expected 5"),
        ("0201000500000028b52ffde000000000000100002900", "expected 5"),
        ("0201000500", "too early"),
        ("0201", "too early"),
        ("0301000500000068656c6c6f", "unknown type 03"),
    ],
)
def test_damaged_frames_are_reported(content: str, complaint: str) -> None:
    data = bytes.fromhex(content)
    with pytest.raises(CorruptRecord, match=complaint):
        decode_pack(FIRST_ID, data)
    with pytest.raises(CorruptRecord, match=complaint):
        pack_batch([(pack_key(FIRST_ID), data)])


@given(packs, st.sets(st.integers(FIRST_ID, FIRST_ID + PACK_MESSAGES)))
def test_a_pack_without_some_messages_has_the_others(
    pack: list[bytes | None], gone: set[int]
) -> None:
    left = {one: kept for one, kept in here(FIRST_ID, pack).items() if one not in gone}

    value, records = rest_of_pack(FIRST_ID, here(FIRST_ID, pack), gone)

    assert (value is None) == (len(left) < PACKED_MESSAGES_MIN)
    packed = {} if value is None else decode_pack(FIRST_ID, value)
    single = {one: decode_payload(record) for one, record in records.items()}
    assert packed | single == left
    assert not (packed and single)


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

    rows = list(payload_rows(FIRST_ID, given))

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


@given(
    st.binary(max_size=40)
    | st.builds(bytes.__add__, st.sampled_from([b"\x01", b"\x02"]), st.binary(max_size=40))
)
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


def test_records_of_both_kinds_are_reported_by_their_keys() -> None:
    alone = stored_payloads([(payload_key(7), encode_inline(b"alone"))])
    packed = stored_payloads([(pack_key(8), encode_pack([b"packed"]))])

    assert [row["payload"] for row in alone.to_pylist()] == [b"alone"]
    assert [row["payload"] for row in packed.to_pylist()] == [b"packed"]
    assert stored_payloads([]).num_rows == 0
