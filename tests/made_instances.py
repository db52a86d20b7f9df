"""Instances whose databases are written before any of their processes has started."""

from __future__ import annotations

from libs.serving.process.instance import StatedSetting, join_instance
from libs.storage.database.roots import Root
from libs.storage.objects.instance_records import InstanceRecords


async def make_instance(root: Root, **settings: int) -> None:
    """Makes the record that the first process makes: none starts on databases without one.

    `settings` are those that are not at their defaults; they must agree with a record that is there
    already.
    """
    stated = [StatedSetting(name, value, name) for name, value in settings.items()]
    await join_instance(InstanceRecords(root.objects), stated)
