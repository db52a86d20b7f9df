"""Golden bytes of archived messages, under the same rule as those in golden.py."""

from libs.storage.layout import keys, own_keys
from libs.storage.records import archived_records, states
from tests.unit.storage.records.golden import Row
from tests.unit.storage.records.golden_own import ORDER, PURGED, STATE

RUN = "dead-letters-1767225700000-1"

ARCHIVED = [
    archived_records.ArchivedMessage(45, 1767225604000, 1767225700000, 3, 3, 1767229200005, RUN),
    archived_records.ArchivedMessage(46, 1767225604000, 1767225700000, 5, 128, 0, RUN),
]
SOME = states.ArchivedRecord(21, 22, states.OrderRange(23, 24))

KEYS = [
    Row(
        "archived key",
        "archived key",
        own_keys.parse_archived_key,
        keys.BucketKey("orders", ORDER),
        "01526f726465727300000266ddb6aa0002",
        lambda: own_keys.archived_key("orders", ORDER),
    ),
]
VALUES = [
    Row(
        "archived value",
        "archived value",
        archived_records.decode_archived,
        ARCHIVED,
        "02002d00000000000000a0b7da769b010000a02edc769b010000030003859611779b01000000002e0000"
        "0000000000a0b7da769b010000a02edc769b0100000500800000000000000000000001001c0064656164"
        "2d6c6574746572732d313736373232353730303030302d31",
        lambda: archived_records.encode_archived(ARCHIVED),
    ),
    Row(
        "queue state with archived ones",
        "queue state",
        states.decode_queue_state,
        STATE._replace(purges=states.PurgesRecord(2), archived=SOME),
        "0102000200aab6dd66020002000001070000000000000003000000040000000000000005000000000000"
        "00060000000000000008000000000000000900000000000000020003000a000000000000000b000c0000"
        "00000000000d0000000000000080010e0000000000000000000f00000000000000100000000000000002"
        "000000000000000000000000000000000000000000000000000000000000000000001500000000000000"
        "160000000000000017000000000000001800000000000000",
        lambda: states.encode_queue_state(STATE._replace(archived=SOME)),
        ends=(125, 160),
    ),
    Row(
        "queue state after purges with archived ones",
        "queue state",
        states.decode_queue_state,
        PURGED._replace(archived=SOME),
        "0102000200aab6dd66020002000001070000000000000003000000040000000000000005000000000000"
        "00060000000000000008000000000000000900000000000000020003000a000000000000000b000c0000"
        "00000000000d0000000000000080010e0000000000000000000f00000000000000100000000000000004"
        "020002031100000000000000120000000000000013000000000000001400000000000000150000000000"
        "0000160000000000000017000000000000001800000000000000",
        lambda: states.encode_queue_state(PURGED._replace(archived=SOME)),
        ends=(125, 162),
    ),
]
