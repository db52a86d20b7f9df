"""Messages that are alike are judged as a whole, with what comes of judging each."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from libs.filters import DEFAULT_PRIORITY, facts
from libs.storage.layout.partitions import Partition
from libs.storage.records.log_runs import LogRun, one_by_one
from services.router import routing
from services.router.entries import LogEntry
from services.router.routing import BrokerRules, Columns, Judgement, QueueRule
from tests.forms import examples

QUEUES = [
    QueueRule("own"),
    QueueRule("kind", 'headers["kind"] == "a"'),
    QueueRule("not-a", 'headers["kind"] != "a"', "7"),
    QueueRule("large", "size > 2"),
    QueueRule("late", "received_at - created_at > duration('1s')"),
    QueueRule("by-size", "true", "size", default_delay_ms=50),
    QueueRule("fails", 'headers["kind"] == "a"', 'int(headers["kind"])', fallback_priority=3),
    QueueRule("fails-by-size", "true", "100 / (size - 2)"),
    QueueRule("delayed", "true", default_delay_ms=300),
    QueueRule("broken", "1 +", fallback_priority=9),
    QueueRule("by-id", "true", partition=Partition(1, 3)),
    QueueRule("by-kind", "true", partition=Partition(0, 2, "kind")),
    QueueRule("fails-in-part", "true", "100 / (size - 2)", partition=Partition(0, 2)),
]

RUNS = st.lists(
    st.tuples(
        st.tuples(
            st.integers(1, 2**40),
            st.sampled_from([0, 5_000]),
            st.just(6_000),
            st.sampled_from([0, 0, 9_000]),
            st.sampled_from([0, 60]),
        ),
        st.sampled_from([{}, {"kind": "a"}, {"kind": "b", "queue": "own"}]),
        st.sampled_from([-1, -1, 0, 700]),
        st.lists(st.integers(1, 4), min_size=1, max_size=8)
        | st.integers(1, 50).map(lambda count: [5] * count),
        st.sampled_from(["", "", "", "by-size", "fails", "delayed", "broken", "by-id", "nowhere"]),
    ),
    min_size=1,
    max_size=6,
)


def judged(queues: list[QueueRule], runs: list[LogRun]) -> tuple[Judgement, dict[str, object]]:
    rules, columns = BrokerRules(), Columns()
    rules.change(queues)
    matches_count = unmatched_count = 0
    left_at: int | None = 0
    rest = None
    while left_at is not None:
        judgement = rules.judge(LogEntry(runs, 10), columns, left_at, rest)
        matches_count += judgement.matches_count
        unmatched_count += judgement.unmatched_count
        left_at, rest = judgement.left_at, judgement.rest
    return Judgement(matches_count, unmatched_count), {
        queue_id: (
            one.message_ids,
            one.priorities,
            one.retention_deadlines_ms,
            one.visible_at_ms,
            one.fallbacks_count,
            one.is_plain,
        )
        for queue_id, one in columns.items()
    }


@settings(max_examples=examples(300), deadline=None)
@given(st.lists(st.sampled_from(QUEUES), unique=True), RUNS)
def test_a_run_is_judged_as_its_messages_are(queues: list[QueueRule], runs: list[LogRun]) -> None:
    apart = [one for run in runs for one in one_by_one(run)]

    assert judged(queues, runs) == judged(queues, apart)


@settings(max_examples=examples(300), deadline=None)
@given(st.lists(st.sampled_from(QUEUES), unique=True), RUNS)
def test_an_entry_that_is_judged_in_steps_is_judged_as_in_one(
    queues: list[QueueRule], runs: list[LogRun]
) -> None:
    whole = judged(queues, runs)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(routing, "STEP_NS", -1)
        patch.setattr(routing, "LOOK_EVERY", 1)
        assert judged(queues, runs) == whole


def test_a_long_entry_takes_several_steps() -> None:
    rules, columns = BrokerRules(), Columns()
    rules.change([QueueRule("all", "true")])
    runs: list[LogRun] = [((n, 0, 5, 0, 0), {"n": str(n)}, -1, (7,), "") for n in range(1, 101)]
    steps, left_at = 0, 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(routing, "STEP_NS", -1)
        while True:
            found = rules.judge(LogEntry(runs, 10), columns, left_at)
            steps += 1
            if found.left_at is None:
                break
            assert found.left_at > left_at
            left_at = found.left_at
    assert steps == 100 // routing.LOOK_EVERY
    assert columns["all"].message_ids == list(range(1, 101))


@settings(max_examples=examples(200), deadline=None)
@given(st.sampled_from(QUEUES[:-3]), st.sampled_from(["", "kind"]), st.integers(1, 4), RUNS)
def test_the_partitions_of_a_queue_share_what_the_whole_queue_would_get(
    queue: QueueRule, header: str, count: int, runs: list[LogRun]
) -> None:
    def matches(rule: QueueRule) -> list[tuple[int, int, int]]:
        rules, columns = BrokerRules(), Columns()
        rules.change([rule])
        judgement = rules.judge(LogEntry(runs, 10), columns)
        column = columns.get(rule.queue_id)
        assert judgement.matches_count == (len(column.message_ids) if column else 0)
        if column is None:
            return []
        assert column.message_ids  # None is named without a message.
        plain = [(DEFAULT_PRIORITY, 0)] * len(column.message_ids)
        given = zip(column.priorities, column.visible_at_ms, strict=True)
        return [
            (message_id, *rest)
            for message_id, rest in zip(
                column.message_ids, plain if column.is_plain else given, strict=True
            )
        ]

    parts = [
        matches(queue._replace(partition=Partition(index, count, header))) for index in range(count)
    ]

    assert sorted(one for part in parts for one in part) == sorted(matches(queue))


def test_an_explanation_is_that_of_the_partition_that_gets_the_message() -> None:
    parts = [BrokerRules() for _ in range(2)]
    for index, rules in enumerate(parts):
        rules.change([QueueRule("q", "true", partition=Partition(index, 2, "kind"))])

    def who(headers: dict[str, str], message_id: int) -> list[int]:
        message = facts(headers, (message_id, 0, 0, 0, 0), -1, 1)
        return [index for index, rules in enumerate(parts) if rules.explain(message, ["q"])]

    assert who({}, 1) == [1]  # by the ID
    assert who({}, 2) == [0]
    assert who({"kind": "customer-1"}, 2) == [1]  # by the header's value
    assert who({"kind": "customer-2"}, 1) == [0]
