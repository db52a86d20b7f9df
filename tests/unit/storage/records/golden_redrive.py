"""Golden bytes of redrives, under the same rule as those in golden.py."""

from libs.storage.layout import own_keys
from libs.storage.records import redrive_records
from tests.unit.storage.records.golden import Row

REDRIVE = redrive_records.RedriveRecord(
    queue_revision=9,
    state=redrive_records.RedriveState.FAILED,
    rate=50,
    created_at_ms=1767225600000,
    ended_at_ms=1767225601000,
    total_count=300,
    examined_count=20,
    redriven_count=10,
    next_order=0x0123456789ABCDEF,
    next_place=3,
    end_order=0x0123456789ABCDFF,
    queue_id="orders",
    target_queue_id="worker-a",
    filter='reason == "boom"',
    request_id="req-1",
    error="no such",
    principal="shop",
    message_ids=(42, 0x0102000000000001),
)

KEYS = [
    Row(
        "redrive key",
        "redrive key",
        own_keys.parse_redrive_key,
        258,
        "014e0000000000000102",
        lambda: own_keys.redrive_key(258),
    ),
]
VALUES = [
    Row(
        "redrive",
        "redrive",
        redrive_records.decode_redrive,
        REDRIVE,
        "0900000000000000043200000000a8da769b010000e8abda769b0100002c01000000000000140000"
        "00000000000a00000000000000efcdab896745230103000000ffcdab896745230106006f72646572"
        "730800776f726b65722d611000726561736f6e203d3d2022626f6f6d2205007265712d3107006e6f"
        "2073756368040073686f7002002a000000000000000100000000000201",
        lambda: redrive_records.encode_redrive(REDRIVE),
    ),
]
