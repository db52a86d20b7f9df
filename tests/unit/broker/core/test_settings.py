"""The settings of a queue: their stored form, and what follows from them."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest

from libs.storage.errors import CorruptRecord
from libs.storage.layout.partitions import Partition
from services.broker.core.settings import Backoff, BackoffKind, QueueSettings


def another_than(value: Any, name: str) -> Any:
    """A value of the same type that is no default."""
    if name == "backoff":
        return Backoff(BackoffKind.FIXED, 7)
    if name == "partition":
        return Partition(1, 3, "tenant id")
    match value:
        case bool():
            return not value
        case int():
            return value + 7
        case str():
            return value + "7"
        case tuple():
            return (("later", "7"),)
    raise TypeError(f"{name}: give a value of {type(value)} here")


def test_every_setting_is_read_as_it_was_stored() -> None:
    defaults = QueueSettings("true")
    changed = defaults.changed(
        **{
            one.name: another_than(getattr(defaults, one.name), one.name)
            for one in fields(defaults)
        }
    )

    assert QueueSettings.from_record(changed.record()) == changed


@pytest.mark.parametrize(
    ("name", "text"), [("lease_ms", "soon"), ("backoff", "fixed 7"), ("partition", "1 3")]
)
def test_a_setting_that_cannot_be_read_is_an_error_of_the_stored_config(
    name: str, text: str
) -> None:
    record = QueueSettings("true").record()

    with pytest.raises(CorruptRecord, match="a setting is damaged"):
        QueueSettings.from_record(replace(record, settings={**record.settings, name: text}))


@pytest.mark.parametrize(
    ("target", "source", "accepts"),
    [
        (None, Partition(1, 3, "tenant"), True),
        (Partition(0, 1, "tenant"), None, True),
        (Partition(1, 3), None, True),
        (Partition(1, 3, "tenant"), None, False),
        (Partition(1, 3, "tenant"), Partition(1, 3, "user"), False),
        (Partition(1, 3, "tenant"), Partition(1, 3, "tenant"), True),
    ],
)
def test_a_message_moves_in_unless_its_header_might_belong_to_another_partition(
    target: Partition | None, source: Partition | None, accepts: bool
) -> None:
    own, others = (QueueSettings("true", partition=one) for one in (target, source))

    assert own.accepts(others) is accepts


def test_a_queue_without_partitions_has_none() -> None:
    assert QueueSettings("true").partitions_count == 0
    assert QueueSettings("true", partition=Partition(1, 3)).partitions_count == 3


def test_without_a_backoff_a_message_waits_for_nothing() -> None:
    assert QueueSettings("true").backoff_ms(3, 7) == 0
    waiting = QueueSettings("true", backoff=Backoff(BackoffKind.LINEAR, 7))
    assert waiting.backoff_ms(3, 7) == 21
