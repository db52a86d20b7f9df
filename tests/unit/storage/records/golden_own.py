"""Golden bytes of our own records and key forms, under the same rule as those in golden.py."""

from libs.storage.layout import buckets, keys, own_keys
from libs.storage.records import metadata, queues, states
from tests.unit.storage import oracles
from tests.unit.storage.records.golden import LEASE, Row

ORDER = buckets.order_of(epoch=1, ms=1767225600000, n=2)
STATE = states.QueueStateRecord(
    epoch=2,
    deleted=False,
    last_order=ORDER,
    garbage_epochs=(0, 1),
    created_revision=7,
    in_flight_count=3,
    done_count=4,
    failed_count=5,
    first_in_flight_order=6,
    oldest_done_order=8,
    oldest_failed_order=9,
    lanes=(
        states.LaneRecord(
            priority=3,
            kind=buckets.BucketKind.READY,
            head_order=10,
            head_offset=11,
            tail_order=12,
            waiting_count=13,
        ),
        states.LaneRecord(
            priority=128,
            kind=buckets.BucketKind.TIMED,
            head_order=14,
            head_offset=0,
            tail_order=15,
            waiting_count=16,
        ),
    ),
)
PURGED = STATE._replace(
    purges=states.PurgesRecord(
        lane_epoch=4,
        garbage_lane_epochs=(2, 3),
        garbage_done=states.OrderRange(17, 18),
        garbage_failed=states.OrderRange(19, 20),
    ),
)
REQUESTS = [
    states.RequestIdRecord("req-1", 42, 3, bytes(range(16))),
    states.RequestIdRecord("", 45, 1, b"\xff" * 16),
]
FINISHED = states.FinishedLeasesRecord(
    sequence=9,
    leases=(LEASE, 1),
    outcomes=(states.LeaseOutcome.ACKED, states.LeaseOutcome.NACKED),
)
LOGGED = [
    metadata.MessageMetadata(42, 1767225600000, 1767225600005, 0, 0, {}, None, 0),
    metadata.MessageMetadata(43, 1767225600000, 1767225600005, 0, 0, {}, 100, 0xFFFFFFFF),
]
PUSHED = [
    metadata.MessageMetadata(42, 1767225600000, 1767225600005, 1767225700000, 0, {}, None, 1),
    metadata.MessageMetadata(43, 1767225600000, 1767225600005, 0, 0, {}, 0, 2, "orders"),
]
FINISHED_BY_THE_CLOCK = states.FinishedLeasesRecord(10, (LEASE,), (states.LeaseOutcome.ENDED,))
TIMED_ORDER = buckets.lane_order(buckets.BucketKind.TIMED, buckets.order_of(1, 1767225600000, 0), 7)
BUCKET = buckets.bucket_number(3, buckets.BucketKind.IN_FLIGHT, ORDER)

KEYS = [
    Row(
        "active key of a bucket",
        "active key",
        keys.parse_active_key,
        keys.BucketKey("orders", 0x038266DDB6AA0002),
        "01026f726465727300038266ddb6aa0002",
        lambda: keys.active_key("orders", BUCKET),
    ),
    Row(
        "active key of a timed bucket",
        "active key",
        keys.parse_active_key,
        keys.BucketKey("orders", 0x034266DDB6AA0000, 7),
        "01026f726465727300034266ddb6aa00000000000000000007",
        lambda: keys.waiting_key("orders", 3, buckets.BucketKind.TIMED, TIMED_ORDER),
    ),
    Row(
        "done key",
        "done key",
        keys.parse_done_key,
        keys.BucketKey("orders", 0x000266DDB6AA0002),
        "01036f726465727300000266ddb6aa0002",
        lambda: keys.done_key("orders", ORDER),
    ),
    Row(
        "failed key",
        "failed key",
        keys.parse_failed_key,
        keys.BucketKey("orders", 0x000266DDB6AA0002),
        "01046f726465727300000266ddb6aa0002",
        lambda: keys.failed_key("orders", ORDER),
    ),
    Row(
        "queue state key",
        "queue state key",
        keys.parse_queue_state_key,
        "orders",
        "01406f726465727300",
        lambda: keys.queue_state_key("orders"),
    ),
    Row(
        "routing cursor key",
        "routing cursor key",
        own_keys.parse_routing_cursor_key,
        1,
        "01410000000000000001",
        lambda: own_keys.routing_cursor_key(1),
    ),
    Row(
        "request IDs key",
        "request IDs key",
        own_keys.parse_request_ids_key,
        own_keys.RequestIdsKey(29453760, 43),
        "014301c16dc0000000000000002b",
        lambda: own_keys.request_ids_key(29453760, 43),
    ),
    Row(
        "finished leases key",
        "finished leases key",
        oracles.parse_finished_leases_key,
        258,
        "014a0102",
        lambda: own_keys.finished_leases_key(258),
    ),
]

# Keys without a suffix are constants, so there is nothing to parse.
CONSTANT_KEYS = {
    "ID block": (own_keys.ID_BLOCK_KEY, "0142"),
    "purge epoch": (own_keys.PURGE_EPOCH_KEY, "0146"),
    "clock": (own_keys.CLOCK_KEY, "0148"),
    "config revision": (own_keys.CONFIG_REVISION_KEY, "0149"),
    "format": (own_keys.FORMAT_KEY, "0156"),
    "event cursor": (own_keys.EVENT_CURSOR_KEY, "0158"),
    "forgotten revision": (own_keys.FORGOTTEN_REVISION_KEY, "0159"),
    "event counter": (own_keys.EVENT_COUNTER_KEY, "015b"),
    "draining": (own_keys.DRAINING_KEY, "015c"),
    "leaving": (own_keys.LEAVING_KEY, "015e"),
}

VALUES = [
    Row(
        "active value, empty",
        "active value",
        queues.decode_active,
        ([], []),
        "000000000000000000000000",
        lambda: queues.encode_active([], []),
        ends=(4, 6, 8, 10),
    ),
    Row(
        "done value, empty",
        "done value",
        queues.decode_done,
        [],
        "0000000000000000",
        lambda: queues.encode_done([]),
        ends=(2, 4, 6),
    ),
    Row(
        "failed value, empty",
        "failed value",
        queues.decode_failed,
        [],
        "0000000000000000",
        lambda: queues.encode_failed([]),
        ends=(2, 4, 6),
    ),
    Row(
        "log entry of two, without headers, one delayed",
        "log entry",
        metadata.decode_log_entry,
        LOGGED,
        "02002a0000000000000000a8da769b01000005a8da769b01000000000000000000000000000000"
        "2b0000000000000000a8da769b01000005a8da769b01000000000000000000000000000000"
        "0200ffffffffffffffff6400000000000000020000000000ffffffff",
        lambda: metadata.encode_log_entry(LOGGED),
        ends=(76, 94),
    ),
    Row(
        "log entry of two, the second pushed to a queue",
        "log entry",
        metadata.decode_log_entry,
        PUSHED,
        "02002a0000000000000000a8da769b01000005a8da769b010000a02edc769b01000000000000002b00"
        "00000000000000a8da769b01000005a8da769b010000000000000000000000000000000200"
        "ffffffffffffffff0000000000000000020001000000020000000200000006006f7264657273",
        lambda: metadata.encode_log_entry(PUSHED),
        ends=(76, 94, 104),
    ),
    Row(
        "queue state",
        "queue state",
        states.decode_queue_state,
        STATE,
        "0102000200aab6dd660200020000010700000000000000030000000400000000000000"
        "0500000000000000060000000000000008000000000000000900000000000000"
        "020003000a000000000000000b000c000000000000000d00000000000000"
        "80010e0000000000000000000f000000000000001000000000000000",
        lambda: states.encode_queue_state(STATE),
        ends=(125,),
    ),
    Row(
        "queue state after purges",
        "queue state",
        states.decode_queue_state,
        PURGED,
        "0102000200aab6dd660200020000010700000000000000030000000400000000000000"
        "0500000000000000060000000000000008000000000000000900000000000000"
        "020003000a000000000000000b000c000000000000000d00000000000000"
        "80010e0000000000000000000f000000000000001000000000000000"
        "04020002031100000000000000120000000000000013000000000000001400000000000000",
        lambda: states.encode_queue_state(PURGED),
        ends=(125,),
    ),
    Row(
        "routing cursor",
        "routing cursor",
        states.decode_routing_cursor,
        0x1000000000007,
        "0700000000000100",
        lambda: states.encode_routing_cursor(0x1000000000007),
    ),
    Row(
        "request IDs",
        "request IDs",
        states.decode_request_ids,
        REQUESTS,
        "020005007265712d312a0000000000000003000000000102030405060708090a0b0c0d0e0f"
        "00002d0000000000000001000000ffffffffffffffffffffffffffffffff",
        lambda: states.encode_request_ids(REQUESTS),
    ),
    Row(
        "purge epoch",
        "purge epoch",
        states.decode_purge_epoch,
        3,
        "0300000000000000",
        lambda: states.encode_purge_epoch(3),
    ),
    Row(
        "clock",
        "clock",
        states.decode_clock,
        1767225600000,
        "00a8da769b010000",
        lambda: states.encode_clock(1767225600000),
    ),
    Row(
        "format",
        "format",
        states.decode_format,
        states.FormatRecord(7, "broker/3"),
        "07000000080062726f6b65722f33",
        lambda: states.encode_format(states.FormatRecord(7, "broker/3")),
    ),
    Row(
        "config revision",
        "config revision",
        states.decode_config_revision,
        7,
        "0700000000000000",
        lambda: states.encode_config_revision(7),
    ),
    Row(
        "finished leases",
        "finished leases",
        states.decode_finished_leases,
        FINISHED,
        "09000000000000000200efcdab8967452301010000000000000002000102",
        lambda: states.encode_finished_leases(FINISHED),
    ),
    Row(
        "finished leases, ended by the clock",
        "finished leases",
        states.decode_finished_leases,
        FINISHED_BY_THE_CLOCK,
        "0a000000000000000100efcdab8967452301010003",
        lambda: states.encode_finished_leases(FINISHED_BY_THE_CLOCK),
    ),
]
