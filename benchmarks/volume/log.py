"""What an ingest would have stored: payloads, log entries, its block of IDs, its clock."""

from __future__ import annotations

from typing import Any

from benchmarks.suite import payloads
from benchmarks.volume.packs import Packs
from benchmarks.volume.plan import Layout, retention_s
from libs.storage.ids import IdAllocator, SeqBlock, encode_seq_block
from libs.storage.keys import log_key, payload_key
from libs.storage.metadata import encode_headers, encode_log_columns
from libs.storage.own_keys import CLOCK_KEY, ID_BLOCK_KEY
from libs.storage.payloads import encode_inline
from libs.storage.states import encode_clock

AT_ONCE = 1000


async def write_ingest(layout: Layout, states: Any, packs: Packs) -> None:
    """The payloads, then the log: each in the order of its keys, as tables are sorted."""
    await _write_payloads(layout, packs)
    await _write_entries(layout, states, packs)
    packs.put(ID_BLOCK_KEY, encode_seq_block(_last_block(layout.volume.messages)))
    packs.put(CLOCK_KEY, encode_clock(layout.now_ms))
    await packs.finish()


async def _write_payloads(layout: Layout, packs: Packs) -> None:
    """Each with its number: benchmarks.suite.payloads tells whether it came back whole."""
    volume = layout.volume
    size, make, put = volume.payload_bytes, payloads.make, packs.put
    for first in range(0, volume.stored, AT_ONCE):
        for place in range(first, min(first + AT_ONCE, volume.stored)):
            message_id = layout.id_of(place)
            put(payload_key(message_id), encode_inline(make(message_id, size)))
        if packs.full:
            await packs.write()


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
    """The block of IDs that a shard has begun which has given so many."""
    ids, last = IdAllocator(None), None
    while messages > 0:
        count = min(messages, AT_ONCE)
        last = ids.allocate(count)[1] or last
        messages -= count
    assert last is not None, "the first ID begins a block"
    return last
