"""What callers may ask for: every field is checked before anything is begun."""

from __future__ import annotations

import re
from typing import Final

from libs.storage.layout.ids import MAX_MESSAGE_ID
from services.janitor.archive.archived import ArchiveQuery
from services.janitor.config import U32_MAX
from services.janitor.jobs.contract import JOBS
from services.janitor.runs.history import RunRequest, is_run_id
from slatemq.errors import InvalidArgument
from slatemq.v1 import janitor_pb2

QUEUES_MAX: Final = 1_000
MESSAGES_MAX: Final = 10_000
HANDLES_MAX: Final = 1_000
DAYS_MAX: Final = 3_660
REQUEST_ID_BYTES_MAX: Final = 128

_QUEUE_ID: Final = re.compile(r"[A-Za-z0-9._-]{1,255}", re.ASCII)
_LATEST_MS: Final = (1 << 48) - 1


def ask_of(request: janitor_pb2.RunJobRequest) -> RunRequest:
    """The request of a run. Raises InvalidArgument naming the field."""
    job = checked_job("job", request.job)
    _only("older_than_s", request.HasField("older_than_s"), job, "dead-letters")
    _only("days", request.days != 0, job, "report")
    for field in ("target_queue_id", "message_ids", "failed_from_ms", "failed_until_ms"):
        _only(field, bool(getattr(request, field)), job, "restore")
    if job == "unreferenced" and request.queue_ids:
        raise InvalidArgument("queue_ids", "unreferenced is about messages of no queue")
    _check_count("queue_ids", len(request.queue_ids), QUEUES_MAX)
    for place, queue_id in enumerate(request.queue_ids):
        _check_queue(f"queue_ids[{place}]", queue_id)
    if request.target_queue_id:
        _check_queue("target_queue_id", request.target_queue_id)
    _check_count("message_ids", len(request.message_ids), MESSAGES_MAX)
    for place, message_id in enumerate(request.message_ids):
        _check_range(f"message_ids[{place}]", message_id, 1, MAX_MESSAGE_ID)
    _check_range("older_than_s", request.older_than_s, 0, U32_MAX)
    _check_range("days", request.days, 0, DAYS_MAX)
    _check_range("failed_from_ms", request.failed_from_ms, 0, _LATEST_MS)
    _check_range("failed_until_ms", request.failed_until_ms, 0, _LATEST_MS)
    if request.failed_until_ms and request.failed_until_ms <= request.failed_from_ms:
        raise InvalidArgument("failed_until_ms", "must be after failed_from_ms")
    if len(request.request_id.encode()) > REQUEST_ID_BYTES_MAX:
        raise InvalidArgument("request_id", f"has at most {REQUEST_ID_BYTES_MAX} bytes")
    return RunRequest(
        job=job,
        dry_run=request.dry_run,
        queue_ids=tuple(request.queue_ids),
        older_than_s=request.older_than_s if request.HasField("older_than_s") else None,
        days=request.days,
        target_queue_id=request.target_queue_id,
        message_ids=tuple(request.message_ids),
        failed_from_ms=request.failed_from_ms,
        failed_until_ms=request.failed_until_ms,
    )


def archive_query(request: janitor_pb2.ReadArchivedRequest) -> ArchiveQuery:
    """Which dead letters to read. Raises InvalidArgument naming the field."""
    _check_queue("queue_id", request.queue_id)
    _check_count("handles", len(request.handles), HANDLES_MAX)
    for place, handle in enumerate(request.handles):
        if not handle.startswith(f"{request.queue_id}/"):
            raise InvalidArgument(f"handles[{place}]", f"is none of queue {request.queue_id!r}")
    _check_range("archived_from_ms", request.archived_from_ms, 0, _LATEST_MS)
    _check_range("archived_until_ms", request.archived_until_ms, 0, _LATEST_MS)
    if request.archived_until_ms and request.archived_until_ms <= request.archived_from_ms:
        raise InvalidArgument("archived_until_ms", "must be after archived_from_ms")
    _check_range("max_entries", request.max_entries, 0, U32_MAX)
    for field in ("archived_from_ms", "archived_until_ms", "newest_first", "max_entries"):
        if request.handles and getattr(request, field):
            raise InvalidArgument(field, "cannot be combined with handles: leave one of them out")
    return ArchiveQuery(
        request.queue_id,
        tuple(request.handles),
        request.archived_from_ms,
        request.archived_until_ms,
        request.newest_first,
        request.max_entries,
    )


def checked_job(field: str, job: str) -> str:
    if job not in JOBS:
        raise InvalidArgument(field, f"{job[:64]!r} is none of {', '.join(JOBS)}")
    return job


def checked_run_id(run_id: str) -> str:
    if not is_run_id(run_id):
        like = "20261121-130311-482-retention-9f3a2c"
        raise InvalidArgument(
            "run_id", f"{run_id[:64]!r} is not the ID of a run (expected one such as {like})"
        )
    return run_id


def _only(field: str, given: bool, job: str, of: str) -> None:
    if given and job != of:
        raise InvalidArgument(field, f"is for {of} alone, not for {job}")


def _check_queue(field: str, queue_id: str) -> None:
    if not _QUEUE_ID.fullmatch(queue_id):
        raise InvalidArgument(field, "must be 1 to 255 characters of A-Z a-z 0-9 . _ -")


def _check_count(field: str, count: int, most: int) -> None:
    if count > most:
        raise InvalidArgument(field, f"{count} are given, at most {most} are allowed")


def _check_range(field: str, number: int, least: int, most: int) -> None:
    if not least <= number <= most:
        raise InvalidArgument(
            field, f"must be {least}..{most}, not {number}", reason="OUT_OF_RANGE"
        )
