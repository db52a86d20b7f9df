"""The form of a queue has all settings, and finds the field that a broker names."""

from __future__ import annotations

import pytest

from services.console.pages.queue_forms import BY_NAME, EXPRESSIONS, GROUPS, PLACED, _problem_of
from slatemq._admin.queue_calls import _FIELDS
from slatemq.cli.queue import queues
from slatemq.errors import InvalidArgument


def test_the_form_has_every_setting_of_a_queue_once() -> None:
    names = [name for _, group in GROUPS for name in group]

    assert sorted(names) == sorted(BY_NAME) == sorted(_FIELDS)
    assert set(EXPRESSIONS) < set(names)


def test_the_form_of_a_new_queue_has_every_option_of_the_command() -> None:
    options = {one.name for one in queues.create.params} - {one.name for one in queues.show.params}

    assert {*BY_NAME, *PLACED} == {*options, "queue_id"}


def test_each_field_of_a_queue_is_found_by_the_name_that_brokers_have_for_it() -> None:
    for name, field in _FIELDS.items():
        assert list(_problem_of(InvalidArgument(f"queue.{field}", "wrong"))) == [name]


@pytest.mark.parametrize(
    ("field", "name"),
    [
        ("queue.backoff.initial_ms", "backoff"),
        ("queue.queue_id", "queue_id"),
        ("with_queue_id", "with_queue"),
        ("queue.partition.count", "partitions"),
        ("queue.partition.ordering_header", "ordering_header"),
        ("partitions", "partitions"),
        ("shard", "shard"),
        ("start_from_ms", "start_from"),
        ("draft.filter", "filter"),
        ("headers", ""),
        ("update_mask", ""),
        ("", ""),
    ],
)
def test_what_no_field_has_concerns_the_whole_form(field: str, name: str) -> None:
    assert list(_problem_of(InvalidArgument(field, "wrong"))) == [name]
    assert name in ("", *PLACED, *BY_NAME)
