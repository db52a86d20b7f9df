"""The `queue` section, key for key."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from libs.events.rabbitmq.address import Address
from libs.events.redis.connection import open_client
from libs.events.settings import QueueSettings, RedisSettings, keys, read_settings, variable_of
from slatemq.errors import InvalidArgument
from tests.documented_queue_settings import PAGE, page

DESIGNED = """\
queue:
  enabled: false
  backend: slatemq
  consistency: write-through

  redis:
    url: redis://localhost:6379
    stream_prefix: slatemq
    consumer_group: slatemq-workers
    max_retries: 3
    retry_delay_ms: 1000

  rabbitmq:
    url: amqp://guest:guest@localhost:5672/
    exchange: slatemq
    exchange_type: topic
    queue_prefix: slatemq
    durable: true
    prefetch_count: 10
    max_retries: 3
    retry_delay_ms: 1000

  kafka:
    brokers:
      - localhost:9092
    topic_prefix: slatemq
    consumer_group: slatemq-workers
    acks: all
    max_retries: 3
    retry_delay_ms: 1000
    partitions: 6
    replication_factor: 1
"""
"""The file of the BleepStore design, with the name of this product, and its default backend."""

WHOLE = """\
queue:
  enabled: true
  backend: rabbitmq
  consistency: sync

  redis:
    url: redis://cache:6379
    stream_prefix: shop
    consumer_group: shop-workers
    max_retries: 5
    retry_delay_ms: 250

  rabbitmq:
    url: amqp://guest:guest@mq:5672/
    exchange: shop
    exchange_type: direct
    queue_prefix: shop
    durable: false
    prefetch_count: 20
    max_retries: 4
    retry_delay_ms: 500

  kafka:
    brokers:
      - one:9092
      - two:9092
    topic_prefix: shop
    consumer_group: shop-workers
    acks: 1
    max_retries: 2
    retry_delay_ms: 100
    partitions: 12
    replication_factor: 3
"""


def settings_of(folder: Path, text: str, **environment: str) -> QueueSettings:
    file = folder / "slatemq.yaml"
    file.write_text(text)
    return read_settings(file, environment)


def test_without_a_file_the_defaults_are_those_of_the_design(tmp_path: Path) -> None:
    assert read_settings(None, {}) == QueueSettings() == settings_of(tmp_path, DESIGNED)


def test_each_key_of_a_file_is_read(tmp_path: Path) -> None:
    queue = settings_of(tmp_path, WHOLE)
    assert (queue.enabled, queue.backend, queue.consistency) == (True, "rabbitmq", "sync")
    assert (queue.redis.url, queue.redis.stream_prefix) == ("redis://cache:6379", "shop")
    assert (queue.redis.max_retries, queue.redis.retry_delay_ms) == (5, 250)
    assert (queue.rabbitmq.exchange_type, queue.rabbitmq.durable) == ("direct", False)
    assert (queue.rabbitmq.prefetch_count, queue.rabbitmq.max_retries) == (20, 4)
    assert queue.kafka.brokers == ("one:9092", "two:9092")
    assert (queue.kafka.acks, queue.kafka.partitions) == (1, 12)
    assert queue.kafka.replication_factor == 3


def test_the_environment_goes_before_the_file(tmp_path: Path) -> None:
    queue = settings_of(
        tmp_path,
        WHOLE,
        SLATEMQ_QUEUE_BACKEND="kafka",
        SLATEMQ_QUEUE_KAFKA_BROKERS="a:1, b:2",
        SLATEMQ_QUEUE_KAFKA_ACKS="all",
        SLATEMQ_QUEUE_RABBITMQ_DURABLE="true",
        SLATEMQ_QUEUE_REDIS_URL="redis://127.0.0.1:1",
    )
    assert queue.backend == "kafka"
    assert queue.kafka.brokers == ("a:1", "b:2")
    assert queue.kafka.acks == "all"
    assert queue.rabbitmq.durable
    assert queue.redis.url == "redis://127.0.0.1:1"


@pytest.mark.parametrize(
    "text",
    [
        "queue:\n  redis: &a {max_retries: 4}\n  kafka: *a\n",
        "queue:\n  redis: &a {max_retries: 4}\n  kafka: {<<: *a}\n",
        "queue: &a\n  redis: &b {max_retries: 4}\n  kafka: *b\n  rabbitmq: *b\n",
    ],
)
def test_a_variable_changes_its_own_section_alone(tmp_path: Path, text: str) -> None:
    one = settings_of(tmp_path, text, SLATEMQ_QUEUE_REDIS_MAX_RETRIES="7")
    assert (one.redis.max_retries, one.kafka.max_retries) == (7, 4)
    other = settings_of(tmp_path, text, SLATEMQ_QUEUE_KAFKA_MAX_RETRIES="7")
    assert (other.redis.max_retries, other.kafka.max_retries) == (4, 7)


@pytest.mark.parametrize("text", ["10", "010", " 10 ", "+10"])
def test_a_number_in_the_environment_is_decimal(text: str) -> None:
    assert read_settings(None, {"SLATEMQ_QUEUE_REDIS_MAX_RETRIES": text}).redis.max_retries == 10


@pytest.mark.parametrize("text", ["16:40", "0x10", "1e3", "true", ""])
def test_another_form_of_a_number_in_the_environment_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgument, match="SLATEMQ_QUEUE_REDIS_MAX_RETRIES") as refused:
        read_settings(None, {"SLATEMQ_QUEUE_REDIS_MAX_RETRIES": text})
    assert refused.value.field == "queue.redis.max_retries"


@pytest.mark.parametrize("text", ["2024", "true"])
def test_a_name_in_the_environment_may_look_like_a_number_or_a_boolean(text: str) -> None:
    names = [key for key in keys() if key.endswith(("_prefix", "_group", ".exchange"))]
    queue = read_settings(None, {variable_of(key): text for key in names})
    for key in names:
        _, section, name = key.split(".")
        assert getattr(getattr(queue, section), name) == text


def test_each_key_has_a_variable_of_its_own() -> None:
    variables = [variable_of(key) for key in keys()]
    assert len(set(variables)) == len(variables)
    assert "SLATEMQ_QUEUE_RABBITMQ_PREFETCH_COUNT" in variables


@pytest.mark.parametrize(
    ("text", "field", "says"),
    [
        ("queue:\n  redis:\n    strem_prefix: x\n", "queue.redis.strem_prefix", "line 3"),
        ("queue:\n  redis:\n    strem_prefix: x\n", "queue.redis.strem_prefix", "stream_prefix?"),
        (
            "queue:\n  redis:\n    prefx: x\n",
            "queue.redis.prefx",
            "did you mean queue.redis.stream_prefix?",
        ),
        ("queue:\n  rediss: {}\n", "queue.rediss", "did you mean queue.redis?"),
        ("queue:\n  enabled: maybe\n", "queue.enabled", "line 2"),
        ("queue:\n  backend: mongo\n", "queue.backend", "redis, rabbitmq"),
        ("queue:\n  consistency: eventual\n", "queue.consistency", "write-through, sync, async"),
        ("queue:\n  redis:\n    max_retries: -1\n", "queue.redis.max_retries", "line 3"),
        ("queue:\n  redis:\n    max_retries: 1.5\n", "queue.redis.max_retries", "line 3"),
        (
            "queue:\n  slatemq:\n    retry_delay_ms: 43200001\n",
            "queue.slatemq.retry_delay_ms",
            "<= 43200000",
        ),
        ("queue:\n  kafka:\n    brokers: []\n", "queue.kafka.brokers", "line 3"),
        (
            "queue:\n  kafka:\n    compacted: [queue.created, queue.updatd]\n",
            "queue.kafka.compacted",
            "line 3",
        ),
        (
            "queue:\n  kafka:\n    compacted: [queue.updatd]\n",
            "queue.kafka.compacted",
            "did you mean queue.updated?",
        ),
        (
            "queue:\n  kafka:\n    compacted: [queue.updated, janitor.run.finished]\n",
            "queue.kafka.compacted",
            "janitor.run.finished has no subject",
        ),
        ("queue:\n  kafka:\n    acks: 2\n", "queue.kafka.acks", "all, 1, 0"),
        (
            "queue:\n  redis:\n    stream_prefix: |\n      shop\n",
            "queue.redis.stream_prefix",
            "line 3",
        ),
        ("queue: on\n", "queue", "line 1"),
        ("queue:\n  on: true\n", "queue.on", "line 2"),
        ("queue:\n  yes: 1\n", "queue.yes", "in quotes"),
        ("queue:\n  null: 1\n", "queue.null", "line 2"),
        ("queue:\n  ~: 1\n", "queue.~", "line 2"),
        ("queue:\n  redis:\n    1: x\n", "queue.redis.1", "line 3"),
        ("queue:\n  redis:\n    0x1F: x\n", "queue.redis.0x1F", "line 3"),
        ("queue: {}\n1.50: x\n", "1.50", "line 2"),
        ("queue: {}\n2026-02-22: x\n", "2026-02-22", "line 2"),
        ("queue:\n  'on': true\n", "queue.on", "is not a setting"),
        ("qeue: {}\n", "qeue", "line 1"),
        ("qeue: {}\n", "qeue", "did you mean queue?"),
        ("queue: {}\nqueue: {}\n", "queue", "lines 1 and 2"),
        ("- queue\n", "config", "mapping"),
        ("queue: [\n", "config", "not YAML"),
    ],
)
def test_what_is_wrong_is_named_with_its_key_and_place(
    tmp_path: Path, text: str, field: str, says: str
) -> None:
    with pytest.raises(InvalidArgument) as refused:
        settings_of(tmp_path, text)
    assert refused.value.field == field
    assert says in refused.value.description


def test_a_wrong_variable_is_named() -> None:
    with pytest.raises(InvalidArgument, match="set by SLATEMQ_QUEUE_REDIS_MAX_RETRIES"):
        read_settings(None, {"SLATEMQ_QUEUE_REDIS_MAX_RETRIES": "many"})


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"missing\.yaml"):
        read_settings(tmp_path / "missing.yaml", {})


def test_the_page_of_settings_is_what_the_classes_say_and_its_file_holds_every_default(
    tmp_path: Path,
) -> None:
    assert PAGE.read_text() == page(), "run: python -m tests.documented_queue_settings"
    (text,) = re.findall(r"```yaml\n(.*?)```", page(), re.DOTALL)
    assert settings_of(tmp_path, text) == QueueSettings()
    assert text.count(":\n") + len(list(keys())) == len(text.split("\n")) - 1 - text.count("\n\n")
    assert all(f"| `{key}` | `{variable_of(key)}` |" in page() for key in keys())


@pytest.mark.parametrize("password", ["se/cret", "se#cret", "se?cret", "[se]cret"])
@pytest.mark.parametrize(
    ("read", "url", "field"),
    [
        (lambda url: open_client(RedisSettings(url=url)), "redis://:{}@HOST", "queue.redis.url"),
        (Address.of, "amqp://guest:{}@HOST/", "queue.rabbitmq.url"),
    ],
    ids=["redis", "rabbitmq"],
)
def test_a_url_that_cannot_be_parsed_is_refused_without_its_password(
    read: Callable[[str], object], url: str, field: str, password: str
) -> None:
    with pytest.raises(InvalidArgument) as refused:
        read(url.format(password))

    assert refused.value.field == field
    assert "cret" not in str(refused.value)
    assert "'se" not in str(refused.value)
