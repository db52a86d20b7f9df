"""What an ingest would have stored: payloads, log entries, its block of IDs, its clock."""

from __future__ import annotations

from functools import cache
from typing import Any

from benchmarks.suite import payloads
from benchmarks.volume.packs import Packs
from benchmarks.volume.plan import Layout, retention_s
from libs.storage.layout.ids import IdAllocator, SeqBlock, encode_seq_block
from libs.storage.layout.keys import RecordType, key_head, log_key
from libs.storage.layout.own_keys import CLOCK_KEY, ID_BLOCK_KEY
from libs.storage.records.metadata import encode_headers, encode_log_columns
from libs.storage.records.payload_packs import payload_rows
from libs.storage.records.states import encode_clock

AT_ONCE = 1000


async def write_ingest(layout: Layout, states: Any, packs: Packs) -> None:
    """Payloads alone, the log, packs: each in the order of its keys, as tables are sorted."""
    await _write_payloads(layout, packs, RecordType.PAYLOAD)
    await _write_entries(layout, states, packs)
    await _write_payloads(layout, packs, RecordType.PAYLOAD_PACK)
    packs.put(ID_BLOCK_KEY, encode_seq_block(_last_block(layout.volume.messages)))
    packs.put(CLOCK_KEY, encode_clock(layout.now_ms))
    await packs.finish()


async def _write_payloads(layout: Layout, packs: Packs, kind: RecordType) -> None:
    """Those in records of this kind, by entry.

    Each has its number, by which benchmarks.suite.payloads checks that it came back whole.
    """
    volume, head = layout.volume, key_head(kind)

    for place in range(0, volume.stored, volume.entry):
        count = min(volume.entry, volume.stored - place)
        if head not in _heads(count, volume.payload_bytes):
            continue
        first_id = layout.id_of(place)
        ids = range(first_id, first_id + count)
        contents = [payloads.make(one, volume.payload_bytes) for one in ids]
        for key, value in payload_rows(first_id, contents):
            if key.startswith(head):
                packs.put(key, value)
        if packs.full:
            await packs.write()


@cache
def _heads(count: int, payload_bytes: int) -> frozenset[bytes]:
    """The prefixes of the payload keys of an entry with `count` messages."""
    length = len(key_head(RecordType.PAYLOAD))
    rows = payload_rows(1, [bytes(payload_bytes)] * count)
    return frozenset(key[:length] for key, _ in rows)


async def _write_entries(layout: Layout, states: Any, packs: Packs) -> None:
    volume = layout.volume
    headers = [encode_headers({"topic": queue_id}) for queue_id in volume.queue_ids()]
    for commit in range(layout.commits):
        first = commit * volume.entry
        count = min(volume.entry, volume.stored - first)
        received_ms = layout.received_ms(commit)
        entry = encode_log_columns(
            layout.id_of(first),
            received_ms,
            [received_ms] * count,
            [retention_s(state) for state in states[first : first + count].tolist()],
            [headers[place % volume.queues] for place in range(first, first + count)],
            [volume.payload_bytes] * count,
        )
        packs.put(log_key(layout.id_of(first)), entry)
        if packs.full:
            await packs.write()


def _last_block(messages: int) -> SeqBlock:
    """The block of IDs that a shard has begun after it has allocated `messages` IDs."""
    ids, last = IdAllocator(None), None
    while messages > 0:
        count = min(messages, AT_ONCE)
        last = ids.allocate(count)[1] or last
        messages -= count
    assert last is not None, "the first ID begins a block"
    return last
