"""The known event types: what causes each one, and the data that it carries.

`docs/reference/events.md` is generated from this file: `python -m tests.event_catalogue`.
"""

from __future__ import annotations

from typing import ClassVar

import msgspec

from slatemq.errors import NotFound
from slatemq.events.envelope import Event, convert_struct, format_timestamp, make_event_id


class EventData(msgspec.Struct, frozen=True, kw_only=True):
    """The data of one event type. Members that a reader does not know are passed over."""

    event_type: ClassVar[str]
    cause: ClassVar[str]
    """The call, or calls, that cause it."""


# --- Object stores: the types of S3 ------------------------------------------------------------


class BucketCreated(EventData, frozen=True, kw_only=True):
    """A bucket was created."""

    event_type = "bucket.created"
    cause = "CreateBucket"

    bucket: str
    region: str
    owner: str


class BucketDeleted(EventData, frozen=True, kw_only=True):
    """A bucket was deleted."""

    event_type = "bucket.deleted"
    cause = "DeleteBucket"

    bucket: str


class ObjectCreated(EventData, frozen=True, kw_only=True, omit_defaults=True):
    """An object was written. `size` is in bytes; `etag` includes its quotation marks.

    `version_id` is left out where the bucket has no versions.
    """

    event_type = "object.created"
    cause = "PutObject, CopyObject, CompleteMultipartUpload"

    bucket: str
    key: str
    size: int
    etag: str
    content_type: str
    version_id: str = ""


class ObjectDeleted(EventData, frozen=True, kw_only=True, omit_defaults=True):
    """An object was deleted, or in a bucket with versions one version of it.

    `version_id` is that version, or the delete marker that hides the object: look at the object
    before you act. It is left out where the bucket has no versions.
    """

    event_type = "object.deleted"
    cause = "DeleteObject"

    bucket: str
    key: str
    version_id: str = ""


class ObjectsDeleted(EventData, frozen=True, kw_only=True):
    """Several objects were deleted by one call."""

    event_type = "objects.deleted"
    cause = "DeleteObjects"

    bucket: str
    keys: list[str]


class ObjectAclUpdated(EventData, frozen=True, kw_only=True):
    """The access control list of an object changed. `acl` is a canned ACL or its XML."""

    event_type = "object.acl.updated"
    cause = "PutObjectAcl"

    bucket: str
    key: str
    acl: str


class BucketAclUpdated(EventData, frozen=True, kw_only=True):
    """The access control list of a bucket changed. `acl` is a canned ACL or its XML."""

    event_type = "bucket.acl.updated"
    cause = "PutBucketAcl"

    bucket: str
    acl: str


class MultipartCreated(EventData, frozen=True, kw_only=True):
    """A multipart upload was started."""

    event_type = "multipart.created"
    cause = "CreateMultipartUpload"

    bucket: str
    key: str
    upload_id: str


class MultipartCompleted(EventData, frozen=True, kw_only=True):
    """A multipart upload became an object. `etag` includes its quotation marks."""

    event_type = "multipart.completed"
    cause = "CompleteMultipartUpload"

    bucket: str
    key: str
    upload_id: str
    etag: str


class MultipartAborted(EventData, frozen=True, kw_only=True):
    """A multipart upload was given up."""

    event_type = "multipart.aborted"
    cause = "AbortMultipartUpload"

    bucket: str
    key: str
    upload_id: str


class PartUploaded(EventData, frozen=True, kw_only=True):
    """One part of a multipart upload was written. Parts count from 1."""

    event_type = "part.uploaded"
    cause = "UploadPart"

    bucket: str
    key: str
    upload_id: str
    part_number: int
    etag: str


# --- SlateMQ: queues ---------------------------------------------------------------------------


class QueueCreated(EventData, frozen=True, kw_only=True):
    """A queue was created; `filter` and `priority` are CEL expressions."""

    event_type = "queue.created"
    cause = "CreateQueue"

    queue: str
    filter: str
    priority: str
    max_attempts: int
    revision: int


class QueueUpdated(EventData, frozen=True, kw_only=True):
    """A queue's settings changed; the values are those after the change."""

    event_type = "queue.updated"
    cause = "UpdateQueue"

    queue: str
    filter: str
    priority: str
    max_attempts: int
    revision: int


class QueueDeleted(EventData, frozen=True, kw_only=True):
    """A queue was deleted with everything in it."""

    event_type = "queue.deleted"
    cause = "DeleteQueue"

    queue: str


class QueuePaused(EventData, frozen=True, kw_only=True):
    """A queue stopped giving out messages."""

    event_type = "queue.paused"
    cause = "PauseQueue"

    queue: str


class QueueResumed(EventData, frozen=True, kw_only=True):
    """A queue gives out messages again."""

    event_type = "queue.resumed"
    cause = "ResumeQueue"

    queue: str


class QueuePurged(EventData, frozen=True, kw_only=True):
    """Messages were removed from a queue; `states` are the states that were emptied.

    `available` and `delayed` are always emptied together.
    """

    event_type = "queue.purged"
    cause = "PurgeQueue"

    queue: str
    states: list[str]
    messages: int


# --- SlateMQ: messages -------------------------------------------------------------------------


class MessagePublished(EventData, frozen=True, kw_only=True):
    """A message is durable. Its payload stays in SlateMQ; `size` is its length in bytes.

    Headers of more than 128 KiB, or than the backend takes, are left out.
    """

    event_type = "message.published"
    cause = "Publish, PublishStream, a pushed command, an applied write task"

    message_id: int
    headers: dict[str, str]
    size: int
    visible_at: str = ""
    headers_omitted: bool = False


class MessageEdited(EventData, frozen=True, kw_only=True):
    """A message that waits has another payload or other headers."""

    event_type = "message.edited"
    cause = "EditMessage"

    message_id: int
    queue: str
    size: int


class MessageCancelled(EventData, frozen=True, kw_only=True):
    """A message that waited was removed from a queue."""

    event_type = "message.cancelled"
    cause = "CancelEntry"

    message_id: int
    queue: str


class MessageRescheduled(EventData, frozen=True, kw_only=True):
    """A message becomes visible in a queue at another time."""

    event_type = "message.rescheduled"
    cause = "RescheduleEntry"

    message_id: int
    queue: str
    visible_at: str


class MessageDeadLettered(EventData, frozen=True, kw_only=True):
    """A message became a dead letter of a queue; `attempts` counts its deliveries."""

    event_type = "message.dead_lettered"
    cause = "a nack or an expired lease without attempts left, a fail command, content that is gone"

    message_id: int
    queue: str
    attempts: int
    reason: str


class MessageRedriven(EventData, frozen=True, kw_only=True):
    """A dead letter was moved to a queue, to be delivered again, or what replaces it."""

    event_type = "message.redriven"
    cause = "a redrive, a settled dead letter, a redriven archived one"

    message_id: int
    queue: str
    target: str


# --- SlateMQ: the janitor ----------------------------------------------------------------------


class JanitorRunStarted(EventData, frozen=True, kw_only=True):
    """A job of the janitor began."""

    event_type = "janitor.run.started"
    cause = "RunJob, the schedule"

    run_id: str
    job: str
    dry_run: bool


class JanitorRunFinished(EventData, frozen=True, kw_only=True):
    """A job of the janitor ended; `state` is done, failed, cancelled or interrupted.

    `removed` is 0 for a dry run.
    """

    event_type = "janitor.run.finished"
    cause = "the end of a run"

    run_id: str
    job: str
    state: str
    removed: int
    error: str = ""


# --- SlateMQ: access ---------------------------------------------------------------------------


class AccessAct(EventData, frozen=True, kw_only=True):
    """A caller did, or tried to do, more than publish, consume and inspect, or proved nothing.

    `act` is the method; `subjects` are the queues that it named, at most 20; `details` say what
    else it was about, such as `job=repair`. `outcome` is OK or the code of the error. An empty
    `principal` was not proven. `held_back` counts the refusals of the same act to the same
    principal since the last that was recorded. The act `read-file`, with the proof `file` and no
    principal, is that of a process that has taken a new policy, or new tokens, issuers or revoked
    certificates, which `details` name.
    """

    event_type = "access.act"
    cause = (
        "a call that a policy judges by edit, administer or operate, or that is for services; any "
        "call with a token or certificate that is refused; a new version of a file of access"
    )

    principal: str
    proof: str
    act: str
    subjects: list[str]
    peer: str
    outcome: str
    held_back: int = 0
    details: list[str] = []


CATALOGUE: dict[str, type[EventData]] = {
    kind.event_type: kind for kind in EventData.__subclasses__()
}
"""Data class by event type, in the order of this file."""


def make_event(
    data: EventData, *, source: str, request_id: str, at_ms: int, event_id: str = ""
) -> Event:
    """The event of some data; `at_ms` is when it happened, in ms since the Unix epoch."""
    return Event(
        id=event_id or make_event_id(at_ms),
        type=data.event_type,
        timestamp=format_timestamp(at_ms),
        source=source,
        request_id=request_id,
        data=msgspec.to_builtins(data),
    )


def data_of(event: Event) -> EventData:
    """The typed data of an event.

    Raises NotFound for a type that the catalogue does not have, InvalidArgument for data that its
    type does not allow.
    """
    kind = CATALOGUE.get(event.type)
    if kind is None:
        raise NotFound("event type", event.type)
    return convert_struct(event.data, kind, "event.data")
