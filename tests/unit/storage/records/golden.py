"""Golden bytes of the RFC's records: what a release has written, all later ones read.

A row may change only until the first release. `encode` is None for values of the RFC's length,
which are only read. `ends` are the shorter lengths at which the record is whole too, because the
parts after them are optional.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from libs.storage.layout import ids, keys
from libs.storage.records import configs, metadata, payloads, queues
from tests.unit.storage import oracles


@dataclass(frozen=True)
class Row:
    name: str
    record: str
    decode: Callable[[bytes], Any]
    value: Any
    hex: str
    encode: Callable[[], bytes] | None = None
    ends: tuple[int, ...] = ()

    @property
    def data(self) -> bytes:
        return bytes.fromhex(self.hex)


METADATA = metadata.MessageMetadata(
    message_id=42,
    created_at_ms=1767225600000,
    received_at_ms=1767225600005,
    visible_at_ms=1767225601000,
    retention_s=3600,
    headers={"type": "order", "region": "eu"},
)
LOGGED = metadata.MessageMetadata(
    message_id=42,
    created_at_ms=1767225600000,
    received_at_ms=1767225600005,
    visible_at_ms=1767225601000,
    retention_s=3600,
    headers={"type": "order", "region": "eu"},
    delay_ms=None,
    payload_bytes=5,
)
LEASE = 0x0123456789ABCDEF
AVAILABLE = queues.AvailableMessage(
    message_id=42,
    priority=3,
    visible_at_ms=1767225601000,
    retention_deadline_ms=1767229200005,
    attempts=1,
)
IN_FLIGHT_RFC = queues.InFlightMessage(
    message_id=43,
    priority=3,
    claimed_at_ms=1767225602000,
    lease_deadline_ms=1767225632000,
    attempts=2,
)
IN_FLIGHT = IN_FLIGHT_RFC._replace(
    retention_deadline_ms=1767229200009, lease_length_ms=30000, consumer="worker-a", lease=LEASE
)
DONE_RFC = queues.DoneMessage(message_id=44, done_at_ms=1767225603000, attempts=1)
DONE = DONE_RFC._replace(consumer="worker-a", first_claimed_at_ms=1767225602000, lease=LEASE)
FAILED_RFC = queues.FailedMessage(message_id=45, failed_at_ms=1767225604000, attempts=3)
FAILED = FAILED_RFC._replace(
    priority=3, retention_deadline_ms=1767229200005, reason="nack: no such customer"
)
ATTEMPTS_RFC = [queues.FailedAttempt("worker-a"), queues.FailedAttempt("worker-b")]
ATTEMPTS = [
    queues.FailedAttempt("worker-a", 1767225602000, "nack: boom"),
    queues.FailedAttempt("worker-b", 1767225612000, "lease expired"),
]
ATTEMPTS_ELSEWHERE = [ATTEMPTS[0]._replace(queue="bills"), ATTEMPTS[1]]
CONFIG = configs.QueueConfigRecord(
    filter='headers["queue"] == "orders"',
    max_attempts=5,
    done_retention_s=86400,
    settings={"lease_ms": "30000"},
)
BLOB = "file:///x/blobs/42"

KEYS = [
    Row(
        "payload key",
        "payload key",
        keys.parse_payload_key,
        42,
        "0101000000000000002a",
        lambda: keys.payload_key(42),
    ),
    Row(
        "log key",
        "log key",
        keys.parse_log_key,
        7,
        "01016f70656e646174612d71756575652f6d657373616765732f6d65746164617461000000000000000007",
        lambda: keys.log_key(7),
    ),
    Row(
        "active key",
        "active key",
        keys.parse_active_key,
        keys.BucketKey("orders", 0),
        "01026f7264657273000000000000000000",
        lambda: keys.active_key("orders", 0),
    ),
    Row(
        "attempts key",
        "attempts key",
        oracles.parse_attempts_key,
        ("orders", 42),
        "01056f726465727300000000000000002a",
        lambda: keys.attempts_key("orders", 42),
    ),
    Row(
        "config key",
        "config key",
        keys.parse_config_key,
        "orders",
        "01066f726465727300",
        lambda: keys.config_key("orders"),
    ),
]

VALUES = [
    Row(
        "payload value, inline",
        "payload value",
        payloads.decode_payload,
        b"hello",
        "01050068656c6c6f",
        lambda: payloads.encode_inline(b"hello"),
    ),
    Row(
        "payload value, URI",
        "payload value",
        payloads.decode_payload,
        payloads.PayloadUri(BLOB),
        "02120066696c653a2f2f2f782f626c6f62732f3432",
        lambda: payloads.encode_uri(BLOB),
    ),
    Row(
        "SeqBlock",
        "SeqBlock",
        ids.decode_seq_block,
        ids.SeqBlock(4096, 4096),
        "00000000000010000000000000001000",
        lambda: ids.encode_seq_block(ids.SeqBlock(4096, 4096)),
    ),
    Row(
        "metadata record",
        "metadata record",
        oracles.decode_metadata_record,
        METADATA,
        "2a0000000000000000a8da769b01000005a8da769b010000e8abda769b010000100e000002"
        "04007479706505006f726465720600726567696f6e02006575",
        lambda: metadata.encode_metadata_record(METADATA),
    ),
    Row(
        "log entry",
        "log entry",
        metadata.decode_log_entry,
        [LOGGED],
        "01002a0000000000000000a8da769b01000005a8da769b010000e8abda769b010000100e000002"
        "04007479706505006f726465720600726567696f6e02006575"
        "0100ffffffffffffffff010005000000",
        lambda: metadata.encode_log_entry([LOGGED]),
        ends=(64, 74),
    ),
    Row(
        "active value, RFC form",
        "active value",
        queues.decode_active,
        ([AVAILABLE], [IN_FLIGHT_RFC]),
        "01002a0000000000000003e8abda769b010000859611779b0100000100"
        "01002b0000000000000003d0afda769b0100000025db769b0100000200",
    ),
    Row(
        "active value",
        "active value",
        queues.decode_active,
        ([AVAILABLE], [IN_FLIGHT]),
        "01002a0000000000000003e8abda769b010000859611779b0100000100"
        "01002b0000000000000003d0afda769b0100000025db769b0100000200"
        "0100899611779b01000001003075000001000800776f726b65722d610100efcdab8967452301",
        lambda: queues.encode_active([AVAILABLE], [IN_FLIGHT]),
        ends=(58, 68, 74, 86),
    ),
    Row(
        "done value, RFC form",
        "done value",
        queues.decode_done,
        [DONE_RFC],
        "01002c00000000000000b8b3da769b0100000100",
    ),
    Row(
        "done value",
        "done value",
        queues.decode_done,
        [DONE],
        "01002c00000000000000b8b3da769b0100000100"
        "01000800776f726b65722d610100d0afda769b0100000100efcdab8967452301",
        lambda: queues.encode_done([DONE]),
        ends=(20, 32, 42),
    ),
    Row(
        "failed value, RFC form",
        "failed value",
        queues.decode_failed,
        [FAILED_RFC],
        "01002d00000000000000a0b7da769b0100000300",
    ),
    Row(
        "failed value",
        "failed value",
        queues.decode_failed,
        [FAILED],
        "01002d00000000000000a0b7da769b01000003000100030100859611779b0100000100"
        "16006e61636b3a206e6f207375636820637573746f6d6572",
        lambda: queues.encode_failed([FAILED]),
        ends=(20, 23, 33),
    ),
    Row(
        "attempts value, RFC form",
        "attempts value",
        queues.decode_attempts,
        ATTEMPTS_RFC,
        "02000800776f726b65722d610800776f726b65722d62",
    ),
    Row(
        "attempts value",
        "attempts value",
        queues.decode_attempts,
        ATTEMPTS,
        "02000800776f726b65722d610800776f726b65722d62"
        "0200d0afda769b010000e0d6da769b010000"
        "02000a006e61636b3a20626f6f6d0d006c656173652065787069726564",
        lambda: queues.encode_attempts(ATTEMPTS),
        ends=(22, 40),
    ),
    Row(
        "attempts value, from another queue",
        "attempts value",
        queues.decode_attempts,
        ATTEMPTS_ELSEWHERE,
        "02000800776f726b65722d610800776f726b65722d62"
        "0200d0afda769b010000e0d6da769b010000"
        "02000a006e61636b3a20626f6f6d0d006c656173652065787069726564"
        "0200050062696c6c730000",
        lambda: queues.encode_attempts(ATTEMPTS_ELSEWHERE),
        ends=(22, 40, 69),
    ),
    Row(
        "config value",
        "config value",
        configs.decode_config,
        CONFIG,
        "1c00686561646572735b227175657565225d203d3d20226f7264657273220500805101000100"
        "08006c656173655f6d7305003330303030",
        lambda: configs.encode_config(CONFIG),
        ends=(36,),
    ),
]
