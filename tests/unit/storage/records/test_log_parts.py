"""Long log entries are read in parts: the same messages, so much in a step and no more."""

from __future__ import annotations

from itertools import chain

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from libs.storage.errors import CorruptRecord
from libs.storage.records.log_parts import PART_BYTES_MAX, PART_MESSAGES_MAX, read_log_parts
from libs.storage.records.metadata import MessageMetadata, encode_log_entry
from tests.forms import examples
from tests.unit.storage.records.test_log_runs import (
    FIRST_IDS,
    RUNS,
    Runs,
    by_columns,
    each_message,
    messages_of,
)


def differing(count: int, *, queue: str = "") -> list[MessageMetadata]:
    return [
        MessageMetadata(n, 5, 7, 0, 0, {"key": f"value {n}"}, None, n, queue)
        for n in range(1, count + 1)
    ]


@settings(max_examples=examples(200), deadline=None)
@given(RUNS, FIRST_IDS, st.sampled_from([1, 7, 40, 1_000]), st.sampled_from([30, 500, 1 << 20]))
@example([((0, 0, 0, "a", None, "orders"), 100, True)], 1, 7, 1 << 20)
def test_parts_have_the_messages_of_the_entry_at_first_and_when_read_again(
    runs: Runs, first_id: int, messages_max: int, bytes_max: int
) -> None:
    messages = messages_of(runs, first_id)
    entry = by_columns(messages)

    read = read_log_parts(entry, messages_max=messages_max, bytes_max=bytes_max)
    parts = [part for part in read if part is not None]

    assert each_message(chain.from_iterable(part.runs for part in parts)) == messages
    # Which messages share a run may differ: a part that is read again has no bound in bytes.
    assert [each_message(part.read()) for part in parts] == [
        each_message(part.runs) for part in parts
    ]
    assert all(sum(len(sizes) for *_, sizes, _ in part.runs) <= messages_max for part in parts)


@pytest.mark.parametrize("queue", ["", "orders"])
def test_no_step_reads_more_than_its_bounds(queue: str) -> None:
    few = [MessageMetadata(n, 5, 7, 0, 0, {"k": str(n) * 8_000}) for n in range(1, 100)]

    for messages in (differing(30_000, queue=queue), few):
        steps = list(read_log_parts(encode_log_entry(messages)))

        parts = [part for part in steps if part is not None]
        assert steps.index(parts[0]) == len(parts), "a step before the parts for each of them"
        assert max(len(part.runs) for part in parts) <= PART_MESSAGES_MAX
        assert max(part.size_bytes for part in parts) <= PART_BYTES_MAX + 65_536
        assert each_message(chain.from_iterable(part.runs for part in parts)) == messages


def test_a_short_entry_is_one_part_and_an_empty_one_none() -> None:
    messages = differing(PART_MESSAGES_MAX)
    entry = encode_log_entry(messages)

    [part] = read_log_parts(entry)
    assert part is not None
    assert (each_message(part.runs), each_message(part.read()), part.size_bytes) == (
        messages,
        messages,
        len(entry),
    )

    assert not list(read_log_parts(encode_log_entry([])))


@pytest.mark.parametrize("queue", ["", "orders"])
def test_what_is_not_an_entry_is_refused_before_its_parts_are_over(queue: str) -> None:
    entry = encode_log_entry(differing(3_000, queue=queue))
    queues_bytes = 2 + 3_000 * (2 + len(queue)) if queue else 0
    count_at = len(entry) - queues_bytes - (2 + 3_000 * 4)
    assert entry[count_at : count_at + 2] == (3_000).to_bytes(2, "little")

    for damaged in (
        entry[:-1],
        entry[: len(entry) // 2],
        entry + b"\x00",
        entry[:count_at] + b"\x07\x00" + entry[count_at + 2 :],
        b"\xff\xff" + entry[2:],
    ):
        with pytest.raises(CorruptRecord):
            list(read_log_parts(damaged))
