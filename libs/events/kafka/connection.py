"""The producer and the topics, and what Kafka's errors mean."""

from __future__ import annotations

import asyncio
import logging
import ssl
import struct
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Set
from contextlib import asynccontextmanager, contextmanager
from typing import Any, Final

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition, errors
from aiokafka.admin import AIOKafkaAdminClient, NewTopic, RecordsToDelete
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType

from libs.events.cancellations import keeping_cancellations
from libs.events.refusals import TooLarge
from libs.events.settings import KafkaSettings
from libs.events.tasks import cut_error
from libs.events.tls_faults import find_tls_fault
from slatemq._rpc.endpoints import addresses_of
from slatemq.errors import FailedPrecondition, InvalidArgument, Unavailable

log = logging.getLogger(__name__)

OPERATION_S = 15.0
"""How long one call may take, connecting included."""

REQUEST_MS = 5_000
JOIN_S = 60.0
"""How long joining a group may take: the others are waited for."""

JOIN_REQUEST_MS = 45_000

SESSION_MS = 10_000
"""How long after a consumer's last sign of life others take its partitions, in ms."""

ERROR: Final = "error"
"""The header that says why a record is a dead letter."""

CLEANUP: Final = "cleanup.policy"
COMPACTED: Final = {CLEANUP: "compact"}
KEPT: Final = {CLEANUP: "delete", "retention.ms": "-1", "retention.bytes": "-1"}
"""Topics whose records brokers never remove by themselves: by default they do after a week."""

_HELLO: Final = struct.pack(">ihhih", 10, 18, 0, 0, -1)
"""An ApiVersions request, version 0, without a client ID: its length comes first."""

_REFUSED_SETTINGS: Final[Mapping[type[Exception], str]] = {
    errors.InvalidReplicationFactorError: "replication_factor",
    errors.InvalidPartitionsError: "partitions",
    errors.InvalidTopicError: "topic_prefix",
    errors.TopicAuthorizationFailedError: "topic_prefix",
}

_DOWN = (
    errors.KafkaConnectionError,
    errors.KafkaTimeoutError,
    errors.NoBrokersAvailable,
    errors.NodeNotReadyError,
    errors.StaleMetadata,
    errors.GroupCoordinatorNotAvailableError,
    errors.UnknownTopicOrPartitionError,
    OSError,
    asyncio.TimeoutError,
)


@contextmanager
def translated() -> Iterator[None]:
    """Raises Unavailable for brokers that are down, FailedPrecondition for what they refuse.

    Of these TooLarge for what has too many bytes.
    """
    try:
        with keeping_cancellations():
            yield
    except (errors.KafkaError, *_DOWN) as error:
        what = str(error) or type(error).__name__
        if isinstance(error, _DOWN) or error.retriable:
            raise Unavailable(f"Kafka cannot be reached: {what}", reason="BACKEND_DOWN") from error
        if isinstance(error, errors.MessageSizeTooLargeError | errors.RecordListTooLargeError):
            raise TooLarge(f"Kafka refuses it: {what}") from error
        raise FailedPrecondition("REFUSED", f"Kafka refuses it: {what}") from error


def tls_context(settings: KafkaSettings) -> ssl.SSLContext | None:
    """What brokers are reached with; None: without TLS.

    Raises:
        InvalidArgument: A file is missing, or cannot be read; names the key.
    """
    if not settings.tls_ca:
        for key in ("tls_cert", "tls_key"):
            if getattr(settings, key):
                raise InvalidArgument(f"queue.kafka.{key}", "has no effect without tls_ca")
        return None
    if bool(settings.tls_cert) != bool(settings.tls_key):
        absent = "tls_key" if settings.tls_cert else "tls_cert"
        raise InvalidArgument(f"queue.kafka.{absent}", "needed: a certificate and its key")
    key = "tls_ca"
    try:
        context = ssl.create_default_context(cafile=settings.tls_ca)
        if settings.tls_cert:
            key = "tls_cert"
            context.load_cert_chain(settings.tls_cert, settings.tls_key)
    except OSError as error:  # ssl.SSLError, too
        raise InvalidArgument(f"queue.kafka.{key}", f"cannot be used: {error}") from error
    return context


class Connection:
    """The producer, and the topics that are known to exist.

    Attributes:
        ends: The offset behind the newest record that is known, by partition.
    """

    def __init__(self, settings: KafkaSettings) -> None:
        self.settings = settings
        self.ends: dict[TopicPartition, int] = {}
        # What each connection begins with.
        self._reach: dict[str, Any] = {"bootstrap_servers": list(settings.brokers)}
        self._producer: Any = None
        self._topics: set[str] = set()
        self._changing = asyncio.Lock()
        self._replacing = asyncio.Lock()

    async def open(self) -> None:
        """Connect. Raises InvalidArgument for a wrong setting, and aiokafka's errors."""
        addresses_of(self.settings.brokers, "queue.kafka.brokers")
        context = tls_context(self.settings)
        if context is not None:
            self._reach |= {"security_protocol": "SSL", "ssl_context": context}
        self._producer = await self._start_producer()

    async def _start_producer(self) -> Any:
        producer = AIOKafkaProducer(
            **self._reach,
            acks=self.settings.acks,
            request_timeout_ms=REQUEST_MS,
        )
        try:
            async with asyncio.timeout(OPERATION_S):
                await producer.start()
        except BaseException:
            await producer.stop()
            raise
        return producer

    async def check_tls(self) -> None:
        """Raise InvalidArgument where TLS keeps a broker from answering, which is not down."""
        context = tls_context(self.settings)
        for address in addresses_of(self.settings.brokers):
            host, _, port = address.rpartition(":")
            fault = await find_tls_fault(host.strip("[]"), int(port), context, _HELLO)
            if fault is not None:
                key = "tls_cert" if fault.is_own else "tls_ca"
                raise InvalidArgument(f"queue.kafka.{key}", fault.description)

    async def close(self) -> None:
        """Stop the producer; what was sent is waited for."""
        if self._producer is not None:
            async with asyncio.timeout(OPERATION_S):
                await self._producer.stop()

    async def ping(self) -> None:
        """Return once a broker has answered."""
        if self._producer is None or not await self._producer.client.force_metadata_update():
            raise Unavailable("no broker of Kafka answers", reason="BACKEND_DOWN")

    async def send(self, records: Iterable[dict[str, Any]]) -> None:
        """Send records in order, each as the arguments of the producer; waits for all."""
        kept = [*records]
        with self._noting_lost({record["topic"] for record in kept}):
            producer = self._producer
            try:
                await self._send(producer, kept)
            except errors.KafkaError as error:
                if type(error) is not errors.KafkaError:
                    raise
                # aiokafka's own: its sender has ended, and each call of it raises this, for ever.
                await self._replace(producer)
                raise errors.KafkaConnectionError(f"sending has ended: {error}") from error

    async def _replace(self, producer: Any) -> None:
        async with self._replacing:
            if self._producer is producer:  # else another call has done it
                self._producer = await self._start_producer()
                await producer.stop()

    async def _send(self, producer: Any, records: Iterable[dict[str, Any]]) -> None:
        async with asyncio.timeout(OPERATION_S):
            sent = [await producer.send(**record) for record in records]
            for one in await asyncio.gather(*sent):
                if one is not None:  # with acks=0 no broker answers
                    place, end = one.topic_partition, one.offset + 1
                    self.ends[place] = max(self.ends.get(place, 0), end)

    async def send_strange(
        self, topic: str, value: bytes | None, headers: Mapping[str, bytes], error: str
    ) -> None:
        """Send what cannot be used as it is, with the error; as much of it as brokers take."""
        kept, why = value, cut_error(error)
        while True:
            named = [*headers.items(), (ERROR, why.encode())]
            try:
                await self.send([{"topic": topic, "value": kept, "headers": named}])
            except errors.MessageSizeTooLargeError:
                if not (value and kept):
                    raise
                kept = kept[: len(kept) // 2]
                why = cut_error(f"the first {len(kept)} of {len(value)} bytes: {error}")
            else:
                return

    async def partitions(self, topic: str) -> list[int]:
        with self._noting_lost({topic}):
            return sorted(await self._producer.partitions_for(topic))

    @contextmanager
    def _noting_lost(self, topics: Set[str]) -> Iterator[None]:
        """Note that brokers lack some of these topics: the next `ensure_topics` creates those."""
        try:
            yield
        except errors.UnknownTopicOrPartitionError:
            self._topics -= topics
            self.ends = {one: end for one, end in self.ends.items() if one.topic not in topics}
            raise

    def consumer(self, group: str, **options: Any) -> Any:
        """A consumer that commits by hand and begins at the beginning; not started."""
        return AIOKafkaConsumer(
            **self._reach,
            group_id=group,
            enable_auto_commit=False,
            auto_offset_reset="earliest",
            session_timeout_ms=SESSION_MS,
            heartbeat_interval_ms=SESSION_MS // 4,
            request_timeout_ms=JOIN_REQUEST_MS,
            metadata_max_age_ms=REQUEST_MS,
            **options,
        )

    async def ensure_topics(
        self, names: Iterable[str], configuration: Mapping[str, str] | None = None
    ) -> None:
        """Create the topics that are missing. Raises InvalidArgument for refused settings."""
        wanted = [*names]
        if self._topics.issuperset(wanted):
            return
        async with self._changing:
            missing = [name for name in wanted if name not in self._topics]
            if not missing:
                return
            async with self._admin() as admin:
                existing = set(await admin.list_topics())
                found = existing.intersection(missing)
                if configuration is KEPT:
                    await _warn_of_retention(admin, found)
                else:
                    policy = "compact" if configuration is COMPACTED else "delete"
                    await _warn_of_cleanup(admin, found, policy)
                new = [name for name in missing if name not in existing]
                await self._create(admin, new, configuration or {})
            self._topics.update(missing)

    async def delete_records(self, before: Mapping[Any, int]) -> None:
        """Delete what is before these offsets of partitions."""
        async with self._admin() as admin:
            await admin.delete_records(
                {one: RecordsToDelete(before_offset=at) for one, at in before.items() if at}
            )

    @asynccontextmanager
    async def _admin(self) -> AsyncIterator[Any]:
        admin = AIOKafkaAdminClient(**self._reach, request_timeout_ms=REQUEST_MS)
        try:
            async with asyncio.timeout(OPERATION_S):
                await admin.start()
                yield admin
        finally:
            await admin.close()

    async def _create(self, admin: Any, names: list[str], configuration: Mapping[str, str]) -> None:
        wanted = [
            NewTopic(
                name=name,
                num_partitions=self.settings.partitions,
                replication_factor=self.settings.replication_factor,
                topic_configs=dict(configuration),
            )
            for name in names
        ]
        if not wanted:
            return
        answer = await admin.create_topics(wanted)
        for topic, code, *_ in answer.topic_errors:
            kind = errors.for_code(code)
            if kind in _REFUSED_SETTINGS:
                key = _REFUSED_SETTINGS[kind]
                refused = getattr(self.settings, key)
                why = kind.description or kind.__name__
                raise InvalidArgument(
                    f"queue.kafka.{key}", f"the brokers refuse {refused} for {topic}: {why}"
                )
            if kind not in (errors.NoError, errors.TopicAlreadyExistsError):
                raise kind(topic)


async def _configurations(admin: Any, names: Iterable[str]) -> dict[str, dict[str, str]]:
    """What brokers have set for existing topics, by topic."""
    resources = [ConfigResource(ConfigResourceType.TOPIC, name) for name in sorted(names)]
    if not resources:
        return {}
    return {
        name: {entry[0]: entry[1] for entry in entries}
        for answer in await admin.describe_configs(resources)
        for _, _, _, name, entries in answer.resources
    }


async def _warn_of_retention(admin: Any, names: Iterable[str]) -> None:
    for name, kept in (await _configurations(admin, names)).items():
        for key, wanted in KEPT.items():
            if kept.get(key, wanted) != wanted:
                log.warning(
                    "topic %s has %s=%s, and may lose tasks that wait: set %s",
                    *(name, key, kept[key], wanted),
                )


async def _warn_of_cleanup(admin: Any, names: Iterable[str], wanted: str) -> None:
    """Warn where topics were created as `queue.kafka.compacted` was another one."""
    loss = "brokers keep only the newest event of each bucket, queue or header"
    effect = loss if wanted == "delete" else "nothing is compacted"
    for name, kept in (await _configurations(admin, names)).items():
        policy = kept.get(CLEANUP, wanted)
        if ("compact" in policy) != (wanted == "compact"):
            log.warning(
                "topic %s has %s=%s, so %s, but queue.kafka.compacted expects %s: change the "
                "topic or the setting",
                *(name, CLEANUP, policy, effect, wanted),
            )
