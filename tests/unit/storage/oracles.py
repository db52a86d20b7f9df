"""Parsers that only tests need, written by the layout alone: keys.py, own_keys.py, metadata.py."""

from libs.storage.layout.keys import RecordType, open_key, read_queue
from libs.storage.layout.own_keys import RequestIdsKey
from libs.storage.layout.primitives import Fixed, Reader
from libs.storage.records.metadata import MessageMetadata

_MESSAGE_ID = Fixed(order=">", message_id="Q")
_SLOT = Fixed(order=">", slot="H")
_IN_MINUTE = Fixed(order=">", minute="I", number="Q")
_HEAD = Fixed(id="Q", created="q", received="q", visible="q", retention="I", header_count="B")


def record_type_of(key: bytes) -> RecordType:
    """The type byte of any key."""
    reader = Reader("key", key)
    version, found = reader.take("version and type", 2)
    if version != 1:
        raise reader.corrupt(f"unknown version {version:02x}")
    try:
        return RecordType(found)
    except ValueError:
        raise reader.corrupt(f"unknown type {found:02x}") from None


def parse_attempts_key(key: bytes) -> tuple[str, int]:
    reader = open_key("attempts key", RecordType.ATTEMPTS, key)
    queue = read_queue(reader)
    (message_id,) = reader.fixed("message ID", _MESSAGE_ID)
    reader.finish()
    return queue, int(message_id)


def parse_finished_leases_key(key: bytes) -> int:
    reader = open_key("finished leases key", RecordType.FINISHED_LEASES, key)
    (slot,) = reader.fixed("slot", _SLOT)
    reader.finish()
    return int(slot)


def parse_dedupe_key(key: bytes) -> str:
    reader = open_key("dedupe key key", RecordType.DEDUPE_KEY, key)
    raw = reader.terminated("dedupe key")
    reader.finish()
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise reader.corrupt(f"dedupe key is not valid UTF-8: {error.reason}") from None


def parse_dedupe_ends_key(key: bytes) -> RequestIdsKey:
    reader = open_key("dedupe ends key", RecordType.DEDUPE_END, key)
    parsed = RequestIdsKey(*reader.fixed("minute and sequence", _IN_MINUTE))
    reader.finish()
    return parsed


def decode_metadata_record(data: bytes) -> MessageMetadata:
    """One record of the RFC by itself, which the product reads and writes in log entries alone."""
    reader = Reader("metadata record", data)
    message_id, created, received, visible, retention, header_count = reader.fixed("head", _HEAD)
    headers: dict[str, str] = {}
    for _ in range(header_count):
        key = reader.utf8("header key")
        if key in headers:
            raise reader.corrupt(f"it has a header key twice: {key!r}")
        headers[key] = reader.utf8("header value")
    reader.finish()
    return MessageMetadata(message_id, created, received, visible, retention, headers)
