"""Runs of jobs, and where they are kept: one object each, below `janitor/runs/` in the root.

::

    janitor/runs/20261121-130311-482-retention-9f3a2c.json   {"job": "retention", "state": …}

    waiting ──► running ──► done | failed
       │           │
       └───────────┴──► cancelling ──► cancelled         interrupted: its janitor stopped or died

A run has one writer, its janitor, which writes it again while it runs. A janitor that takes the
place of one of the same number marks what that one left as interrupted; should the first still be
alive, its next write finds another version, and it ends the run.
"""

from __future__ import annotations

import asyncio
import enum
import json
import logging
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import UTC, datetime
from typing import Any, Final

from libs.storage.errors import ObjectNotFound
from libs.storage.objects.json_objects import load_json
from libs.storage.objects.small_objects import Objects
from services.janitor.jobs.contract import Progress
from slatemq._admin.job_names import JOBS

log = logging.getLogger(__name__)

FOLDER: Final = "janitor/runs"

STALE_MS: Final = 60_000
"""A run that was not written for so long has lost its janitor: six times as long as between two."""

LOOKED_BACK: Final = 100
"""Runs of a job that are looked at for what is true of it: the last one, a request ID."""

READS_AT_ONCE: Final = 32

_ID: Final = re.compile(rf"\d{{8}}-\d{{6}}-\d{{3}}-({'|'.join(JOBS)})-[0-9a-f]{{6}}", re.ASCII)


EVENTS_OWED: Final = "owed"
EVENTS_PUBLISHED: Final = "published"

EVENTS_KEPT_MS: Final = 7 * 24 * 3600 * 1000
"""For how long after its end a run that owes events stays in the history, however full that is."""


class State(enum.StrEnum):
    WAITING = "waiting"
    RUNNING = "running"
    CANCELLING = "cancelling"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"
    INTERRUPTED = "interrupted"


ENDED: Final = frozenset({State.DONE, State.FAILED, State.CANCELLED, State.INTERRUPTED})


class Trigger(enum.StrEnum):
    REQUEST = "request"
    SCHEDULE = "schedule"


@dataclass(frozen=True)
class RunRequest:
    """The fields of RunJobRequest."""

    job: str
    dry_run: bool = False
    queue_ids: tuple[str, ...] = ()
    older_than_s: int | None = None
    days: int = 0
    target_queue_id: str = ""
    message_ids: tuple[int, ...] = ()
    failed_from_ms: int = 0
    failed_until_ms: int = 0
    sizes_only: bool = False


@dataclass(frozen=True)
class Run:
    """A run, as it is stored.

    Attributes:
        janitor: The number of its janitor.
        process: Which process of that number.
        alive_at_ms: When its janitor last wrote it.
        seen: The evidence of work that began it; empty where none was sought.
        snapshots: Database and ID of the snapshots that it may have left.
        findings: What a verification found, as the job gave it.
        events: EVENTS_OWED, EVENTS_PUBLISHED, or empty: it has none.
    """

    run_id: str
    ask: RunRequest
    trigger: Trigger
    state: State
    janitor: int
    process: str
    created_at_ms: int
    request_id: str = ""
    started_at_ms: int = 0
    ended_at_ms: int = 0
    alive_at_ms: int = 0
    progress: Progress | None = None
    counts: Mapping[str, int] = field(default_factory=dict)
    artifacts: tuple[str, ...] = ()
    phases: tuple[tuple[str, float], ...] = ()
    findings: tuple[Mapping[str, Any], ...] = ()
    error: str = ""
    seen: Mapping[str, int] = field(default_factory=dict)
    snapshots: tuple[tuple[str, str], ...] = ()
    events: str = ""

    @property
    def ended(self) -> bool:
        return self.state in ENDED

    @property
    def path(self) -> str:
        return f"{FOLDER}/{self.run_id}.json"


def new_run_id(job: str, now_ms: int) -> str:
    """An ID that sorts by time."""
    made = datetime.fromtimestamp(now_ms / 1000, UTC)
    return f"{made:%Y%m%d-%H%M%S}-{now_ms % 1000:03d}-{job}-{secrets.token_hex(3)}"


def is_run_id(text: str) -> bool:
    return _ID.fullmatch(text) is not None


def job_of(run_id: str) -> str:
    found = _ID.fullmatch(run_id)
    return found[1] if found else ""


@dataclass
class Stored:
    """A run as it was last read or written, and the version of its object."""

    run: Run
    tag: str


class RunStore:
    """The runs of an instance. Every method raises StoreUnavailable."""

    def __init__(self, objects: Objects) -> None:
        self._objects = objects

    async def create(self, run: Run) -> Stored:
        if not await self._objects.put_if_absent(run.path, _encode(run)):
            raise RuntimeError(f"there is a run {run.run_id}")
        return await self.get(run.run_id)

    async def get(self, run_id: str) -> Stored:
        """Raises ObjectNotFound, ValueError where the object is damaged."""
        path = f"{FOLDER}/{run_id}.json"
        data, tag = await self._objects.get_version(path)
        return Stored(_decode(run_id, data), tag)

    async def artifact(self, path: str) -> bytes:
        """A file that a run wrote. Raises ObjectNotFound."""
        return await self._objects.get(path)

    async def save(self, stored: Stored, run: Run) -> bool:
        """Store a newer state of a run; False: another process has written or removed it."""
        tag = await self._objects.replace(run.path, _encode(run), stored.tag)
        if tag is None:
            return False
        stored.run, stored.tag = run, tag
        return True

    async def ids(self, job: str = "") -> list[str]:
        """The IDs of the runs of one job or of all, the newest first."""
        names = [path.rpartition("/")[2] for path in await self._objects.list(FOLDER)]
        found = [name.removesuffix(".json") for name in names if name.endswith(".json")]
        known = [run_id for run_id in found if is_run_id(run_id)]
        return sorted((one for one in known if not job or job_of(one) == job), reverse=True)

    async def read(self, run_ids: Sequence[str]) -> list[Stored]:
        """These runs, except those that are gone or damaged."""
        found: list[Stored | None] = []
        for begin in range(0, len(run_ids), READS_AT_ONCE):
            some = run_ids[begin : begin + READS_AT_ONCE]
            found += await asyncio.gather(*(self._read(run_id) for run_id in some))
        return [stored for stored in found if stored is not None]

    async def _read(self, run_id: str) -> Stored | None:
        try:
            return await self.get(run_id)
        except ObjectNotFound:
            return None  # Pruned since it was listed.
        except ValueError as error:
            log.warning("ignoring a damaged run: %s", error, extra={"run": run_id})
            return None

    async def latest(self, job: str = "") -> list[Stored]:
        """The last LOOKED_BACK runs of a job, or of all, the newest first."""
        return await self.read((await self.ids(job))[:LOOKED_BACK])

    async def prune(self, kept: int, older_than_ms: int, now_ms: int) -> int:
        """Remove the oldest runs: those over `kept`, and those that ended too long ago (0: none).

        Runs that have not ended stay. Returns how many were removed.
        """
        ids = await self.ids()
        gone = 0
        for place, run_id in reversed(list(enumerate(ids))):
            over = place >= kept
            if not over and not older_than_ms:
                break  # Nor is anything newer.
            found = await self.read([run_id])
            run = seen_now(found[0].run, now_ms) if found else None
            kept_ms = run.ended_at_ms + older_than_ms if run is not None and run.ended else 0
            if not over and kept_ms > now_ms:
                break  # What is newer ended later, give or take the length of a run.
            if run is not None and run.events == EVENTS_OWED and _is_recent(run, now_ms):
                continue
            if run.ended if run is not None else over:
                await self._objects.delete(f"{FOLDER}/{run_id}.json")
                gone += 1
        return gone


def _is_recent(run: Run, now_ms: int) -> bool:
    return now_ms < run.ended_at_ms + EVENTS_KEPT_MS


def seen_now(run: Run, now_ms: int) -> Run:
    """The run as others see it: interrupted where its janitor has not written for too long."""
    if run.ended or run.alive_at_ms + STALE_MS > now_ms:
        return run
    return interrupted(run, run.alive_at_ms, "its janitor is gone")


class Sightings:
    """Judges runs as `seen_now` does, and those of a clock that is ahead by whether they change.

    Such a run would go on, by its own times, long after its janitor was killed. One that is written
    is alive; one that was seen unchanged for too long has lost its janitor.
    """

    def __init__(self) -> None:
        self._unchanged: dict[str, tuple[str, int]] = {}

    def judge(self, stored: Stored, now_ms: int) -> Run:
        run = stored.run
        if run.ended or run.alive_at_ms <= now_ms + STALE_MS:
            self._unchanged.pop(run.run_id, None)
            return seen_now(run, now_ms)
        tag, since_ms = self._unchanged.get(run.run_id, ("", 0))
        if tag != stored.tag:
            self._unchanged[run.run_id] = (stored.tag, now_ms)
        elif since_ms + STALE_MS <= now_ms:
            return interrupted(run, since_ms, "its janitor is gone")
        return run


def interrupted(run: Run, at_ms: int, why: str) -> Run:
    return replace(run, state=State.INTERRUPTED, ended_at_ms=at_ms, error=why)


class RunEvents:
    """Called with each run that has begun or ended, once that is stored; does nothing.

    `mark` is what new runs have as `events`.
    """

    mark: str = ""

    def changed(self, run: Run) -> None: ...


# --- The object -------------------------------------------------------------


_ASKED: Final = frozenset(one.name for one in fields(RunRequest))


def _encode(run: Run) -> bytes:
    values = {name: value for name, value in asdict(run).items() if name != "run_id"}
    return json.dumps(values, indent=1).encode()


def _decode(run_id: str, data: bytes) -> Run:
    try:
        values: dict[str, Any] = load_json(data)
        known = {one.name for one in fields(Run)}
        kept = {name: _frozen(value) for name, value in values.items() if name in known}
        ask = {name: _frozen(value) for name, value in values["ask"].items() if name in _ASKED}
        progress = values.get("progress")
        return Run(
            **{
                **kept,
                "run_id": run_id,
                "ask": RunRequest(**ask),
                "trigger": Trigger(values["trigger"]),
                "state": State(values["state"]),
                "progress": Progress(**progress) if progress else None,
            }
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"the object of run {run_id} is damaged: {error!r}") from error


def _frozen(value: Any) -> Any:
    """Lists of JSON as the tuples of a run."""
    return tuple(_frozen(one) for one in value) if isinstance(value, list) else value
