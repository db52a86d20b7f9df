"""The state of a queue, and values of a few numbers.

    queue state 0x40       | version u8 = 01 | epoch u8 | deleted u8 (0, 1) | last order u64
                           | garbage epochs: Array<u8> | created revision u64 | in-flight count u32
                           | done count u64 | failed count u64 | first in-flight order u64
                           | oldest done order u64 | oldest failed order u64 | lanes: Array<Lane>
                           | purges: Purges, left out where both are empty
                           | archived: Archived, left out where empty |
    Lane (28 bytes)        | priority u8 | kind u8 | head order u64 | head offset u16
                           | tail order u64 | waiting count u64 |
    Purges                 | lane epoch u8 | garbage lane epochs: Array<u8>
                           | done garbage: first order u64 | last order u64
                           | failed garbage: first order u64 | last order u64 |
    Archived               | count u64 | oldest order u64 | garbage: first order u64
                           | last order u64 |
    routing cursor 0x41    | message ID u64 |         the last message that was routed, perhaps
                                                     inside a log entry
    request IDs 0x43       | Array<(request ID Utf8 | first message ID u64 | message count u32
                           | fingerprint 16 bytes)>
                           | duplicates: Array<(request u16 | place u32 | message ID u64)>,
                           left out where there are none, else in the order
                           of the requests |
    purge epoch 0x46       | epoch u64 |
    clock 0x48             | milliseconds i64 |       the owner's time at the commit, since 1970
    config revision 0x49   | revision u64 |           raised by every change of a queue's config
    finished leases 0x4A   | sequence u64 | leases: Array<u64> | outcomes: Array<u8> |
    outbox progress 0x50   | last number u64 |        the last row of a broker shard's outbox that
                                                     ingest has stored, in its message's batch
    format 0x56            | number u32 |             of the layouts of a database's records
                           | name Utf8 |              of the database, so that it is read in its
                                                      own place alone
    forgotten revision     | config revision u64 |    the highest of a queue that was deleted and
                    0x59                             whose last row is gone; no row: none is
    draining 0x5C          | since i64 |              in ms since 1970; no row: the shard takes new
                                                     queues, or publishes
    leaving 0x5E           | since i64 |              in ms since 1970: the shard has nothing,
                                                     and is removed; no row: it may stay

Little-endian. To extend one, add a field at its end: a value that ends exactly where a later field
would begin reads as that field's default. Where that is not enough, the queue state gets a new
version and the others a new type byte. Bytes after the last known field are refused, since a
program would lose them when it writes the record again.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final, NamedTuple

from libs.storage.layout.buckets import BucketKind
from libs.storage.layout.primitives import Fixed, Reader, count_prefix, number_array, utf8

QUEUE_STATE_VERSION = 1
FINGERPRINT_BYTES = 16

_HEAD: Final = {"version": "B", "epoch": "B", "deleted": "B", "last_order": "Q"}
_BODY: Final = {
    "created_revision": "Q",
    "in_flight_count": "I",
    "done_count": "Q",
    "failed_count": "Q",
    "first_in_flight_order": "Q",
    "oldest_done_order": "Q",
    "oldest_failed_order": "Q",
}
_STATE_HEAD = Fixed(**_HEAD)
_STATE_BODY = Fixed(**_BODY)
_OF_LANE: Final = {
    "priority": "B",
    "kind": "B",
    "head_order": "Q",
    "head_offset": "H",
    "tail_order": "Q",
    "waiting_count": "Q",
}
_LANE = Fixed(**_OF_LANE)
_STATE_USUAL = Fixed(**_HEAD, garbage_epochs_count="H", **_BODY, lanes_count="H", **_OF_LANE)
_LANE_EPOCH = Fixed(lane_epoch="B")
_GARBAGE = Fixed(done_first="Q", done_last="Q", failed_first="Q", failed_last="Q")
_ARCHIVED = Fixed(archived_count="Q", oldest_archived="Q", archived_first="Q", archived_last="Q")
_U64 = Fixed(number="Q")
_FORMAT = Fixed(number="I")
_REQUEST = Fixed(first_message_id="Q", message_count="I")
_DUPLICATE = Fixed(request="H", place="I", message_id="Q")


class LaneRecord(NamedTuple):
    """One run of buckets of a queue: all of one priority and kind.

    The head is the bucket with the first message that is left, `head_offset` how many of its
    elements are gone; the tail is the last bucket. `waiting_count` is in messages.
    """

    priority: int
    kind: BucketKind
    head_order: int
    head_offset: int
    tail_order: int
    waiting_count: int


class OrderRange(NamedTuple):
    """Orders from `first` to `last`, both included; none of both is 0."""

    first: int = 0
    last: int = 0


NO_ORDERS = OrderRange()


class PurgesRecord(NamedTuple):
    """What purges have made of a queue.

    `lane_epoch` is in the orders of its available messages, in place of the queue's epoch;
    `garbage_lane_epochs` are those whose ready and timed buckets are still to be removed, the
    others are rows of the done and failed lists to be removed.
    """

    lane_epoch: int
    garbage_lane_epochs: tuple[int, ...] = ()
    garbage_done: OrderRange = NO_ORDERS
    garbage_failed: OrderRange = NO_ORDERS


class ArchivedRecord(NamedTuple):
    """Where a queue's list of archived messages begins, how long it is, and what is garbage."""

    messages_count: int = 0
    oldest_order: int = 0
    garbage: OrderRange = NO_ORDERS


class QueueStateRecord(NamedTuple):
    """Where a queue's lists begin and end, and how long they are.

    `epoch` is the queue's incarnation, as in the orders of its buckets; `last_order` the highest
    order ever taken; `garbage_epochs` those whose buckets are still to be removed;
    `created_revision` the config revision at which this incarnation was made; no `purges`: the
    queue's epoch is that of its lanes, too; no `archived`: nothing is.
    """

    epoch: int = 0
    deleted: bool = False
    last_order: int = 0
    garbage_epochs: tuple[int, ...] = ()
    created_revision: int = 0
    in_flight_count: int = 0
    done_count: int = 0
    failed_count: int = 0
    first_in_flight_order: int = 0
    oldest_done_order: int = 0
    oldest_failed_order: int = 0
    lanes: tuple[LaneRecord, ...] = ()
    purges: PurgesRecord | None = None
    archived: ArchivedRecord | None = None


class RequestIdRecord(NamedTuple):
    """One publish: its request ID, its messages' IDs, and a fingerprint of its content.

    `duplicates` are the messages that were not stored, by their places, with the IDs they got; the
    others have IDs in a row from the first one on.
    """

    request_id: str
    first_message_id: int
    message_count: int
    fingerprint: bytes
    duplicates: tuple[tuple[int, int], ...] = ()


class LeaseOutcome(IntEnum):
    """How a lease was finished: by its holder, or by the clock."""

    ACKED = 1
    NACKED = 2
    ENDED = 3


@dataclass(frozen=True, slots=True)
class FinishedLeasesRecord:
    """The leases finished by one commit, each with its outcome; `sequence` orders slots by age."""

    sequence: int
    leases: tuple[int, ...]
    outcomes: tuple[LeaseOutcome, ...]


def encode_queue_state(state: QueueStateRecord) -> bytes:
    lanes, purges, archived = state.lanes, state.purges, state.archived
    head, garbage_epochs, body = state[:3], state[3], state[4:11]
    if len(lanes) == 1 and not (garbage_epochs or purges or archived):
        # Most queues are like this, and a commit may write ten thousand.
        return _STATE_USUAL.pack(QUEUE_STATE_VERSION, *head, 0, *body, 1, *lanes[0])
    parts = [
        _STATE_HEAD.pack(QUEUE_STATE_VERSION, *head),
        number_array("garbage_epochs", "B", garbage_epochs),
        _STATE_BODY.pack(*body),
        _LANE.pack_array("lanes", lanes),
    ]
    if purges or archived:  # not left out where another field follows
        parts.append(_encode_purges(purges or PurgesRecord(state.epoch)))
    if archived:
        parts.append(_ARCHIVED.pack(*archived[:2], *archived.garbage))
    return b"".join(parts)


def _encode_purges(purges: PurgesRecord) -> bytes:
    return b"".join(
        (
            _LANE_EPOCH.pack(purges.lane_epoch),
            number_array("garbage_lane_epochs", "B", purges.garbage_lane_epochs),
            _GARBAGE.pack(*purges.garbage_done, *purges.garbage_failed),
        )
    )


def decode_queue_state(data: bytes) -> QueueStateRecord:
    reader = Reader("queue state", data)
    version = reader.number("version", "B")
    if version != QUEUE_STATE_VERSION:
        raise reader.corrupt(f"unknown version {version:02x}")
    epoch = reader.number("epoch", "B")
    deleted = reader.number("deleted", "B")
    if deleted > 1:
        raise reader.corrupt(f"deleted = {deleted} is neither 0 nor 1")
    last_order = reader.number("last order", "Q")
    garbage_epochs = reader.number_array("garbage epochs", "B")
    body = reader.fixed("counts and orders", _STATE_BODY)
    lanes = tuple(_lane(reader, row) for row in reader.array("lanes", _LANE))
    purges = None if reader.at_end else _purges(reader)
    archived = None if reader.at_end else _archived(reader)
    reader.finish()
    return QueueStateRecord(
        epoch=epoch,
        deleted=bool(deleted),
        last_order=last_order,
        garbage_epochs=garbage_epochs,
        lanes=lanes,
        purges=purges,
        archived=archived,
        **dict(zip(_STATE_BODY.names, body, strict=True)),
    )


def _purges(reader: Reader) -> PurgesRecord:
    lane_epoch = reader.number("lane epoch", "B")
    epochs = reader.number_array("garbage lane epochs", "B")
    done_first, done_last, failed_first, failed_last = reader.fixed("garbage", _GARBAGE)
    return PurgesRecord(
        lane_epoch, epochs, OrderRange(done_first, done_last), OrderRange(failed_first, failed_last)
    )


def _archived(reader: Reader) -> ArchivedRecord:
    count, oldest_order, first, last = reader.fixed("archived", _ARCHIVED)
    return ArchivedRecord(count, oldest_order, OrderRange(first, last))


def _lane(reader: Reader, row: tuple[Any, ...]) -> LaneRecord:
    priority, kind, *rest = row
    try:
        return LaneRecord(priority, BucketKind(kind), *rest)
    except ValueError:
        raise reader.corrupt(f"unknown kind {kind} of a lane") from None


def encode_request_ids(requests: Sequence[RequestIdRecord]) -> bytes:
    parts = [count_prefix("request IDs", requests)]
    for request in requests:
        if len(request.fingerprint) != FINGERPRINT_BYTES:
            raise ValueError(f"fingerprint has not {FINGERPRINT_BYTES} bytes")
        parts += (
            utf8("request ID", request.request_id),
            _REQUEST.pack(request.first_message_id, request.message_count),
            request.fingerprint,
        )
    duplicates = [
        (at, *duplicate) for at, request in enumerate(requests) for duplicate in request.duplicates
    ]
    if duplicates:
        parts.append(_DUPLICATE.pack_array("duplicates", duplicates))
    return b"".join(parts)


def decode_request_ids(data: bytes) -> list[RequestIdRecord]:
    reader = Reader("request IDs", data)
    requests = []
    for _ in range(reader.number("count of requests", "H")):
        request_id = reader.utf8("request ID")
        first_id, message_count = reader.fixed("message IDs", _REQUEST)
        fingerprint = reader.take("fingerprint", FINGERPRINT_BYTES)
        requests.append(RequestIdRecord(request_id, first_id, message_count, fingerprint))
    duplicates: dict[int, list[tuple[int, int]]] = {}
    last = 0
    has_duplicates = not reader.at_end
    for at, place, message_id in reader.array("duplicates", _DUPLICATE) if has_duplicates else ():
        if at < last:
            raise reader.corrupt(f"a duplicate of request {at} comes late")
        last = at
        duplicates.setdefault(at, []).append((place, message_id))
    reader.finish()
    if has_duplicates and not duplicates:
        raise reader.corrupt("it has no duplicates, and their array is not left out")
    for at, found in duplicates.items():
        if at >= len(requests):
            raise reader.corrupt(f"a duplicate of request {at}, of {len(requests)}")
        requests[at] = requests[at]._replace(duplicates=tuple(found))
    return requests


def encode_finished_leases(finished: FinishedLeasesRecord) -> bytes:
    """Finished leases value; there must be as many outcomes as leases."""
    if len(finished.outcomes) != len(finished.leases):
        raise ValueError(f"outcomes: {len(finished.outcomes)}, leases: {len(finished.leases)}")
    return b"".join(
        (
            _U64.pack(finished.sequence),
            number_array("leases", "Q", finished.leases),
            number_array("outcomes", "B", finished.outcomes),
        )
    )


def decode_finished_leases(data: bytes) -> FinishedLeasesRecord:
    reader = Reader("finished leases", data)
    sequence = reader.number("sequence", "Q")
    leases = reader.number_array("leases", "Q")
    numbers = reader.number_array("outcomes", "B")
    reader.finish()
    if len(numbers) != len(leases):
        raise reader.corrupt(f"{len(numbers)} outcomes beside {len(leases)} leases")
    try:
        outcomes = tuple(map(LeaseOutcome, numbers))
    except ValueError as error:
        raise reader.corrupt(f"unknown outcome: {error}") from None
    return FinishedLeasesRecord(sequence, leases, outcomes)


def _number(
    record: str, field: str, code: str
) -> tuple[Callable[[int], bytes], Callable[[bytes], int]]:
    """The encoder and the decoder of a value that is one number."""
    layout = Fixed(**{field: code})

    def decode(data: bytes) -> int:
        return int(Reader(record, data).last(field, layout)[0])

    return layout.pack, decode


encode_routing_cursor, decode_routing_cursor = _number("routing cursor", "number", "Q")
encode_purge_epoch, decode_purge_epoch = _number("purge epoch", "epoch", "Q")
encode_clock, decode_clock = _number("clock", "milliseconds", "q")
encode_config_revision, decode_config_revision = _number("config revision", "revision", "Q")
encode_outbox_progress, decode_outbox_progress = _number("outbox progress", "last_number", "Q")
encode_draining, decode_draining = _number("draining", "since_ms", "q")
encode_leaving, decode_leaving = _number("leaving", "since_ms", "q")
encode_forgotten_revision, decode_forgotten_revision = _number(
    "forgotten revision", "revision", "Q"
)


class FormatRecord(NamedTuple):
    """The format of a database, and its name, as `broker/3`."""

    number: int
    database: str


def encode_format(record: FormatRecord) -> bytes:
    return _FORMAT.pack(record.number) + utf8("name", record.database)


def decode_format_number(data: bytes) -> int:
    """The number alone: what follows it in another format is not known."""
    (number,) = Reader("format", data).fixed("number", _FORMAT)
    return int(number)


def decode_format(data: bytes) -> FormatRecord:
    reader = Reader("format", data)
    (number,) = reader.fixed("number", _FORMAT)
    record = FormatRecord(number, reader.utf8("name"))
    reader.finish()
    return record
