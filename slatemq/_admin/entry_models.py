"""Entries as the client shows them: one message in one queue, its state and its attempts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from slatemq._requests import fields_of
from slatemq.errors import InvalidArgument, SlateMQError
from slatemq.v1 import entry_pb2, message_pb2, queue_pb2

if TYPE_CHECKING:
    from slatemq.encryption import KeyRing


class EntryState(StrEnum):
    """The state of a message in a queue."""

    AVAILABLE = "available"
    DELAYED = "delayed"
    IN_FLIGHT = "in_flight"
    DONE = "done"
    FAILED = "failed"
    ARCHIVED = "archived"


StateName = Literal["available", "delayed", "in_flight", "in-flight", "done", "failed", "archived"]
"""The states as text."""

ViewName = Literal["basic", "attempts", "headers", "full"]
"""The views as text."""


class EntryView(StrEnum):
    """How much of an entry to return: each view has what the one before has."""

    BASIC = "basic"
    ATTEMPTS = "attempts"
    HEADERS = "headers"
    FULL = "full"


class Attempt(NamedTuple):
    """A failed attempt: the consumer, the time of its claim, and how it ended.

    `queue_id`: the queue of the attempt, which differs from the entry's after a redrive into it.
    """

    consumer_id: str
    claimed_at_ms: int
    outcome: str
    queue_id: str = ""


@dataclass(frozen=True, slots=True)
class StoredMessage:
    """A message as it is stored; the payload is empty where only headers were asked for."""

    message_id: int
    payload: bytes
    headers: Mapping[str, str]
    created_at_ms: int
    received_at_ms: int
    retention_s: int

    @property
    def stored_payload(self) -> bytes:
        """The payload as it was published, encrypted or not."""
        return self.payload


class SealedMessage(StoredMessage):
    """A stored message whose payload is decrypted when it is read: its key may be unknown here."""

    __slots__ = ("_encryption", "_sealed")

    _encryption: KeyRing
    _sealed: bytes

    def __init__(self, encryption: KeyRing, **fields: Any) -> None:
        object.__setattr__(self, "_encryption", encryption)
        super().__init__(**fields)

    @property
    def payload(self) -> bytes:
        return self._encryption.open(self._sealed, self.headers, f"message {self.message_id}")

    @payload.setter
    def payload(self, sealed: bytes) -> None:
        object.__setattr__(self, "_sealed", sealed)

    @property
    def stored_payload(self) -> bytes:
        return self._sealed


class Archived(NamedTuple):
    """The place of an archived dead letter: the run of the janitor that archived it, and when.

    `bucket_order`: the broker's bucket with the entry.
    """

    run: str
    archived_at_ms: int
    bucket_order: int


@dataclass(frozen=True, slots=True)
class Entry:
    """One message in one queue; entry.proto says which fields go with which state.

    Attributes:
        handle: Names the entry in calls such as `get_entry` and `cancel_entry`.
        attempts: The failed attempts, the oldest first; where the view has them.
        message: The message, where the view has it and it is still stored.
        etag: The message's etag, which `edit_message` takes.
        archived: The place of an archived dead letter; None for others.
    """

    handle: str
    queue_id: str
    message_id: int
    state: EntryState
    priority: int = 0
    attempts_count: int = 0
    visible_at_ms: int = 0
    retention_deadline_ms: int = 0
    consumer_id: str = ""
    claimed_at_ms: int = 0
    lease_deadline_ms: int = 0
    finished_at_ms: int = 0
    reason: str = ""
    transferred_to: str = ""
    attempts: tuple[Attempt, ...] = ()
    message: StoredMessage | None = None
    etag: str = ""
    archived: Archived | None = None


class EntryPage(NamedTuple):
    """A page of a listing; `next_page_token` is empty on the last page.

    `problems`: the broker shard of a partition whose entries are missing, and why it did not
    answer.
    """

    entries: list[Entry]
    next_page_token: str
    problems: Mapping[int, SlateMQError]


class SearchProgress(NamedTuple):
    """The progress of a search, over all brokers that have reported."""

    queues_searched_count: int
    queues_count: int
    rows_read_count: int


_STATES = {one: queue_pb2.EntryState.Value(f"ENTRY_STATE_{one.name}") for one in EntryState}
_STATE_OF = {wire: state for state, wire in _STATES.items()}
_VIEWS = {one: entry_pb2.EntryView.Value(f"ENTRY_VIEW_{one.name}") for one in EntryView}


def state_wire(state: EntryState | str, field: str = "state") -> queue_pb2.EntryState.ValueType:
    """Raises InvalidArgument about `field` for an unknown state."""
    try:
        return _STATES[EntryState(state.replace("-", "_"))]
    except (ValueError, AttributeError, TypeError):
        known = ", ".join(EntryState)
        raise InvalidArgument(field, f"must be one of {known}, not {state!r}") from None


def view_wire(view: EntryView | str) -> entry_pb2.EntryView.ValueType:
    """Raises InvalidArgument for an unknown view."""
    try:
        return _VIEWS[EntryView(view)]
    except (ValueError, TypeError):
        known = ", ".join(EntryView)
        raise InvalidArgument("view", f"must be one of {known}, not {view!r}") from None


def keys_of(view: entry_pb2.EntryView.ValueType, encryption: KeyRing | None) -> KeyRing | None:
    """The keys for entries of a view: those of others than the full one have no payloads."""
    return encryption if view == entry_pb2.ENTRY_VIEW_FULL else None


def entry_of(entry: entry_pb2.Entry, encryption: KeyRing | None) -> Entry:
    return Entry(
        **fields_of(entry, Entry),
        state=_STATE_OF[entry.state],
        attempts=tuple(
            Attempt(each.consumer_id, each.claimed_at_ms, each.outcome, each.queue_id)
            for each in entry.attempts
        ),
        message=stored_message(entry.message, encryption) if entry.HasField("message") else None,
        archived=_archived_of(entry.archived) if entry.HasField("archived") else None,
    )


def _archived_of(archived: entry_pb2.Archived) -> Archived:
    return Archived(archived.run, archived.archived_at_ms, archived.bucket_order)


def stored_message(message: message_pb2.Message, encryption: KeyRing | None) -> StoredMessage:
    fields = {**fields_of(message, StoredMessage), "headers": dict(message.headers)}
    if encryption is None:
        return StoredMessage(**fields)
    return SealedMessage(encryption, **fields)
