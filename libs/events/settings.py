"""The settings of event queues: the `queue` section of a YAML file, and its overrides.

The keys are those of the BleepStore design, with `slatemq` for the name of the product; `slatemq`
and `activemq` are backends of ours beside its three. Each key can be overridden by the environment:
`queue.redis.url` by `SLATEMQ_QUEUE_REDIS_URL`. A list there is separated by commas.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, Final, Literal, get_args, get_origin, get_type_hints

import msgspec
import yaml

from libs.documents import NOT_YAML, Document
from slatemq.errors import InvalidArgument
from slatemq.models import DELAY_MS_MAX

Backend = Literal["slatemq", "redis", "rabbitmq", "activemq", "kafka"]
Consistency = Literal["write-through", "sync", "async", "fire-and-forget"]

Name = Annotated[str, msgspec.Meta(min_length=1, max_length=200, pattern=r"^[A-Za-z0-9._-]+\Z")]
Count = Annotated[int, msgspec.Meta(ge=1, le=1_000_000)]
Retries = Annotated[int, msgspec.Meta(ge=0, le=1_000)]
Milliseconds = Annotated[int, msgspec.Meta(ge=0, le=86_400_000)]
Url = Annotated[str, msgspec.Meta(min_length=1)]

ENVIRONMENT_PREFIX = "SLATEMQ_"

LIKENESS = 0.5
"""Of a name that is suggested for an unknown one, at least; `prefx` and `stream_prefix`: 0.56."""


_SUBJECTS: Final = {"queue", "bucket", "message_id"}
"""Members of an event's data one of which says what it is about, as `subject_of` does."""

NO_URL: Final = (
    "is not a URL with a port of at most 65535; in a name or password, write / as %2F, ? as %3F, "
    "# as %23, @ as %40 and % as %25"
)
"""What is wrong with one that cannot be parsed: the parser's words may quote its password."""


class _Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A part of the file; a key that it does not have is an error."""


class SlatemqSettings(_Section, frozen=True, kw_only=True):
    """SlateMQ itself as the backend.

    Attributes:
        endpoint: Address of any of its processes, `host:port`; commas between several.
        queue_prefix: What the names of its queues begin with.
        consumer_group: Consumers of one group share events and tasks.
        max_retries: How many failed attempts are tried again.
        retry_delay_ms: How long a failed attempt waits, in ms.
    """

    endpoint: Url = "127.0.0.1:7420"
    queue_prefix: Name = "slatemq"
    consumer_group: Name = "slatemq-workers"
    max_retries: Retries = 3
    retry_delay_ms: Annotated[int, msgspec.Meta(ge=0, le=DELAY_MS_MAX)] = 1000


class RedisSettings(_Section, frozen=True, kw_only=True):
    """Redis.

    Attributes:
        url: As redis-py takes it: `redis://[[user]:password@]host:port/database`.
        stream_prefix: What the names of its keys begin with.
        consumer_group: Consumers of one group share events and tasks.
        max_retries: How many failed attempts are tried again.
        retry_delay_ms: How long a failed attempt waits, in ms.
        task_structure: What holds tasks: `streams`, or `lists`.
    """

    url: Url = "redis://localhost:6379"
    stream_prefix: Name = "slatemq"
    consumer_group: Name = "slatemq-workers"
    max_retries: Retries = 3
    retry_delay_ms: Milliseconds = 1000
    task_structure: Literal["streams", "lists"] = "streams"


class RabbitmqSettings(_Section, frozen=True, kw_only=True):
    """RabbitMQ.

    Attributes:
        url: As aio-pika takes it: `amqp://user:password@host:port/vhost`.
        exchange: Where events are published. Instances may share it, and then their events.
        exchange_type: How it routes: by patterns of types, by types, or everything to every queue.
        queue_prefix: What the names of its queues and exchanges of dead letters begin with.
        durable: Whether exchanges and queues survive a restart of the server (quorum queues).
        prefetch_count: How many deliveries a consumer holds unacknowledged.
        max_retries: How many failed attempts are tried again.
        retry_delay_ms: How long a failed attempt waits, in ms.
    """

    url: Url = "amqp://guest:guest@localhost:5672/"
    exchange: Name = "slatemq"
    exchange_type: Literal["topic", "direct", "fanout"] = "topic"
    queue_prefix: Name = "slatemq"
    durable: bool = True
    prefetch_count: Annotated[int, msgspec.Meta(ge=1, le=65_535)] = 10
    max_retries: Retries = 3
    retry_delay_ms: Milliseconds = 1000


class ActivemqSettings(_Section, frozen=True, kw_only=True):
    """ActiveMQ, by AMQP 1.0.

    Attributes:
        url: `amqp://user:password@host:port`.
        queue_prefix: What the names of its queues and topics begin with.
        consumer_group: Consumers of one group share events and tasks.
        prefetch_count: How many deliveries a consumer holds unacknowledged.
        max_retries: How many failed attempts are tried again.
        retry_delay_ms: How long a failed attempt waits, in ms.
        queue_address: The form of a queue's address.
        events_address: The form of the address that events are sent to.
        group_address: The form of the address of a consumer group's events.
    """

    url: Url = "amqp://admin:admin@localhost:5672"
    queue_prefix: Name = "slatemq"
    consumer_group: Name = "slatemq-workers"
    prefetch_count: Annotated[int, msgspec.Meta(ge=1, le=65_535)] = 10
    max_retries: Retries = 3
    retry_delay_ms: Milliseconds = 1000
    queue_address: str = "queue://{name}"
    events_address: str = "topic://VirtualTopic.{name}"
    group_address: str = "queue://Consumer.{group}.VirtualTopic.{name}"


class KafkaSettings(_Section, frozen=True, kw_only=True):
    """Kafka.

    Attributes:
        brokers: Addresses to begin with, `host:port`.
        topic_prefix: What the names of its topics begin with.
        consumer_group: Consumers of one group share events and tasks.
        acks: How many replicas have an event before it counts as published.
        max_retries: How many failed attempts are tried again.
        retry_delay_ms: How long a failed attempt waits, in ms.
        partitions: Of each topic that is created.
        replication_factor: Of each topic that is created.
        compacted: Event types whose topics keep the newest event of each key only.
        tls_ca: File with the authorities that the brokers' certificates must be signed by, in PEM;
            empty connects without TLS.
        tls_cert: File with the certificate that proves who this is to the brokers, in PEM; empty:
            none.
        tls_key: File with its private key, in PEM.
    """

    brokers: Annotated[tuple[Url, ...], msgspec.Meta(min_length=1)] = ("localhost:9092",)
    topic_prefix: Name = "slatemq"
    consumer_group: Name = "slatemq-workers"
    acks: Literal["all", 1, 0] = "all"
    max_retries: Retries = 3
    retry_delay_ms: Milliseconds = 1000
    partitions: Count = 6
    replication_factor: Count = 1
    compacted: tuple[Name, ...] = ()
    tls_ca: str = ""
    tls_cert: str = ""
    tls_key: str = ""


class QueueSettings(_Section, frozen=True, kw_only=True):
    """Event queues.

    Attributes:
        enabled: Off, writes go straight to the store, and nothing of this is loaded.
        backend: The system that holds events and tasks.
        consistency: What an answered write means; see docs/how-to/event-queues.md.
    """

    enabled: bool = False
    backend: Backend = "slatemq"
    consistency: Consistency = "write-through"
    slatemq: SlatemqSettings = SlatemqSettings()
    redis: RedisSettings = RedisSettings()
    rabbitmq: RabbitmqSettings = RabbitmqSettings()
    activemq: ActivemqSettings = ActivemqSettings()
    kafka: KafkaSettings = KafkaSettings()


class _File(_Section, frozen=True, kw_only=True):
    queue: QueueSettings = QueueSettings()


def read_settings(file: Path | None, environment: Mapping[str, str]) -> QueueSettings:
    """The settings of a file, overridden by the environment.

    Raises InvalidArgument that names the key, and in a file the line; nothing is passed over.
    """
    if file is None:
        document = Document("", "", may_be_empty=True)
    else:
        document = Document.read(file, "config", may_be_empty=True)
    values = document.values
    overridden = dict(_overrides(environment))
    for path, value in overridden.items():
        _put(values, path.split("."), value)
    try:
        settings = msgspec.convert(values, _File).queue
    except msgspec.ValidationError as error:
        # As in "Expected `int`, got `str` - at `$.queue.redis.max_retries`".
        description, _, place = str(error).partition(" - at `$")
        path = place.strip("`.")
        raise _explained(path, description, document, overridden) from error
    if problem := _wrong_types(settings.kafka.compacted):
        raise _explained("queue.kafka.compacted", problem, document, overridden)
    return settings


def _wrong_types(types: Iterable[str]) -> str:
    """What is wrong with types to compact; loads their catalogue where there are any."""
    for one in types:
        catalogue = import_module("slatemq.events.catalogue").CATALOGUE
        if one not in catalogue:
            return f"{one} is not a type of events" + _suggestion(one, catalogue)
        if _SUBJECTS.isdisjoint(catalogue[one].__struct_fields__):
            return f"{one} has no subject: its topic would keep every event for ever, or one alone"
    return ""


def keys() -> Iterator[str]:
    """Every key of the file, as in `queue.redis.url`."""
    for name, kind in get_type_hints(QueueSettings).items():
        if isinstance(kind, type) and issubclass(kind, _Section):
            yield from (f"queue.{name}.{field}" for field in kind.__struct_fields__)
        else:
            yield f"queue.{name}"


def variable_of(key: str) -> str:
    """The environment variable that overrides a key."""
    return ENVIRONMENT_PREFIX + key.replace(".", "_").upper()


def _overrides(environment: Mapping[str, str]) -> Iterator[tuple[str, object]]:
    for key in keys():
        text = environment.get(variable_of(key))
        if text is not None:
            yield key, _value_of(key, text)


def _value_of(key: str, text: str) -> object:
    """What a variable says, by the type of its key: numbers as in the variables of other settings.

    Booleans are read as in YAML; its numbers may be octal (010), or of base 60 (16:40).
    """
    kind = _kind_of(key)
    if get_origin(kind) is tuple:
        return [part.strip() for part in text.split(",") if part.strip()]
    if kind is str:
        return text
    try:
        value = yaml.safe_load(text) if kind is bool else int(text)
    except (*NOT_YAML, ValueError):
        return text
    return value if isinstance(value, bool | int) else text


def _put(values: dict[str, Any], path: list[str], value: object) -> None:
    for name in path[:-1]:
        below = values.get(name, {})
        if not isinstance(below, dict):
            return  # the file has something else there, which is reported as that
        values[name] = dict(below)  # by an alias it may be another section, too
        values = values[name]
    values[path[-1]] = value


def _kind_of(path: str) -> Any:
    """The type of a key, without its bounds."""
    kind: Any = QueueSettings
    for name in path.split(".")[1:]:
        kind = get_type_hints(kind)[name]
    return kind


def _suggestion(name: str, names: Iterable[str], section: str = "") -> str:
    """The end of an error about an unknown name: the one that is the most like it, or nothing."""
    close = difflib.get_close_matches(name, sorted(names), 1, LIKENESS)
    return f"; did you mean {section}{close[0]}?" if close else ""


def _explained(
    path: str, description: str, document: Document, overridden: Mapping[str, object]
) -> InvalidArgument:
    """The error at a key: where it was set, and what it may be."""
    unknown = description.partition("unknown field `")[2].rstrip("`")
    if unknown:
        section = f"{path}." if path else ""
        path = f"{section}{unknown}"
        names = {
            key.removeprefix(section).partition(".")[0] for key in keys() if key.startswith(section)
        }
        description = "is not a setting" + _suggestion(unknown, names, section)
    if description.startswith("Invalid enum value"):
        description = f"must be one of {', '.join(map(str, get_args(_kind_of(path))))}"
    place = path.partition("[")[0]
    if place in overridden:
        return InvalidArgument(path, f"{description} (set by {variable_of(place)})")
    return document.error(path, description)
