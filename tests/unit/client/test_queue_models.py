import pickle

import pytest

from slatemq import Backoff, BackoffKind, Published
from slatemq._admin.entry_models import EntryState, EntryView, state_wire, view_wire
from slatemq._admin.queue_models import backoff_of, queue_of
from slatemq._consume.handles import handle_of, queue_of_handle
from slatemq._publish.published import published
from slatemq.errors import InvalidArgument
from slatemq.v1 import queue_pb2


@pytest.mark.parametrize(
    "backoff",
    [
        Backoff.fixed(1.5),
        Backoff.linear(2, max=60, jitter=1.0),
        Backoff.exponential(0.1, multiplier=3, max=600, jitter=0.5),
    ],
)
def test_backoffs_come_back_from_the_wire(backoff: Backoff) -> None:
    assert backoff_of(backoff.wire()) == backoff


def test_defaults_of_a_backoff_are_filled_in() -> None:
    backoff = queue_pb2.Backoff(kind=queue_pb2.Backoff.KIND_EXPONENTIAL, initial_ms=5)
    assert backoff_of(backoff) == Backoff.exponential(0.005)
    assert backoff_of(queue_pb2.Backoff(kind=queue_pb2.Backoff.KIND_NONE)) == Backoff.none()


def test_the_kind_of_a_backoff_may_be_its_name() -> None:
    assert Backoff("linear", 5).wire() == Backoff(BackoffKind.LINEAR, 5).wire()  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match=r"backoff\.kind: must be one of .* 'sometimes'"):
        Backoff("sometimes", 5).wire()  # type: ignore[arg-type]


def test_a_queue_shows_its_counts_and_its_replay() -> None:
    record = queue_pb2.Queue(queue_id="q")
    assert queue_of(record).replay is None
    assert queue_of(record).counts.oldest_claimable_age_ms is None

    record.counts.oldest_claimable_age_ms = 0
    record.counts.by_priority.add(priority=3, available_count=1, delayed_count=2)
    record.replay.ranges.add(ingest_shard=0, start_sequence=100, cursor=150, end_sequence=1_000_200)
    queue = queue_of(record)
    assert queue.replay is not None
    assert queue.replay.fraction == 0.0, "the messages are not counted yet"

    record.replay.replayed_count, record.replay.message_count = 50, 200
    queue = queue_of(record)
    assert queue.counts.oldest_claimable_age_ms == 0
    assert queue.counts.by_priority[3].delayed_count == 2
    assert queue.replay is not None
    assert queue.replay.fraction == 0.25


def test_what_is_published_is_its_id() -> None:
    one, two = published([7, 5], 1000, [1])
    assert (one, two) == (7, 5)
    assert [each.duplicate for each in (one, two)] == [False, True]
    assert {7: "x"}[one] == "x"
    assert f"{one} {one!r}" == "7 7"
    again = pickle.loads(pickle.dumps(two))
    assert isinstance(again, Published)
    assert (again, again.duplicate, again.received_at_ms) == (5, True, 1000)


def test_handles_name_their_queue() -> None:
    assert handle_of("a.b-c", 255, "p5") == "a.b-c/ff/p5"
    assert queue_of_handle(handle_of("a.b-c", 255, "")) == "a.b-c"


def test_states_and_views_may_be_their_names() -> None:
    assert state_wire("in-flight") == state_wire(EntryState.IN_FLIGHT)
    assert view_wire("full") == view_wire(EntryView.FULL)
    with pytest.raises(InvalidArgument, match="available, delayed, in_flight, done, failed"):
        state_wire("lost")
