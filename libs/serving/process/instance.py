"""The settings of the instance: what must be the same in every process.

The first process of an instance writes them, as the record number 1 at the root; `slatemq instance
set` writes the next one; every process reads the latest at its start. A flag or a variable of a
process states the value for a new instance, and has to agree with the record from then on.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Final, NamedTuple

from libs.serving import limits
from libs.serving.process.exits import ExitCause, FatalError
from libs.serving.process.settings import check_bounds, setting, settings_of
from libs.storage.database.roots import Root
from libs.storage.errors import CorruptRecord, LostInstance, OtherFormat
from libs.storage.objects.instance_records import (
    FOLDER,
    InstanceRecord,
    InstanceRecords,
    WalStoreRecord,
    path_of,
)
from slatemq.models import now_ms

log = logging.getLogger(__name__)

WEEK_S: Final = 7 * 24 * 3600
DAY_S: Final = 24 * 3600
DEDUPE_WINDOW_S_MAX: Final = 366 * DAY_S


@dataclass(frozen=True, kw_only=True)
class InstanceSettings:
    """The settings that all processes of the instance share."""

    payload_bytes_max: int = setting(
        "Largest payload of a message, in bytes; message size limits follow from it.",
        default=limits.PAYLOAD_BYTES_MAX,
        minimum=1,
        maximum=limits.PAYLOAD_BYTES_CEILING,
    )
    retention_s: int = setting(
        "How long a message lives whose producer does not say, in seconds; 0 = forever.",
        default=WEEK_S,
        minimum=0,
        maximum=limits.RETENTION_S_MAX,
    )
    max_message_delay_ms: int = setting(
        "Longest delay of a message in delayed queues, and of a delayed queue, in ms.",
        default=900_000,
        minimum=0,
        maximum=limits.MESSAGE_DELAY_MS_MAX,
    )
    dedupe_window_s: int = setting(
        "For how long a dedupe key stands for the message first published with it, in seconds. "
        "Each key costs some 100 bytes on disk until then, and no memory.",
        default=600,
        minimum=1,
        maximum=DEDUPE_WINDOW_S_MAX,
    )
    request_id_window_s: int = setting(
        "For how long a repeated request ID gets the first answer, in seconds; counted in whole "
        "minutes, and at least 10 of them are promised to producers.",
        default=600,
        minimum=600,
        maximum=DAY_S,
    )
    replay_window_s: int = setting(
        "How far back a new queue may start, in seconds; 0 = forever. Messages that no queue "
        "needs any more are kept for this long after their receipt.",
        default=WEEK_S,
        minimum=0,
        maximum=limits.RETENTION_S_MAX,
    )
    purge_grace_s: int = setting(
        "How long something must have been over, by a process's clock, before it is removed "
        "permanently, in seconds: more than the clocks of the instance's machines differ.",
        default=60,
        minimum=0,
        maximum=DAY_S,
    )


class Instance(NamedTuple):
    """The settings that a process runs with, and the number of the record they come from."""

    number: int
    settings: InstanceSettings


class StatedSetting(NamedTuple):
    """A setting of the instance that a flag or variable (`source`) of this process states."""

    name: str
    value: int
    source: str


class Contradiction(FatalError):
    """A flag or variable contradicts the instance: the process ends, and nothing has changed."""

    def __init__(self, stated: Iterable[StatedSetting], settings: InstanceSettings) -> None:
        lines = [
            f"{one.source} is {one.value}, but the instance has "
            f"{one.name}={getattr(settings, one.name)}. Remove {one.source}, or change the "
            f"instance: slatemq instance set {one.name}={one.value}"
            for one in stated
        ]
        super().__init__(ExitCause.usage("\n".join(lines)))


async def refuse_lost_instance(root: Root) -> None:
    """Check that a root without a record has no databases either.

    A record that was lost had longer windows, perhaps, or another store of the WALs: one with the
    settings of this process would have the janitor remove what was to be kept.

    Raises LostInstance, StoreUnavailable, CorruptRecord.
    """
    records = InstanceRecords(root.objects)
    if await records.latest() is not None or not await root.has_databases():
        return
    if await records.latest() is None:  # Else another process has just made the instance.
        raise LostInstance(
            f"{root.url} has databases, and no record of its settings: restore the folder "
            f"`{FOLDER}/` from the store's versions or a copy (docs/how-to/instance.md)"
        )


async def join_instance(
    records: InstanceRecords,
    stated: Iterable[StatedSetting],
    wal_store: WalStoreRecord | None = None,
) -> Instance:
    """The settings of the instance; makes it where there is none yet.

    `wal_store` is what a new instance has its write-ahead logs in; None: the root's own store.

    Of several processes that make it at once one does, and the others join what it made. A process
    whose write was stored without an answer finds it stored when it starts again.

    Raises Contradiction, StoreUnavailable, CorruptRecord, OtherFormat.
    """
    stated = list(stated)
    record = await records.latest()
    while record is None:
        settings = InstanceSettings(**{one.name: one.value for one in stated})
        if await records.create(InstanceRecord(1, now_ms(), asdict(settings), wal_store)):
            log.info("made the instance", extra=asdict(settings))
        record = await records.latest()
    settings = settings_of_record(record)
    different = [one for one in stated if getattr(settings, one.name) != one.value]
    if different:
        raise Contradiction(different, settings)
    return Instance(record.number, settings)


def settings_of_record(record: InstanceRecord) -> InstanceSettings:
    """What a record says; a setting that it does not have is at its default.

    Raises OtherFormat where it has a setting that this version does not know, and CorruptRecord
    where one is out of its bounds.
    """
    path, described = path_of(record.number), settings_of(InstanceSettings)
    if unknown := sorted(record.settings.keys() - {one.name for one in described}):
        raise OtherFormat(
            f"{path} has settings that this version of SlateMQ does not know "
            f"({', '.join(unknown)}): run the version that wrote it, or a newer one"
        )
    settings = InstanceSettings(**record.settings)
    for one in described:
        value = getattr(settings, one.name)
        try:
            check_bounds(one.metadata["setting"], value)
        except ValueError as error:
            wrong = f"{path}: {one.name} {error}, and is {value}"
            raise CorruptRecord("instance record", wrong) from None
    return settings
