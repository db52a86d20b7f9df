"""Notifications of S3 stores."""

from __future__ import annotations

import json
from typing import Any

import pytest

from slatemq.errors import InvalidArgument
from slatemq.events.catalogue import data_of
from slatemq.events.envelope import encode_event
from slatemq.events.s3 import RECORDS_MAX, headers_of, read_notifications, read_subscription


def record(name: str = "ObjectCreated:Put", **changes: Any) -> dict[str, Any]:
    """A record as AWS sends it."""
    return {
        "eventVersion": "2.1",
        "eventSource": "aws:s3",
        "awsRegion": "eu-central-1",
        "eventTime": "2026-02-22T12:00:00.123Z",
        "eventName": name,
        "userIdentity": {"principalId": "AWS:AIDA"},
        "requestParameters": {"sourceIPAddress": "127.0.0.1"},
        "responseElements": {"x-amz-request-id": "4442587FB7D0A2F9", "x-amz-id-2": "x"},
        "s3": {
            "s3SchemaVersion": "1.0",
            "configurationId": "all",
            "bucket": {
                "name": "my-bucket",
                "ownerIdentity": {"principalId": "A3NL"},
                "arn": "arn:aws:s3:::my-bucket",
            },
            "object": {
                "key": "photos/a+cat%C3%BC.jpg",
                "size": 1024,
                "eTag": "d41d8cd98f00b204e9800998ecf8427e",
                "sequencer": "0A1B2C3D4E5F678901",
            },
        },
        **changes,
    }


def document(*records: Any) -> bytes:
    return json.dumps({"Records": list(records)}).encode()


def test_an_upload_becomes_object_created_with_its_key_decoded() -> None:
    (event,), skipped = read_notifications(document(record()))
    assert skipped == 0
    assert event.type == "object.created"
    assert event.timestamp == "2026-02-22T12:00:00.123Z"
    assert (event.source, event.request_id) == ("aws:s3", "4442587FB7D0A2F9")
    assert event.data == {
        "bucket": "my-bucket",
        "key": "photos/a catü.jpg",
        "size": 1024,
        "etag": '"d41d8cd98f00b204e9800998ecf8427e"',
        "content_type": "",
    }
    assert headers_of(event) == {
        "type": "object.created",
        "bucket": "my-bucket",
        "key": "photos/a catü.jpg",
    }


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("ObjectCreated:Post", "object.created"),
        ("ObjectCreated:Copy", "object.created"),
        ("ObjectCreated:CompleteMultipartUpload", "object.created"),
        ("s3:ObjectCreated:Put", "object.created"),
        ("ObjectRemoved:Delete", "object.deleted"),
        ("ObjectRemoved:DeleteMarkerCreated", "object.deleted"),
        ("ObjectCreated", "object.created"),
        ("s3:ObjectCreated:*", "object.created"),
        ("ObjectRemoved", "object.deleted"),
        ("LifecycleExpiration:Delete", "object.deleted"),
        ("s3:LifecycleDelMarkerExpiration:Delete", "object.deleted"),
        ("ObjectLifecycle:Expiration:Current", "object.deleted"),
        ("ObjectLifecycle:Expiration:NonCurrent", "object.deleted"),
        ("ObjectLifecycle:Expiration:Noncurrent", "object.deleted"),
        ("ObjectLifecycle:Expiration:DeleteMarker", "object.deleted"),
        ("ObjectAcl:Put", "object.acl.updated"),
        ("s3:BucketCreated:*", "bucket.created"),
        ("s3:BucketRemoved:*", "bucket.deleted"),
    ],
)
def test_each_notification_has_its_type_and_typed_data(name: str, kind: str) -> None:
    (event,), _ = read_notifications(document(record(name)))
    assert event.type == kind
    assert data_of(event).event_type == kind


def test_a_notification_that_is_sent_twice_has_the_same_id_and_others_have_others() -> None:
    first, again = read_notifications(document(record(), record())).events
    assert first.id == again.id
    object_ = {**record()["s3"]["object"], "sequencer": "0A1B2C3D4E5F678902"}
    later = record(s3={**record()["s3"], "object": object_})
    (other,), _ = read_notifications(document(later))
    assert other.id != first.id


def test_keys_that_are_no_text_are_those_of_two_objects() -> None:
    first, second = record(), record()
    first["s3"]["object"]["key"], second["s3"]["object"]["key"] = "a%FF", "a%FE"

    one, other = read_notifications(document(first, second)).events

    assert one.id != other.id


@pytest.mark.parametrize("response", [{"x-amz-request-id": None}, {}])
def test_a_request_without_an_id_has_none(response: dict[str, Any]) -> None:
    (event,), _ = read_notifications(document(record(responseElements=response)))
    assert event.request_id == ""


def test_a_notification_of_ceph_without_a_time_is_taken() -> None:
    sent = record("ObjectRemoved:Delete", eventSource="ceph:s3", eventTime="0.000000")
    (event,), _ = read_notifications(document(sent))
    assert (event.type, event.timestamp) == ("object.deleted", "1970-01-01T00:00:00.000Z")


@pytest.mark.parametrize(
    "name",
    [
        "ObjectTagging:Put",
        "s3:ObjectCreated:PutTagging",
        "s3:ObjectCreated:DeleteTagging",
        "s3:ObjectCreated:PutRetention",
        "s3:ObjectCreated:PutLegalHold",
        "s3:ObjectRemoved:NoOP",
        "ObjectLifecycle:Expiration:AbortMPU",
        "ObjectLifecycle:Expiration:AbortMultipartUpload",
        "ObjectLifecycle:Transition:Current",
        "x",
    ],
)
def test_what_changes_no_object_is_counted_and_makes_no_event(name: str) -> None:
    read = read_notifications(document(record(name), record()))
    assert (len(read.events), read.skipped_count) == (1, 1)


def test_the_test_event_of_aws_makes_no_event() -> None:
    test_event = {"Service": "Amazon S3", "Event": "s3:TestEvent", "Bucket": "my-bucket"}
    assert read_notifications(json.dumps(test_event)) == ([], 1)


def test_minio_s_envelope_and_its_content_type_are_taken() -> None:
    sent = record("s3:ObjectCreated:Put", eventSource="minio:s3")
    sent["s3"]["object"] |= {"contentType": "image/jpeg", "userMetadata": {"a": "b"}}
    whole = {"EventName": "s3:ObjectCreated:Put", "Key": "my-bucket/x", "Records": [sent]}
    (event,), _ = read_notifications(json.dumps(whole))
    assert (event.source, event.data["content_type"]) == ("minio:s3", "image/jpeg")


def test_ceph_s_keys_are_taken_as_they_are() -> None:
    sent = {
        "eventVersion": "2.2",
        "eventSource": "ceph:s3",
        "awsRegion": "default",
        "eventTime": "2026-02-22T12:00:00.418013Z",
        "eventName": "ObjectCreated:Put",
        "userIdentity": {"principalId": "tester"},
        "requestParameters": {"sourceIPAddress": ""},
        "responseElements": {
            "x-amz-request-id": "89759221-f520-4594-a8af-8633d52181bd.14369.132",
            "x-amz-id-2": "3821-default-default",
        },
        "s3": {
            "s3SchemaVersion": "1.0",
            "configurationId": "slatemq",
            "bucket": {
                "name": "photos",
                "ownerIdentity": {"principalId": "tester"},
                "arn": "arn:aws:s3:default::photos",
                "id": "89759221-f520-4594-a8af-8633d52181bd.14371.2",
            },
            "object": {
                "key": "a+b 100%25 ü.jpg",
                "size": 177,
                "eTag": "a60023221945e53a31f07df71f37f032",
                "versionId": "",
                "sequencer": "66E42466712CA919",
                "metadata": [{"key": "x-amz-meta-a", "val": "b"}],
                "tags": [],
            },
        },
        "eventId": "1771761600.418013.a60023221945e53a31f07df71f37f032",
        "opaqueData": "",
    }
    (event,), _ = read_notifications(document(sent))
    assert (event.source, event.timestamp) == ("ceph:s3", "2026-02-22T12:00:00.418Z")
    assert event.data == {
        "bucket": "photos",
        "key": "a+b 100%25 ü.jpg",
        "size": 177,
        "etag": '"a60023221945e53a31f07df71f37f032"',
        "content_type": "",
    }


@pytest.mark.parametrize(
    ("members", "etag"),
    [
        ({"etag": "a6002322"}, '"a6002322"'),
        ({"etag": "a6002322", "eTag": "d41d8cd9"}, '"d41d8cd9"'),
        ({}, ""),
    ],
)
def test_the_etag_of_an_older_ceph_is_taken_where_there_is_no_other(
    members: dict[str, str], etag: str
) -> None:
    sent = record(eventSource="ceph:s3")
    del sent["s3"]["object"]["eTag"]
    sent["s3"]["object"] |= members
    (event,), _ = read_notifications(document(sent))
    assert event.data["etag"] == etag


def test_notifications_behind_sns_are_taken() -> None:
    behind_sns = {"Type": "Notification", "Message": document(record()).decode()}
    (event,), _ = read_notifications(json.dumps(behind_sns))
    assert event.type == "object.created"


def about_subscription(**changes: Any) -> bytes:
    """What SNS sends when an endpoint is subscribed to a topic, or no more."""
    fields = {
        "Type": "SubscriptionConfirmation",
        "MessageId": "165545c9-2a5c-472c-8df2-7ff2be2b3b1b",
        "Token": "2336412f37fb687f5d51e6e241d09c80",
        "TopicArn": "arn:aws:sns:us-west-2:123456789012:uploads",
        "Message": "You have chosen to subscribe to the topic arn:aws:sns:…",
        "SubscribeURL": "https://sns.us-west-2.amazonaws.com/?Action=ConfirmSubscription&Token=2",
        "Timestamp": "2026-02-22T12:00:00.000Z",
        "SignatureVersion": "1",
    }
    return json.dumps(fields | changes).encode()


def test_what_sns_says_about_a_subscription_makes_no_event() -> None:
    assert read_notifications(about_subscription()) == ([], 1)
    assert read_subscription(about_subscription()) == (
        "arn:aws:sns:us-west-2:123456789012:uploads",
        "2336412f37fb687f5d51e6e241d09c80",
    )
    ended = about_subscription(Type="UnsubscribeConfirmation")
    assert read_notifications(ended) == ([], 1)
    for other in (ended, document(), b"[]"):
        assert read_subscription(other) is None


@pytest.mark.parametrize("wrong", [None, "", "a\nb", "$(a)", 5])
@pytest.mark.parametrize("field", ["TopicArn", "Token"])
def test_a_subscription_is_named_by_what_sns_may_send(field: str, wrong: object) -> None:
    with pytest.raises(InvalidArgument) as refused:
        read_subscription(about_subscription(**{field: wrong}))
    assert refused.value.field == field


@pytest.mark.parametrize(
    ("detail_type", "event_type", "more"),
    [
        (
            "Object Created",
            "object.created",
            {"size": 5, "etag": '"abc"', "content_type": ""},
        ),
        ("Object Deleted", "object.deleted", {}),
        ("Object ACL Updated", "object.acl.updated", {"acl": ""}),
    ],
)
def test_notifications_of_eventbridge_are_taken(
    detail_type: str, event_type: str, more: dict[str, Any]
) -> None:
    bridged = {
        "id": "17793124-05d4-b198-2fde-7ededc63b103",
        "detail-type": detail_type,
        "source": "aws.s3",
        "time": "2026-02-22T12:00:00Z",
        "region": "eu-central-1",
        "detail": {
            "bucket": {"name": "my-bucket"},
            "object": {"key": "a+b%20c", "size": 5, "etag": "abc", "sequencer": "1"},
            "request-id": "R1",
            "reason": "PutObject",
        },
    }
    (event,), _ = read_notifications(json.dumps(bridged))
    assert (event.type, event.source, event.request_id) == (event_type, "aws.s3", "R1")
    assert event.timestamp == "2026-02-22T12:00:00.000Z"
    assert event.data == {"bucket": "my-bucket", "key": "a+b%20c", **more}
    assert read_notifications(json.dumps({**bridged, "detail-type": "Object Tags Added"})) == (
        [],
        1,
    )


@pytest.mark.parametrize(
    ("given", "version_id"), [({"versionId": "v7"}, "v7"), ({"versionId": None}, ""), ({}, "")]
)
@pytest.mark.parametrize(
    "name",
    [
        "ObjectCreated:Put",
        "ObjectRemoved:Delete",
        "ObjectRemoved:DeleteMarkerCreated",
        "LifecycleExpiration:Delete",
    ],
)
def test_an_event_of_an_object_has_the_version_of_its_notification(
    name: str, given: dict[str, str | None], version_id: str
) -> None:
    sent = record(name)
    sent["s3"]["object"] |= given
    (event,), _ = read_notifications(document(sent))
    assert event.data.get("version_id", "") == version_id


@pytest.mark.parametrize(
    ("given", "version_id"), [({"version-id": "v7"}, "v7"), ({"version-id": None}, ""), ({}, "")]
)
@pytest.mark.parametrize("detail_type", ["Object Created", "Object Deleted"])
def test_an_event_of_eventbridge_has_the_version_of_its_notification(
    detail_type: str, given: dict[str, str | None], version_id: str
) -> None:
    bridged = {
        "detail-type": detail_type,
        "time": "2026-02-22T12:00:00Z",
        "detail": {
            "bucket": {"name": "my-bucket"},
            "object": {"key": "k", **given},
            "deletion-type": "Permanently Deleted",
        },
    }
    (event,), _ = read_notifications(json.dumps(bridged))
    assert event.data.get("version_id", "") == version_id


def of_key(key: str) -> dict[str, Any]:
    return record(s3={"bucket": {"name": "b"}, "object": {"key": key}})


def bridged_of(key: str) -> bytes:
    """A document of EventBridge."""
    detail = {"bucket": {"name": "b"}, "object": {"key": key}}
    document = {"detail-type": "Object Created", "time": "2026-02-22T12:00:00Z", "detail": detail}
    return json.dumps(document).encode()


def test_a_key_as_long_as_a_header_may_be_is_taken() -> None:
    (event,), _ = read_notifications(document(of_key("%C3%BC" * 32_767 + "k")))
    assert len(event.data["key"].encode()) == 65_535


def without(name: str) -> dict[str, Any]:
    return {key: value for key, value in record().items() if key != name}


@pytest.mark.parametrize(
    ("sent", "field"),
    [
        (b"", "notification"),
        (b"[]", "notification"),
        (b"\xff{}", "notification"),
        (b"{}", "Records"),
        (b'{"Records": {}}', "Records"),
        (document(1), "Records[0]"),
        (document(record(), without("s3")), "Records[1]"),
        (document(record(eventTime="soon")), "Records[0].eventTime"),
        (document(record(eventTime="1152-02-22T12:00:00.000Z")), "Records[0].eventTime"),
        (document(record(eventTime="0001-01-01T00:00:00+14:00")), "Records[0].eventTime"),
        (document(record(eventTime="9999-12-31T23:59:59.9999Z")), "Records[0].eventTime"),
        (document(record(eventTime="9999-12-31T23:59:59-01:00")), "Records[0].eventTime"),
        (document(record(eventName=5)), "Records[0].eventName"),
        (document(record(s3={"bucket": {}})), "Records[0].s3.bucket"),
        (document(record(), of_key("k" * 65_536)), "Records[1].s3.object.key"),
        (document(of_key("%C3%BC" * 32_768)), "Records[0].s3.object.key"),
        (document(record(s3={"bucket": {"name": "b" * 65_536}})), "Records[0].s3.bucket.name"),
        (bridged_of("k" * 65_536), "detail.object.key"),
        (document(*[{}] * (RECORDS_MAX + 1)), "Records"),
        (b'{"detail-type": "Object Created", "detail": []}', "detail"),
    ],
)
def test_what_is_not_a_notification_is_refused_by_field(sent: bytes, field: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        read_notifications(sent)
    assert refused.value.field == field


def test_an_event_that_is_larger_than_asked_for_is_refused_by_its_record() -> None:
    sent = document(record("ObjectTagging:Put"), record(), record(eventSource="s" * 100))
    sizes = [len(encode_event(event)) for event in read_notifications(sent).events]
    assert len(read_notifications(sent, max(sizes)).events) == 2
    with pytest.raises(InvalidArgument) as refused:
        read_notifications(sent, max(sizes) - 1)
    assert refused.value.field == "Records[2]"
