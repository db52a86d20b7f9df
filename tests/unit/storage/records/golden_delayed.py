"""Golden bytes of delayed records and of small ones: golden.py's rule holds here too."""

from libs.storage.layout import keys, own_keys
from libs.storage.records import (
    delayed_records,
    event_records,
    log_bounds,
    states,
)
from tests.unit.storage.records.golden import Row
from tests.unit.storage.records.golden_own import ORDER

DELAYED = [
    delayed_records.DelayedMessage(42, 3, 1767225601000, 1767229200005, ORDER, 7),
    delayed_records.DelayedMessage(43, 128, 4922899200000, 0, 0, 0),
]

CURSOR = event_records.EventCursorRecord(0x0123456789ABCDEF, 0x1000000000007, 258)
BOUNDS = log_bounds.LogBoundsRecord(42, 0x1000000000007, 0x1000000000009)
GAPS = [log_bounds.LogGap(7, 1048577), log_bounds.LogGap(1048580, 2097153)]

KEYS = [
    Row(
        "delayed key",
        "delayed key",
        own_keys.parse_delayed_key,
        keys.BucketKey("orders", ORDER),
        "014c6f726465727300000266ddb6aa0002",
        lambda: own_keys.delayed_key("orders", ORDER),
    ),
    Row(
        "outbox progress key",
        "outbox progress key",
        own_keys.parse_outbox_progress_key,
        7,
        "01500000000000000007",
        lambda: own_keys.outbox_progress_key(7),
    ),
]

VALUES = [
    Row(
        "delayed value",
        "delayed messages",
        delayed_records.decode_delayed,
        DELAYED,
        "02002a0000000000000003e8abda769b010000859611779b0100000200aab6dd6602"
        "0007000000000000002b00000000000000800078a8337a04000000000000000000000000"
        "0000000000000000000000000000",
        lambda: delayed_records.encode_delayed(DELAYED),
    ),
    Row(
        "outbox progress value",
        "outbox progress",
        states.decode_outbox_progress,
        258,
        "0201000000000000",
        lambda: states.encode_outbox_progress(258),
    ),
    Row(
        "log bounds value",
        "log bounds",
        log_bounds.decode_log_bounds,
        BOUNDS,
        "2a0000000000000007000000000001000900000000000100",
        lambda: log_bounds.encode_log_bounds(BOUNDS),
    ),
    Row(
        "log gaps value",
        "log gaps",
        log_bounds.decode_log_gaps,
        GAPS,
        "02000700000000000000010010000000000004001000000000000100200000000000",
        lambda: log_bounds.encode_log_gaps(GAPS),
    ),
    Row(
        "event cursor value",
        "event cursor",
        event_records.decode_event_cursor,
        CURSOR,
        "efcdab896745230107000000000001000201000000000000",
        lambda: event_records.encode_event_cursor(CURSOR),
    ),
    Row(
        "forgotten revision value",
        "forgotten revision",
        states.decode_forgotten_revision,
        6,
        "0600000000000000",
        lambda: states.encode_forgotten_revision(6),
    ),
    Row(
        "draining value",
        "draining",
        states.decode_draining,
        1767225600000,
        "00a8da769b010000",
        lambda: states.encode_draining(1767225600000),
    ),
    Row(
        "leaving value",
        "leaving",
        states.decode_leaving,
        1767225600000,
        "00a8da769b010000",
        lambda: states.encode_leaving(1767225600000),
    ),
]
