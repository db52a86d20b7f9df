"""What `queue show` says of a queue."""

from __future__ import annotations

from slatemq._admin.queue_models import joined, queue_of
from slatemq.cli.queue_options import partition_rows, queue_fields, settings_rows, state_of
from slatemq.v1 import queue_pb2


def replaying(**counts: int) -> queue_pb2.Queue:
    """Of one log, up to its millionth ID after a restart."""
    queue = queue_pb2.Queue(queue_id="late", filter="true")
    queue.replay.ranges.add(ingest_shard=3, cursor=9, end_sequence=1_000_000, **counts)
    queue.replay.MergeFrom(queue_pb2.Replay(**counts))  # type: ignore[arg-type]
    return queue


def test_a_replay_is_shown_in_messages() -> None:
    rows = dict(settings_rows(queue_of(replaying(replayed_count=399, message_count=400))))
    assert rows["replay of log 3"] == "399 of 400 messages (99%)"
    fields = queue_fields(queue_of(replaying(replayed_count=399, message_count=400)))
    assert (fields["replay"]["replayed_count"], fields["replay"]["message_count"]) == (399, 400)
    assert fields["replay"]["ranges"][0]["message_count"] == 400

    rows = dict(settings_rows(queue_of(replaying())))
    assert rows["replay of log 3"] == "0 messages so far"

    done = replaying(replayed_count=1, message_count=1)
    done.replay.done = True
    assert dict(settings_rows(queue_of(done)))["replay"] == "done, 1 message"


def test_the_part_of_a_replay_that_is_done_is_one_of_messages() -> None:
    replay = queue_of(replaying(replayed_count=1, message_count=4)).replay
    assert replay is not None
    assert replay.fraction == 0.25
    uncounted = queue_of(replaying()).replay
    assert uncounted is not None
    assert (uncounted.message_count, uncounted.fraction) == (None, 0.0)


def test_a_quarantine_is_shown_with_its_reason_and_since_when() -> None:
    queue = queue_pb2.Queue(queue_id="slow", filter="true")
    assert state_of(queue_of(queue)) == "open"
    assert queue_fields(queue_of(queue))["quarantine"] is None
    queue.quarantine.reason = "took 9 ms"
    queue.quarantine.since_ms = 1_767_225_600_000

    rows = dict(settings_rows(queue_of(queue)))

    assert rows["state"] == "quarantine"
    assert rows["in quarantine since"] == "2026-01-01T00:00:00.000Z"
    assert rows["in quarantine for"] == "took 9 ms"
    fields = queue_fields(queue_of(queue))
    assert fields["quarantine"] == {
        "reason": "took 9 ms",
        "since_ms": 1_767_225_600_000,
        "being_created": False,
    }


def test_a_queue_that_is_paused_in_part_says_which_partitions_and_settings_differ() -> None:
    parts = [queue_pb2.Queue(queue_id="q", lease_ms=1000) for _ in range(3)]
    for index, part in enumerate(parts):
        part.broker_shard = part.revision = index
        part.partition.index, part.partition.count = index, 3
    assert (state_of(joined(parts)), joined(parts).settings_differ) == ("open", ())
    parts[1].lease_ms = 2000
    assert state_of(joined(parts)) == "settings differ"
    parts[2].paused = True

    queue = joined(parts)

    assert state_of(queue) == "paused in part"
    assert dict(settings_rows(queue))["settings that differ"] == "lease_ms, paused"
    assert [row[2] for row in partition_rows(queue)] == ["open", "open", "paused"]
    assert [row[2] for row in partition_rows(joined(parts[1:]))] == ["missing", "open", "paused"]
    fields = queue_fields(queue)
    assert (fields["settings_differ"], fields["partitions"][2]["paused"]) == (
        ("lease_ms", "paused"),
        True,
    )


def test_programs_are_shown_the_priority_that_people_are_shown() -> None:
    for expression, shown in (("", "128"), ("int(headers.p)", "int(headers.p)")):
        queue = queue_of(queue_pb2.Queue(queue_id="q", filter="true", priority=expression))
        assert dict(settings_rows(queue))["priority"] == shown
        assert queue_fields(queue)["priority"] == shown
