"""The queue backend that holds this shard's write tasks: connected in the background, for ever.

Each ingest shard has tasks of its own there: names begin with `<prefix>.ingest-<shard>`. Nobody
else could apply them once, since what was applied is recorded in the shard's database.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Awaitable, Callable
from typing import Any, Final, TypeVar
from urllib.parse import parse_qs, urlsplit

import msgspec
from opentelemetry.metrics import Meter

from libs.events.backend import QueueBackend
from libs.events.backends import open_backend
from libs.events.retrying import Outage
from libs.events.settings import QueueSettings
from libs.events.tasks import WriteTask
from libs.events.watch import BackendWatch, QueueHealth
from slatemq.errors import SlateMQError, Unavailable

__all__ = ["BACKEND_DOWN", "TaskBackend"]

log = logging.getLogger(__name__)

T = TypeVar("T")

BACKEND_DOWN: Final = "BACKEND_DOWN"

ENQUEUES_MAX: Final = 64
"""Tasks that are enqueued at the same time: some clients open a connection for each."""

FIRST_TRY_S: Final = 1.0

PREFETCH_COUNT: Final = 100
"""Tasks that are fetched ahead at least, so that they can share commits."""

GATHER_MS: Final = 100
"""How long tasks gather in `async` mode, so that they share a read, a commit, and a completion:
publishes wait behind each of these, in the backend as on the disk."""

_PREFIXES: Final = ("stream_prefix", "queue_prefix", "topic_prefix", "exchange")
"""The settings that names begin with; each backend has one of these, or two."""

_ADDRESSES: Final = ("url", "endpoint", "brokers")
"""The settings that say where a backend is; each has one of these."""


class TaskBackend:
    """One shard's connection.

    Attributes:
        name: Of the backend, as in the settings.
        max_retries: How many failed attempts of a task are tried again.
        place: Tells apart where tasks are held: another backend, address or prefix has another one.
    """

    def __init__(self, settings: QueueSettings, shard: int, meter: Meter) -> None:
        """Not connected yet. `meter` gets its metrics."""
        self._meter = meter
        self.name = settings.backend
        section = getattr(settings, settings.backend)
        self.max_retries: int = section.max_retries
        own: dict[str, Any] = {
            name: f"{getattr(section, name)}.ingest-{shard}"
            for name in _PREFIXES
            if name in section.__struct_fields__
        }
        if settings.backend == "kafka":
            # One partition keeps the order; and what is answered must not be lost with one broker.
            group = f"{section.consumer_group}.ingest-{shard}"
            own |= {"consumer_group": group, "partitions": 1, "acks": "all"}
        if "prefetch_count" in section.__struct_fields__:
            own["prefetch_count"] = max(section.prefetch_count, PREFETCH_COUNT)
        # With `sync` a caller waits for each.
        self._gather_ms = GATHER_MS if settings.consistency == "async" else 0
        self._section = msgspec.structs.replace(section, **own)
        self.place = f"{self.name}-{_digest_of(self._section)}"
        self._backend: QueueBackend | None = None
        self._watch: BackendWatch | None = None
        self._tried = asyncio.Event()
        self._turns = asyncio.Semaphore(ENQUEUES_MAX)

    async def connect(self) -> None:
        """Connect, however long it takes. Raises InvalidArgument for a wrong setting."""
        outage = Outage(log, self.name)
        while self._backend is None:
            backend = open_backend(
                self.name, self._meter, is_sole_consumer=True, gather_ms=self._gather_ms
            )
            try:
                await backend.connect(self._section)
            except Unavailable as error:
                await backend.close()
                self._tried.set()
                await outage.wait(error)
            except BaseException:
                await backend.close()
                self._tried.set()
                raise
            else:
                outage.end()
                self._backend = backend
                self._watch = BackendWatch(backend, self.name, self._meter)
                self._tried.set()

    async def wait_tried(self) -> None:
        """Wait until it is connected or known to be away, within a second.

        Else those who publish at once would be refused though the backend is there. No longer: it
        may be this very instance, which needs this process to answer.
        """
        try:
            async with asyncio.timeout(FIRST_TRY_S):
                await self._tried.wait()
        except TimeoutError:
            log.info("%s has not answered yet", self.name)

    async def watch(self) -> None:
        """Keep its metrics, until cancelled."""
        if self._watch is not None:
            await self._watch.watch()

    async def health(self) -> QueueHealth:
        """Its state, for `GET /health`; never raises."""
        if self._backend is None or self._watch is None:
            return QueueHealth(self.name, False, 0, 0)
        return await self._watch.health()

    @property
    def was_connected(self) -> bool:
        """Whether it answered when it was last looked at."""
        return self._watch is not None and self._watch.was_connected

    @property
    def connected(self) -> QueueBackend:
        """The backend. Raises Unavailable (BACKEND_DOWN) before it is connected."""
        if self._backend is None:
            raise Unavailable(f"{self.name} cannot be reached yet", reason=BACKEND_DOWN)
        return self._backend

    async def enqueue(self, task: WriteTask) -> None:
        """Store a task. Raises Unavailable (BACKEND_DOWN): the task may be stored or not."""
        backend = self.connected
        async with self._turns:
            await backend.enqueue_task(task)

    async def until_done(self, call: Callable[[QueueBackend], Awaitable[T]]) -> T:
        """Repeat a call until the backend has done it, whatever is wrong with that."""
        outage = Outage(log, self.name)
        while True:
            try:
                done = await call(self.connected)
            except Unavailable as error:
                await outage.wait(error)
            except Exception as error:  # what is enqueued is safe, and waits for a remedy
                log.exception("%s fails", self.name)
                await outage.wait(error)
            else:
                outage.end()
                return done

    async def close(self) -> None:
        """Give back what was dequeued, and disconnect."""
        backend, self._backend = self._backend, None
        if backend is not None:
            try:
                await backend.close()
            except SlateMQError as error:
                log.info("%s was lost before it was closed: %s", self.name, error)


def _digest_of(section: Any) -> str:
    """Of the address and the names of a backend, without the login."""
    facts = {
        name: _without_login(getattr(section, name))
        for name in (*_ADDRESSES, *_PREFIXES)
        if name in section.__struct_fields__
    }
    return hashlib.sha256(msgspec.json.encode(facts)).hexdigest()[:8]


def _without_login(value: Any) -> Any:
    """A URL without its login, and without its query but for the database.

    A query may have the login, too, and says how to connect, not where.
    """
    if not isinstance(value, str) or "://" not in value:
        return value
    url = urlsplit(value)
    databases = parse_qs(url.query).get("db", [])
    return "/".join([f"{url.scheme}://{url.netloc.rpartition('@')[2]}{url.path}", *databases])
