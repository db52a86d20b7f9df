"""What rules make of entries, and what goes over the wire of it."""

from __future__ import annotations

import asyncio

import pytest

from libs.filters import Facts
from libs.filters.allowance import Allowance
from libs.storage.layout.partitions import Partition
from libs.storage.records.metadata import MessageMetadata, encode_log_entry
from services.router import wire
from services.router.config import parse_shards
from services.router.entries import LogEntry
from services.router.pieces import Piece
from services.router.routing import BrokerRules, Columns, QueueRule
from services.router.wire import (
    FRESH_BYTES_MAX,
    FRESH_RUN_BYTES,
    assign_request,
    log_entries,
    queue_rules,
)
from slatemq.v1 import ingest_pb2, queue_pb2
from tests.log_entries import DecodedEntry, logged


def standing_rules() -> BrokerRules:
    """Rules whose clock stands still, so that no step of theirs ends early."""
    return BrokerRules(Allowance(now_ns=lambda: 0))


def entry(*messages: MessageMetadata) -> LogEntry:
    stored = DecodedEntry(1, [*messages]).encoded()
    [one] = log_entries(ingest_pb2.TailLogResponse(entries=[stored]))
    assert one is not None
    return one


def test_a_message_of_the_log_keeps_every_field_in_its_place() -> None:
    result = logged(
        message_id=1,
        headers={"k": "v"},
        created_at_ms=2,
        received_at_ms=3,
        visible_at_ms=4,
        retention_s=5,
        payload_bytes=6,
        delay_ms=7,
        direct_queue_id="q",
    )

    assert entry(result).runs == [((1, 2, 3, 4, 5), {"k": "v"}, 7, (6,), "q")]


def test_an_entry_becomes_columns_per_queue() -> None:
    rules = standing_rules()
    rules.change([QueueRule("q", "true", 'int(headers["p"])')])
    columns: Columns = {}

    judged = rules.judge(
        entry(
            logged(message_id=1, headers={"p": "3"}, received_at_ms=500, retention_s=2),
            logged(message_id=2, received_at_ms=500, visible_at_ms=900),
        ),
        columns,
    )

    q = columns["q"]
    assert (q.message_ids, q.priorities) == ([1, 2], [3, 128])
    assert (q.retention_deadlines_ms, q.visible_at_ms) == ([2_500, 0], [0, 900])
    assert (judged.matches_count, judged.unmatched_count) == (2, 0)


@pytest.mark.parametrize(
    ("default_delay_ms", "delay_ms", "visible_at_ms", "expected"),
    [
        (0, None, 0, 0),
        (0, 700, 0, 0),  # A normal queue ignores delays.
        (300, None, 0, 10_300),
        (300, 700, 0, 10_700),
        (300, 0, 0, 10_000),  # An explicit 0 wins over the default, too.
        (0, None, 9_000, 9_000),
        (300, None, 9_000, 9_000),
        (300, 700, 9_000, 9_000),
    ],
)
def test_when_a_message_becomes_visible(
    default_delay_ms: int, delay_ms: int | None, visible_at_ms: int, expected: int
) -> None:
    rules, columns = standing_rules(), Columns()
    change = queue_pb2.Queue(queue_id="q", filter="true", default_delay_ms=default_delay_ms)
    rules.change(queue_rules([queue_pb2.QueueChange(queue=change)]))

    message = logged(
        message_id=1, received_at_ms=10_000, delay_ms=delay_ms, visible_at_ms=visible_at_ms
    )
    rules.judge(entry(message), columns)

    assert (columns["q"].visible_at_ms or [0]) == [expected]  # Empty where there is no time.


def test_a_message_with_a_time_keeps_its_place_behind_ones_without() -> None:
    rules, columns = standing_rules(), Columns()
    rules.change([QueueRule("q", "true")])
    times = [0, 0, 9_000, 0]

    rules.judge(
        entry(*(logged(message_id=at, visible_at_ms=time) for at, time in enumerate(times, 1))),
        columns,
    )

    assert columns["q"].message_ids == [1, 2, 3, 4]
    assert columns["q"].visible_at_ms == times
    assert len(columns["q"].priorities) == len(times)


def test_a_pushed_message_reaches_its_queue_alone_whatever_the_filters_say() -> None:
    rules, columns = standing_rules(), Columns()
    rules.change(
        [
            QueueRule("all", "true"),
            QueueRule("mine", "false", 'int(headers["p"])', default_delay_ms=50),
            QueueRule("broken", "1 +", fallback_priority=3),
        ]
    )

    judged = rules.judge(
        entry(
            *(
                logged(message_id=number, direct_queue_id=queue_id, headers={"p": "7"})
                for number, queue_id in enumerate(["mine", "elsewhere", "broken"], 1)
            )
        ),
        columns,
    )

    assert {queue_id: column.message_ids for queue_id, column in columns.items()} == {
        "mine": [1],
        "broken": [3],
    }
    assert (columns["mine"].priorities, columns["mine"].visible_at_ms) == ([7], [50])
    assert columns["broken"].priorities == [3]
    assert (judged.matches_count, judged.unmatched_count) == (2, 1)


def test_a_priority_that_fails_gives_the_fallback_and_is_counted() -> None:
    rules, columns = standing_rules(), Columns()
    queue = queue_pb2.Queue(queue_id="q", priority='int(headers["p"])', fallback_priority=0)
    queue.filter = "true"
    rules.change(queue_rules([queue_pb2.QueueChange(queue=queue)]))
    rules.change([QueueRule("r", "true", 'int(headers["p"])')])

    rules.judge(
        entry(
            logged(message_id=1, headers={"p": "high"}),
            logged(message_id=2, headers={"p": "-3"}),
            logged(message_id=3),
            logged(message_id=4, direct_queue_id="r"),
        ),
        columns,
    )

    assert columns["q"].priorities == [0, 0, 0]
    assert columns["r"].priorities == [128, 0, 128, 128]
    assert (columns["q"].fallbacks_count, columns["r"].fallbacks_count) == (2, 3)


def test_columns_that_say_nothing_are_not_sent() -> None:
    rules = standing_rules()
    rules.change([QueueRule("q", "true"), QueueRule("p", "true", "7")])
    piece = Piece(0, 1, 0)
    piece.add(entry(logged(message_id=1)), rules)

    sent = {
        assignment.queue_id: assignment
        for assignment in assign_request([(4, piece, None)]).ranges[0].assignments
    }

    assert list(sent["p"].priorities) == [7]
    assert not sent["q"].priorities
    assert not sent["q"].retention_deadlines_ms
    assert not sent["q"].visible_at_ms


def test_messages_that_came_with_the_log_go_on_to_brokers_with_matches() -> None:
    rules = standing_rules()
    rules.change([QueueRule("q", "true")])
    # Given a log entry that came with one of its two messages
    value = encode_log_entry([logged(message_id=1), logged(message_id=2)])
    run = ingest_pb2.StoredRun(message_ids=[1], payloads=[b"one"])
    strange = ingest_pb2.StoredRun(message_ids=[3], payloads=[b"three"])
    response = ingest_pb2.TailLogResponse(
        entries=[ingest_pb2.LogEntry(sequence=1, value=value)],
        messages=[run, strange, ingest_pb2.StoredRun()],
    )
    (received,) = log_entries(response)
    assert received is not None
    piece = Piece(0, 1, 0)
    piece.add(received, rules)

    # Then it goes to the broker where something matches, and only there
    assert list(assign_request([(4, piece, None)]).messages) == [run]
    piece.columns.clear()
    assert not assign_request([(4, piece, None)]).messages


def test_a_call_brings_no_more_messages_along_than_it_has_room_for() -> None:
    rules, pieces, size_bytes = standing_rules(), list[tuple[int, Piece, None]](), 100_000
    rules.change([QueueRule("q", "true")])
    for log in range(4):
        value = encode_log_entry([logged(message_id=1)])
        (received,) = log_entries(
            ingest_pb2.TailLogResponse(
                entries=[ingest_pb2.LogEntry(sequence=1, value=value)],
                messages=[ingest_pb2.StoredRun(message_ids=[1], payloads=[bytes(size_bytes)])],
            )
        )
        assert received is not None
        piece = Piece(0, 1, 0)
        piece.add(received, rules)
        pieces.append((log, piece, None))

    assert len(assign_request(pieces).messages) == FRESH_BYTES_MAX // size_bytes == 2


def test_messages_that_came_with_the_log_count_as_memory_while_they_are_kept() -> None:
    value = encode_log_entry([logged(message_id=1)])
    entries = [ingest_pb2.LogEntry(sequence=1, value=value)]
    run = ingest_pb2.StoredRun(message_ids=[1], payloads=[bytes(1000)])
    plain, fresh = (
        next(log_entries(ingest_pb2.TailLogResponse(entries=entries, messages=messages)))
        for messages in ([], [run])
    )
    assert plain is not None
    assert fresh is not None

    size_bytes = run.ByteSize() + FRESH_RUN_BYTES
    assert fresh.memory_bytes == plain.memory_bytes + size_bytes
    assert fresh.stored_bytes == plain.stored_bytes + size_bytes
    fresh.discard_runs()
    assert fresh.stored_bytes == plain.stored_bytes
    assert fresh.fresh is None


def test_a_queue_is_changed_and_removed() -> None:
    rules, columns = standing_rules(), Columns()
    one = entry(logged(message_id=1, headers={"queue": "a"}))
    changes = [
        queue_pb2.QueueChange(queue=queue_pb2.Queue(queue_id="a")),
        queue_pb2.QueueChange(queue=queue_pb2.Queue(queue_id="b", filter="true")),
        queue_pb2.QueueChange(),
    ]
    rules.change(queue_rules(changes))
    rules.judge(one, columns)
    assert sorted(columns) == ["a", "b"]

    rules.change(queue_rules([queue_pb2.QueueChange(deleted_queue_id="a")]))
    columns.clear()
    rules.judge(one, columns)
    assert sorted(columns) == ["b"]
    assert rules.queue_ids == {"b"}


def test_queues_that_change_together_with_one_that_is_deleted_are_taken_in() -> None:
    rules, columns = standing_rules(), Columns()
    rules.change([QueueRule("old", "true")])

    rules.change([QueueRule("old", deleted=True), QueueRule("new", "true")])
    rules.judge(entry(logged(message_id=1)), columns)

    assert list(columns) == ["new"]


def test_a_queue_that_has_no_partitions_any_more_gets_all() -> None:
    rules = standing_rules()
    one = entry(*(logged(message_id=at) for at in range(1, 21)))
    got = []
    for partition in (Partition(0, 2), None):
        rules.change([QueueRule("q", "true", partition=partition)])
        columns: Columns = {}
        rules.judge(one, columns)
        got.append(columns["q"].message_ids)

    assert 0 < len(got[0]) < 20
    assert got[1] == list(range(1, 21))


def test_the_rules_of_some_queues_judge_as_all_do() -> None:
    # Given a partition, a filter that cannot be read, and another queue
    rules = standing_rules()
    rules.change(
        [
            QueueRule("part", "true", partition=Partition(1, 3)),
            QueueRule("bad", "1 +", fallback_priority=7),
            QueueRule("other", "true"),
        ],
        revision=5,
    )
    rules.revision = 5
    one = entry(
        *(logged(message_id=at) for at in range(1, 21)),
        logged(message_id=21, direct_queue_id="bad"),
    )

    # When
    some = rules.only(["part", "bad"])

    # Then
    assert some.revision == 5
    columns, of_some = Columns(), Columns()
    rules.judge(one, columns)
    some.judge(one, of_some)
    assert 0 < len(columns["part"].message_ids) < 20
    assert columns["bad"].priorities == [7]
    assert sorted(of_some) == ["bad", "part"]
    for queue_id, column in of_some.items():
        assert column.message_ids == columns[queue_id].message_ids
        assert column.priorities == columns[queue_id].priorities


def test_a_filter_that_cannot_be_read_matches_nothing_and_says_so() -> None:
    rules, columns = standing_rules(), Columns()
    rules.change([QueueRule("bad", "true")])
    rules.change([QueueRule("bad", "1 +")])
    one = entry(logged(message_id=1))

    rules.judge(one, columns)

    assert not columns
    [outcome] = rules.explain(Facts({}), ["bad"])
    assert not outcome.matched
    assert "cannot read" in outcome.reason


def test_among_two_thousand_queues_a_message_reaches_its_own() -> None:
    rules, columns = standing_rules(), Columns()
    rules.change(QueueRule(f"q{n}") for n in range(2_000))
    one = entry(logged(message_id=1, headers={"queue": "q77"}))

    rules.judge(one, columns)

    assert list(columns) == ["q77"]


@pytest.mark.parametrize(
    ("text", "shards"),
    [("", None), (" ", None), ("3", {3}), ("0,2, 8-10", {0, 2, 8, 9, 10})],
)
def test_shards_are_read_from_a_list(text: str, shards: set[int] | None) -> None:
    assert parse_shards(text) == shards


@pytest.mark.parametrize("text", ["a", "1-", "-1", "5-2", "16384", "1,,2"])
def test_a_list_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="ingest_shards"):
        parse_shards(text)


def test_messages_that_are_alike_but_for_their_ids_are_distinguished_by_a_filter_on_ids() -> None:
    rules, columns = standing_rules(), Columns()
    rules.change([QueueRule("even", "message_id % 2 == 0"), QueueRule("all", "true")])
    alike = LogEntry([((10, 0, 500, 0, 0), {"k": "v"}, -1, (5,) * 6, "")], 100)

    judged = rules.judge(alike, columns)

    assert columns["even"].message_ids == [10, 12, 14]
    assert columns["all"].message_ids == [10, 11, 12, 13, 14, 15]
    assert judged.matches_count == 9


def test_a_queue_in_quarantine_gets_nothing_not_even_what_is_pushed_to_it() -> None:
    queue = queue_pb2.Queue(queue_id="slow", filter="true")
    queue.quarantine.reason = "took 9 ms"
    rules, columns = standing_rules(), Columns()
    rules.change(queue_rules([queue_pb2.QueueChange(queue=queue)]), 7)
    one = entry(
        logged(message_id=1),
        logged(message_id=2, direct_queue_id="slow"),
    )

    rules.judge(one, columns)

    assert columns == {}
    assert rules.changed_after(6) == ["slow"]
    [outcome] = rules.explain(Facts({}), ["slow"])
    assert not outcome.matched
    assert outcome.waits
    assert outcome.reason == "the queue is in quarantine: took 9 ms"

    queue.ClearField("quarantine")
    rules.change(queue_rules([queue_pb2.QueueChange(queue=queue)]), 8)
    rules.judge(one, columns)
    assert columns["slow"].message_ids == [1, 2]
    assert rules.changed_after(7) == ["slow"]
    [outcome] = rules.explain(Facts({}), ["slow"])
    assert outcome.matched


async def test_ten_thousand_filters_are_taken_in_step_by_step() -> None:
    rules, turns = BrokerRules(), 0
    queues = [queue_pb2.Queue(queue_id=f"q{n}", filter=f"size > {n}") for n in range(40)]
    changes = [queue_pb2.QueueChange(queue=queue) for queue in queues]

    async def others() -> None:
        nonlocal turns
        while rules.revision == 0:
            turns += 1
            await asyncio.sleep(0)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wire, "STEP_NS", -1)
        await asyncio.gather(wire.apply_changes(rules, changes, 5), others())

    assert rules.revision == 5
    assert len(rules.queue_ids) == 40
    assert turns >= 40
