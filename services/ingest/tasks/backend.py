"""The queue backend that holds this shard's write tasks, connected in the background.

Names there begin with `<prefix>.ingest-<shard>`: each shard has its own tasks, since only its
database records which of them are applied.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
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

log = logging.getLogger(__name__)

T = TypeVar("T")

BACKEND_DOWN: Final = "BACKEND_DOWN"

ENQUEUES_MAX: Final = 64
"""Tasks enqueued at the same time: some client libraries open a connection for each."""

FIRST_TRY_S: Final = 1.0

PREFETCH_COUNT: Final = 100
"""Tasks to prefetch at least, so that they can share commits."""

GATHER_MS: Final = 100
"""How long tasks gather in `async` mode, to share a read, a commit and a completion: publishes
wait behind each of these, in the backend and on the disk."""

COMMIT_GATHER_MS: Final = 20
"""How long a commit gathers in `async` mode: as long as it takes to begin the tasks of one read.
No caller waits for it, and each one that is made delays publishes on the same disk."""

_PREFIXES: Final = ("stream_prefix", "queue_prefix", "topic_prefix")
"""The settings that names begin with; each backend has one of them."""

_ADDRESSES: Final = ("url", "endpoint", "brokers")
"""The settings that say where a backend is; each backend has one of them."""


class TaskBackend:
    """One shard's connection.

    Attributes:
        name: Of the backend, as in the settings.
        max_retries: How many failed attempts of a task are tried again.
        retry_delay_ms: How long a failed attempt waits.
        section: Its settings, with the names of the shard.
        place: Names this backend, address and prefix; another one of these has another place.
    """

    def __init__(self, settings: QueueSettings, shard: int, meter: Meter) -> None:
        self._meter = meter
        self.name = settings.backend
        section = getattr(settings, settings.backend)
        self.max_retries: int = section.max_retries
        self.retry_delay_ms: int = section.retry_delay_ms
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
        self.section = msgspec.structs.replace(section, **own)
        self.place = f"{self.name}-{_digest_of(self.section)}"
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
                await backend.connect(self.section)
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
        """Wait until it is connected or known to be down, for a second at most.

        Otherwise the first publishes would be refused while it connects. The wait is short since
        the backend may be this very instance, which answers only once this process serves.
        """
        try:
            async with asyncio.timeout(FIRST_TRY_S):
                await self._tried.wait()
        except TimeoutError:
            log.info("%s has not answered yet", self.name)

    async def watch(self) -> None:
        """Keep its gauges up to date until cancelled."""
        if self._watch is not None:
            await self._watch.watch()

    async def health(self) -> QueueHealth:
        """Its state, for `GET /health`; never raises."""
        if self._backend is None or self._watch is None:
            return QueueHealth(self.name, False)
        return await self._watch.health()

    @property
    def was_connected(self) -> bool:
        """Whether it answered when it was last looked at."""
        return self._watch is not None and self._watch.was_connected

    @property
    def refusal(self) -> str:
        """As of the backend."""
        return "" if self._backend is None else self._backend.refusal

    @property
    def message_bytes_max(self) -> float:
        """How large a task it takes, as far as that is known: nothing is before it is connected."""
        return math.inf if self._backend is None else self._backend.message_bytes_max

    @property
    def connected(self) -> QueueBackend:
        """The backend. Raises Unavailable (BACKEND_DOWN) before it is connected."""
        if self._backend is None:
            raise Unavailable(f"{self.name} cannot be reached yet", reason=BACKEND_DOWN)
        return self._backend

    async def enqueue(self, task: WriteTask) -> None:
        """Store a task. Raises TooLarge, or Unavailable (BACKEND_DOWN): perhaps it is stored."""
        backend = self.connected
        async with self._turns:
            await backend.enqueue_task(task)

    async def until_done(self, call: Callable[[QueueBackend], Awaitable[T]]) -> T:
        """Repeat a call until it succeeds, through any error."""
        outage = Outage(log, self.name)
        while True:
            try:
                done = await call(self.connected)
            except Unavailable as error:
                await outage.wait(error)
            except Exception as error:  # what is enqueued is safe until an operator helps
                log.exception("%s fails", self.name)
                await outage.wait(error)
            else:
                outage.end()
                return done

    async def close(self) -> None:
        """Disconnect; tasks that were dequeued and not finished come again."""
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
