"""Golden bytes of what became of write tasks: golden.py's rule holds here too."""

from libs.storage.layout import own_keys
from libs.storage.records import task_records
from tests.unit.storage.records.golden import Row

ULID = bytes(range(16))
DIGEST = bytes(range(16, 32))

APPLIED = task_records.AppliedTask(1767225602000, 42, 3, 1767225601000, ((1, 7), (2, 44)))
RETRIED = APPLIED._replace(has_failed=True, request=DIGEST)
REQUEST = task_records.TaskRequestRecord(ULID, bytes(range(32, 48)))
WAITING = task_records.WaitingTask(1767225602000, True)
FAILED = task_records.FailedTaskRecord(1767225602000, 4, "no room")

KEYS = [
    Row(
        "task key",
        "task key",
        own_keys.parse_task_key,
        ULID,
        "0157000102030405060708090a0b0c0d0e0f",
        lambda: own_keys.task_key(ULID),
    ),
    Row(
        "task request key",
        "task request key",
        own_keys.parse_task_request_key,
        DIGEST,
        "015f101112131415161718191a1b1c1d1e1f",
        lambda: own_keys.task_request_key(DIGEST),
    ),
]

VALUES = [
    Row(
        "applied task value",
        "task",
        task_records.decode_task_record,
        APPLIED,
        "01d0afda769b0100002a0000000000000003000000e8abda769b0100000200"
        "010000000700000000000000020000002c00000000000000",
        lambda: task_records.encode_task_record(APPLIED),
    ),
    Row(
        "retried task value",
        "task",
        task_records.decode_task_record,
        RETRIED,
        "04d0afda769b0100002a0000000000000003000000e8abda769b0100000200"
        "010000000700000000000000020000002c00000000000000"
        "101112131415161718191a1b1c1d1e1f",
        lambda: task_records.encode_task_record(RETRIED),
        ends=(55,),
    ),
    Row(
        "waiting task value",
        "task",
        task_records.decode_task_record,
        WAITING,
        "03d0afda769b01000001",
        lambda: task_records.encode_task_record(WAITING),
    ),
    Row(
        "failed task value",
        "task",
        task_records.decode_task_record,
        FAILED,
        "02d0afda769b0100000400000007006e6f20726f6f6d",
        lambda: task_records.encode_task_record(FAILED),
    ),
    Row(
        "task request value",
        "task request",
        task_records.decode_task_request,
        REQUEST,
        "000102030405060708090a0b0c0d0e0f202122232425262728292a2b2c2d2e2f",
        lambda: task_records.encode_task_request(REQUEST),
    ),
]
