"""Golden bytes of what executed commands leave behind: the rule of golden.py holds here, too."""

from libs.storage.layout import own_keys
from libs.storage.records import execution_records, payloads, queues
from tests.unit.storage.records.golden import BLOB, DONE, Row

PUSH = execution_records.OutboxRecord(
    pushed_at_ms=1767225602000,
    queue_id="orders",
    payload=b"hello",
    payload_bytes=5,
    headers={"type": "order", "region": "eu"},
    retention_s=3600,
    delay_ms=0,
)
LARGE_PUSH = execution_records.OutboxRecord(
    pushed_at_ms=1767225602000,
    queue_id="orders",
    payload=payloads.PayloadUri(BLOB),
    payload_bytes=65_536,
    headers={},
    visible_at_ms=1767225603000,
)
OLD_PUSH = LARGE_PUSH._replace(retention_s=0, retention_deadline_ms=1767229200009)
COUNTER = execution_records.OutboxCounter(last_number=9, first_waiting=7, waiting_bytes=300)
OFFSET_COUNTER = COUNTER._replace(offset=-2)
REFUSED = execution_records.RefusedPushRecord(1767225602000, "big", b"out")
EXECUTED = [
    execution_records.ExecutedRecord("req-1", bytes(range(16))),
    execution_records.ExecutedRecord("req-2", b"\xff" * 16),
]
TRANSFERRED = [DONE, DONE._replace(message_id=45, transferred_to="orders")]

KEYS = [
    Row(
        "outbox key",
        "outbox key",
        own_keys.parse_outbox_key,
        (1, 7),
        "014500000000000000010000000000000007",
        lambda: own_keys.outbox_key(1, 7),
    ),
    Row(
        "outbox counter key",
        "outbox counter key",
        own_keys.parse_outbox_counter_key,
        1,
        "01470000000000000001",
        lambda: own_keys.outbox_counter_key(1),
    ),
    Row(
        "refused push key",
        "refused push key",
        own_keys.parse_refused_push_key,
        (1, 7),
        "015100000000000000010000000000000007",
        lambda: own_keys.refused_push_key(1, 7),
    ),
    Row(
        "executed key",
        "executed key",
        own_keys.parse_executed_key,
        (29453760, 3),
        "014f01c16dc00000000000000003",
        lambda: own_keys.executed_key(29453760, 3),
    ),
]
VALUES = [
    Row(
        "outbox value",
        "outbox value",
        execution_records.decode_outbox,
        PUSH,
        "d0afda769b010000100e0000000000000000000000000000ffffffffffffffff0500000006006f72"
        "64657273020600726567696f6e0200657504007479706505006f7264657201050068656c6c6f",
        lambda: execution_records.encode_outbox(PUSH),
    ),
    Row(
        "outbox value of a large payload",
        "outbox value",
        execution_records.decode_outbox,
        LARGE_PUSH,
        "d0afda769b010000ffffffffffffffffffffffffffffffffb8b3da769b0100000000010006006f72"
        "646572730002120066696c653a2f2f2f782f626c6f62732f3432",
        lambda: execution_records.encode_outbox(LARGE_PUSH),
    ),
    Row(
        "outbox value of an older message",
        "outbox value",
        execution_records.decode_outbox,
        OLD_PUSH,
        "d0afda769b0100000000000000000000ffffffffffffffffb8b3da769b0100000000010006006f72"
        "646572730002120066696c653a2f2f2f782f626c6f62732f3432899611779b010000",
        lambda: execution_records.encode_outbox(OLD_PUSH),
        ends=(66,),
    ),
    Row(
        "outbox counter",
        "outbox counter",
        execution_records.decode_outbox_counter,
        COUNTER,
        "090000000000000007000000000000002c01000000000000",
        lambda: execution_records.encode_outbox_counter(COUNTER),
    ),
    Row(
        "outbox counter with an offset",
        "outbox counter",
        execution_records.decode_outbox_counter,
        OFFSET_COUNTER,
        "090000000000000007000000000000002c01000000000000feffffffffffffff",
        lambda: execution_records.encode_outbox_counter(OFFSET_COUNTER),
        ends=(24,),
    ),
    Row(
        "refused push",
        "refused push",
        execution_records.decode_refused_push,
        REFUSED,
        "d0afda769b0100000300000003006269676f7574",
        lambda: execution_records.encode_refused_push(REFUSED),
    ),
    Row(
        "executed",
        "executed",
        execution_records.decode_executed,
        EXECUTED,
        "020005007265712d31000102030405060708090a0b0c0d0e0f05007265712d32ffffffffffffffff"
        "ffffffffffffffff",
        lambda: execution_records.encode_executed(EXECUTED),
    ),
    Row(
        "done value, one transferred",
        "done value",
        queues.decode_done,
        TRANSFERRED,
        "02002c00000000000000b8b3da769b01000001002d00000000000000b8b3da769b01000001000200"
        "0800776f726b65722d610800776f726b65722d610200d0afda769b010000d0afda769b0100000200"
        "efcdab8967452301efcdab89674523010200000006006f7264657273",
        lambda: queues.encode_done(TRANSFERRED),
        ends=(38, 60, 78, 96),
    ),
]
