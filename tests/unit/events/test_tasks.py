"""Write tasks."""

from __future__ import annotations

import json

import pytest

from libs.events.tasks import (
    COUNT_MAX,
    FailedTask,
    UnreadableTask,
    WriteTask,
    decode_failed_task,
    decode_task,
    encode_failed_task,
    encode_task,
    format_server_time,
    read_dead_letter,
)
from slatemq.errors import InvalidArgument
from slatemq.events.envelope import parse_timestamp

GOLDEN = (
    b'{"task_id":"task_01KJ2KH1G0J9FEYRWH6ATYF8WE","operation":"PutObject",'
    b'"created_at":"2026-02-22T12:00:00.000Z","attempts":0,"max_retries":3,'
    b'"payload":{"bucket":"my-bucket","key":"photos/cat.jpg","content_type":"image/jpeg",'
    b'"content_length":1048576,"data_ref":"/tmp/pending/task_01KJ2KH1G0J9FEYRWH6ATYF8WE"}}'
)


def test_a_task_has_these_bytes() -> None:
    task = decode_task(GOLDEN)
    assert task.operation == "PutObject"
    assert encode_task(task) == GOLDEN


def test_failures_are_counted_until_no_retries_are_left() -> None:
    task = decode_task(GOLDEN)
    for _ in range(3):
        assert task.has_retries_left
        task = task.after_failure()
    assert not task.has_retries_left
    assert task.renewed() == decode_task(GOLDEN)


@pytest.mark.parametrize(
    ("name", "value", "field"),
    [
        ("task_id", "evt_01KJ2KH1G0J9FEYRWH6ATYF8WE", "task_id"),
        ("created_at", "now", "created_at"),
        ("operation", "", "operation"),
        ("attempts", -1, "attempts"),
        ("max_retries", -1, "max_retries"),
        ("attempts", COUNT_MAX + 1, "attempts"),
        ("max_retries", COUNT_MAX + 1, "max_retries"),
        ("attempts", "0", "task.attempts"),
        ("payload", None, "task.payload"),
    ],
)
def test_what_is_not_a_task_is_refused_by_field(name: str, value: object, field: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        decode_task(json.dumps({**json.loads(GOLDEN), name: value}))
    assert refused.value.field == field


def test_a_dead_letter_comes_back_with_its_error() -> None:
    task: WriteTask = decode_task(GOLDEN)
    failed = FailedTask(task=task, error="größe 😀", failed_at="2026-02-22T12:00:01.000Z")
    assert decode_failed_task(encode_failed_task(failed)) == failed


def test_a_failure_is_counted_as_far_as_a_count_goes() -> None:
    task = decode_task(json.dumps({**json.loads(GOLDEN), "attempts": COUNT_MAX}))
    assert not task.has_retries_left
    assert task.after_failure() == task


@pytest.mark.parametrize(
    ("dead_letter", "error"),
    [
        ({"failed_at": "yesterday"}, "failed_at: must be ISO 8601"),
        ({"task": {**json.loads(GOLDEN), "attempts": 1 << 40}}, "attempts: must be 0 to"),
        ({"task": {**json.loads(GOLDEN), "created_at": "now"}}, "created_at: must be ISO 8601"),
        ({"error": None}, "dead letter.error"),
    ],
    ids=["failed_at", "attempts", "created_at", "error"],
)
def test_a_dead_letter_with_a_wrong_field_is_unreadable(
    dead_letter: dict[str, object], error: str
) -> None:
    whole = {"task": json.loads(GOLDEN), "error": "e", "failed_at": "2026-02-22T12:00:01.000Z"}
    encoded = json.dumps({**whole, **dead_letter}).encode()
    found = read_dead_letter(encoded, {"kind": "task"}, "entry 1-0")
    assert isinstance(found, UnreadableTask)
    assert found.place == "entry 1-0"
    assert found.error.startswith(error)


@pytest.mark.parametrize("failed_at", ["yesterday", 7, None, b"2026"])
def test_an_unreadable_dead_letter_of_no_date_failed_when_it_was_read(failed_at: object) -> None:
    found = read_dead_letter(b"", {"kind": "unreadable", "failed_at": failed_at}, "entry 1-0")
    assert parse_timestamp("failed_at", found.failed_at) > parse_timestamp(
        "failed_at", format_server_time(0)
    )
