"""The order within a bucket, whatever is taken out and comes back."""

from __future__ import annotations

from libs.storage.records.queues import AvailableMessage
from services.broker.core.waiting.bucket import Bucket


def message(message_id: int) -> AvailableMessage:
    return AvailableMessage(message_id, 0, 0, 0, 0)


def ids(bucket: Bucket) -> list[int]:
    return [item.message_id for item in bucket.items]


def test_what_joins_a_bucket_stays_behind_what_came_back_to_it_before() -> None:
    # Given a bucket that was emptied and begins again with two that come back
    bucket = Bucket(1, [], stored=True)
    bucket.insert([(3, message(13)), (5, message(15))])

    # When another joins, is taken, and comes back before the second that was taken with it
    bucket.append([message(16)])
    assert len(bucket.places or ()) == bucket.count
    places = bucket.places_of(1, 3)
    bucket.remove({1, 2})
    bucket.insert([(places[1], message(16))])
    bucket.insert([(places[0], message(15))])

    # Then they are in the order in which they came
    assert ids(bucket) == [13, 15, 16]
