"""The stored form of a queue's settings."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

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
