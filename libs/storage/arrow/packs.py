"""Stored payloads as Arrow columns; the layouts of both kinds: payloads.py, payload_packs.py.

A message of a pack follows from the pack's key and the message's place in it, so no Python runs for
each message; a compressed pack is decompressed by one call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import pyarrow as pa

from libs.storage.arrow import columns
from libs.storage.arrow.columns import Mask
from libs.storage.arrow.log import PAYLOAD_SCHEMA, payload_batch, shards
from libs.storage.errors import CorruptRecord
from libs.storage.layout.keys import RecordType, key_head
from libs.storage.layout.primitives import Row
from libs.storage.records.payload_packs import (
    ABSENT,
    PACK_TYPE,
    decode_pack,
    parse_pack_key,
    plain_pack,
)

_PACK: Final = key_head(RecordType.PAYLOAD_PACK)
_HEAD: Final = np.dtype([("kind", "u1"), ("count", "<u2")])
_SIZE: Final = np.dtype("<u4")


def stored_payloads(rows: Sequence[Row], schema: pa.Schema = PAYLOAD_SCHEMA) -> pa.RecordBatch:
    """The payloads of records that are all of one kind: one message each, or packs."""
    packs = bool(rows) and rows[0][0].startswith(_PACK)
    return pack_batch(rows, schema) if packs else payload_batch(rows, schema)


def pack_batch(rows: Sequence[Row], schema: pa.Schema = PAYLOAD_SCHEMA) -> pa.RecordBatch:
    """The payloads of packs; CorruptRecord when one is damaged.

    Only the columns of `schema` are made; values are always read, since only they say which
    messages a pack has.
    """
    data, starts, ends = columns.join([plain_pack(value) for _, value in rows])
    heads = columns.rows_at(data, starts, _HEAD)
    counts = heads["count"].astype(np.int64)
    begins = starts + _HEAD.itemsize + _SIZE.itemsize * counts
    _refuse(rows, (heads["kind"] != PACK_TYPE) | (begins > ends))

    places = columns.elements(starts + _HEAD.itemsize, counts, _SIZE.itemsize)
    sizes = columns.rows_at(data, places, _SIZE).astype(np.int64)
    here = sizes != ABSENT
    lengths = np.where(here, sizes, 0)
    before = np.concatenate((np.zeros(1, np.int64), np.cumsum(lengths)))  # and at the end, of all
    firsts = np.cumsum(counts) - counts
    _refuse(rows, begins + before[firsts + counts] - before[firsts] != ends)

    ids = columns.elements(columns.last_numbers(rows), counts, 1)[here]
    begins_of_each = (before[:-1] + np.repeat(begins - before[firsts], counts))[here]
    found = (begins_of_each, lengths[here])
    return columns.batch(
        schema,
        {
            "message_id": lambda: pa.array(ids),
            "ingest_shard": lambda: shards(ids),
            "payload": lambda: columns.pieces("payload pack", data, found, pa.binary()),
            "uri": lambda: pa.nulls(len(ids), pa.string()),
        },
    )


def _refuse(rows: Sequence[Row], odd: Mask) -> None:
    """Raise the exact decoder's error for the first odd row."""
    for at in np.flatnonzero(odd).tolist():
        key, value = rows[at]
        decode_pack(parse_pack_key(key), value)
        raise CorruptRecord("payload pack", "columns and exact decoder disagree")
