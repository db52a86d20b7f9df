"""Notifications of S3 stores as events.

Taken are the JSON documents that AWS S3, MinIO and Ceph send (`Records`), those of AWS behind SNS
(`Message`), and those of EventBridge (`detail`).

===========================================  =======================
notification                                 event
===========================================  =======================
`ObjectCreated:Put`, `Post`, `Copy`,         `object.created`
`CompleteMultipartUpload`; without a call
(older Ceph)
`ObjectRemoved:*`, `LifecycleExpiration:*`,  `object.deleted`
`LifecycleDelMarkerExpiration:*` (MinIO),
`ObjectLifecycle:Expiration:*` (Ceph)
`ObjectAcl:Put`                              `object.acl.updated`
`BucketCreated:*` (MinIO)                    `bucket.created`
`BucketRemoved:*` (MinIO)                    `bucket.deleted`
===========================================  =======================

SNS also sends what is about its subscriptions: no event is made of that.

Of other notifications (restored, replicated, tagged, read) nothing is made; they are counted. MinIO
calls some of these `ObjectCreated`, too: `PutTagging`, `PutRetention` and so on; and its
`ObjectRemoved:NoOP` is the deletion of what was not there. What Ceph aborts is an upload, not an
object. The ID of an event is derived from its notification: one that a store sends twice has the
same ID.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple
from urllib.parse import unquote_plus

import msgspec

from slatemq.errors import InvalidArgument
from slatemq.events.catalogue import (
    BucketCreated,
    BucketDeleted,
    EventData,
    ObjectAclUpdated,
    ObjectCreated,
    ObjectDeleted,
    make_event,
)
from slatemq.events.envelope import (
    Event,
    convert_struct,
    derive_event_id,
    encode_event,
    parse_timestamp,
)

RECORDS_MAX = 10_000
"""Of one document; stores send one to a few."""

HEADER_BYTES_MAX = 65_535
"""Of a bucket's name and of a key: ingests take no longer header."""


class Notifications(NamedTuple):
    """The events of a document, and how many of its records no event is made of."""

    events: list[Event]
    skipped_count: int


class Subscription(NamedTuple):
    """What SNS asks the owner of an endpoint to confirm, and the token of that confirmation."""

    topic: str
    token: str


class _Identity(msgspec.Struct, frozen=True):
    principal: str = msgspec.field(default="", name="principalId")


class _Bucket(msgspec.Struct, frozen=True):
    name: str
    owner: _Identity = msgspec.field(default=_Identity(), name="ownerIdentity")


class _Object(msgspec.Struct, frozen=True):
    key: str = ""
    size: int = 0
    etag: str = msgspec.field(default="", name="eTag")
    ceph_etag: str = msgspec.field(default="", name="etag")
    """As Ceph spelled it before April 2021 (ceph/ceph#40608)."""
    content_type: str = msgspec.field(default="", name="contentType")
    sequencer: str = ""
    version_id: str | None = msgspec.field(default="", name="versionId")


class _S3(msgspec.Struct, frozen=True):
    bucket: _Bucket
    object: _Object = _Object()


class _Record(msgspec.Struct, frozen=True):
    name: str = msgspec.field(name="eventName")
    time: str = msgspec.field(name="eventTime")
    s3: _S3
    source: str = msgspec.field(default="", name="eventSource")
    region: str = msgspec.field(default="", name="awsRegion")
    response: dict[str, Any] = msgspec.field(default_factory=dict, name="responseElements")


class _DetailObject(msgspec.Struct, frozen=True):
    key: str = ""
    size: int = 0
    etag: str = ""
    sequencer: str = ""
    version_id: str | None = msgspec.field(default="", name="version-id")


class _Detail(msgspec.Struct, frozen=True):
    bucket: _Bucket
    object: _DetailObject = _DetailObject()
    request_id: str = msgspec.field(default="", name="request-id")


_CREATED = {
    *(f"ObjectCreated:{call}" for call in ("Put", "Post", "Copy", "CompleteMultipartUpload", "*")),
    "ObjectCreated",
}

_REMOVED = {"ObjectRemoved", "LifecycleExpiration", "LifecycleDelMarkerExpiration"}

_REMOVED_NOTHING = "ObjectRemoved:NoOP"
"""What MinIO sends where the object or version to delete was not there."""

_EXPIRED_IN_CEPH = re.compile("ObjectLifecycle:Expiration:(?!Abort)")

_NO_TIME = "0.000000"
"""What Ceph sends as the time where it has none, as after some deletions and races."""

_ABOUT_SUBSCRIPTIONS = ("SubscriptionConfirmation", "UnsubscribeConfirmation")
"""What SNS sends beside notifications: the `Message` of these is prose."""

_SNS_NAME = re.compile(r"[\w.:+/=-]{1,2000}")

_BRIDGE_NAMES = {
    "Object Created": "ObjectCreated:Put",
    "Object Deleted": "ObjectRemoved:Delete",
    "Object ACL Updated": "ObjectAcl:Put",
}


def read_notifications(document: bytes | str, event_bytes_max: int | None = None) -> Notifications:
    """The events of a document, in its order; `event_bytes_max` bounds each of them as JSON.

    Raises InvalidArgument that names the field; then no event is made of any of its records.
    """
    try:
        value = msgspec.json.decode(document)
        if isinstance(value, dict) and value.get("Type") in _ABOUT_SUBSCRIPTIONS:
            return Notifications([], 1)
        if isinstance(value, dict) and isinstance(value.get("Message"), str):
            value = msgspec.json.decode(value["Message"])  # SNS
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidArgument("notification", f"is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise InvalidArgument("notification", "must be a JSON object")
    if value.get("Event") == "s3:TestEvent":
        return Notifications([], 1)
    made = list(_events_of(value))
    if event_bytes_max is not None:
        _check_sizes(value, made, event_bytes_max)
    return Notifications([event for event in made if event], made.count(None))


def read_subscription(document: bytes | str) -> Subscription | None:
    """What the owner of the endpoint is to confirm, where a document that is JSON asks for that.

    Raises InvalidArgument that names the field.
    """
    value = msgspec.json.decode(document)
    if not isinstance(value, dict) or value.get("Type") != "SubscriptionConfirmation":
        return None
    return Subscription(_sns_name(value, "TopicArn"), _sns_name(value, "Token"))


def _sns_name(value: Mapping[str, Any], field: str) -> str:
    text = value.get(field)
    if not isinstance(text, str) or not _SNS_NAME.fullmatch(text):
        raise InvalidArgument(field, "is missing, or has characters that SNS does not use")
    return text


def headers_of(event: Event) -> dict[str, str]:
    """What queues filter events on: the type, and the bucket and the key where it has them."""
    names = ("bucket", "key")
    return {"type": event.type} | {
        name: event.data[name] for name in names if isinstance(event.data.get(name), str)
    }


def _events_of(value: Mapping[str, Any]) -> Iterator[Event | None]:
    if "detail" in value:
        yield _bridged(value)
        return
    records = value.get("Records")
    if not isinstance(records, list):
        raise InvalidArgument("Records", "must be a list: not an S3 event notification")
    if len(records) > RECORDS_MAX:
        raise InvalidArgument("Records", f"has {len(records)} items, the limit is {RECORDS_MAX}")
    for place, record in enumerate(records):
        if not isinstance(record, dict):
            raise InvalidArgument(f"Records[{place}]", "must be a JSON object")
        field = f"Records[{place}]"
        yield _event_of(field, convert_struct(record, _Record, field))


def _check_sizes(
    value: Mapping[str, Any], made: Sequence[Event | None], event_bytes_max: int
) -> None:
    for place, event in enumerate(made):
        size = len(encode_event(event)) if event else 0
        if size > event_bytes_max:
            raise InvalidArgument(
                "detail" if "detail" in value else f"Records[{place}]",
                f"its event has {size} bytes, at most {event_bytes_max} are allowed",
            )


def _event_of(field: str, record: _Record) -> Event | None:
    # MinIO's names begin with `s3:`. Keys are encoded as in a form, but Ceph's are as they are.
    is_raw = record.source.startswith("ceph:")
    key = record.s3.object.key if is_raw else unquote_plus(record.s3.object.key)
    data = _data_of(record.name.removeprefix("s3:"), record, key)
    if data is None:
        return None
    _check_names(f"{field}.s3", record.s3.bucket.name, key)
    at_ms = 0 if record.time == _NO_TIME else parse_timestamp(f"{field}.eventTime", record.time)
    request_id = str(record.response.get("x-amz-request-id") or "")
    # With the key as it was sent: one that is not UTF-8 is decoded as others are.
    parts = (
        *(record.name, record.s3.bucket.name, record.s3.object.key, record.time, request_id),
        *(record.s3.object.sequencer, record.s3.object.version_id or ""),
    )
    return make_event(
        data,
        source=record.source or "s3",
        request_id=request_id,
        at_ms=at_ms,
        event_id=derive_event_id(at_ms, *parts),
    )


def _bridged(value: Mapping[str, Any]) -> Event | None:
    """The event of a document of EventBridge, whose keys are not encoded."""
    name = _BRIDGE_NAMES.get(str(value.get("detail-type")))
    if name is None:
        return None
    detail = convert_struct(value["detail"], _Detail, "detail")
    found = detail.object
    record = _Record(
        name=name,
        time=str(value.get("time", "")),
        s3=_S3(
            bucket=detail.bucket,
            object=_Object(
                key=found.key, size=found.size, etag=found.etag, version_id=found.version_id
            ),
        ),
        region=str(value.get("region", "")),
    )
    data = _data_of(name, record, found.key)
    assert data is not None, name
    _check_names("detail", record.s3.bucket.name, found.key)
    at_ms = parse_timestamp("time", record.time)
    return make_event(
        data,
        source=str(value.get("source", "aws.s3")),
        request_id=detail.request_id,
        at_ms=at_ms,
        event_id=derive_event_id(at_ms, value.get("id", ""), found.key, found.sequencer),
    )


def _check_names(field: str, bucket: str, key: str) -> None:
    """Raise InvalidArgument for one too long for a header: all of a document counts, or nothing."""
    for name, text in (("bucket.name", bucket), ("object.key", key)):
        size = len(text.encode())
        if size > HEADER_BYTES_MAX:
            raise InvalidArgument(
                f"{field}.{name}", f"has {size} bytes, at most {HEADER_BYTES_MAX} are allowed"
            )


def _data_of(name: str, record: _Record, key: str) -> EventData | None:
    bucket, version_id = record.s3.bucket.name, record.s3.object.version_id or ""
    kind = name.partition(":")[0]
    if name in _CREATED:
        etag = (record.s3.object.etag or record.s3.object.ceph_etag).strip('"')
        return ObjectCreated(
            bucket=bucket,
            key=key,
            size=record.s3.object.size,
            etag=f'"{etag}"' if etag else "",
            content_type=record.s3.object.content_type,
            version_id=version_id,
        )
    is_removed = kind in _REMOVED and name != _REMOVED_NOTHING
    if is_removed or _EXPIRED_IN_CEPH.match(name):
        return ObjectDeleted(bucket=bucket, key=key, version_id=version_id)
    if kind == "ObjectAcl":
        return ObjectAclUpdated(bucket=bucket, key=key, acl="")
    if kind == "BucketCreated":
        owner = record.s3.bucket.owner.principal
        return BucketCreated(bucket=bucket, region=record.region, owner=owner)
    if kind == "BucketRemoved":
        return BucketDeleted(bucket=bucket)
    return None
