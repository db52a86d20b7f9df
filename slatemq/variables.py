"""The environment variables of SlateMQ, and a warning about those that it does not know.

Every process knows the variables of all others, so that they can share one environment file.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

PREFIX = "SLATEMQ_"

LIKENESS = 0.85
"""Of 1: catches one wrong character in a name of ten, but not names of two settings."""

SERVICES = """
    ACCESS_ISSUERS ACCESS_POLICY ACCESS_TOKENS ADVERTISED_ADDRESS ANSWERS_BYTES_MAX BACKUPS_KEPT
    BACKUP_ROOT BACKUP_SCHEDULE BLOB_UPLOADS_MAX BUFFERS_BYTES_MAX BUFFER_BYTES BUFFER_MESSAGES
    CLIENT_CERTIFICATES COMMIT_INTERVAL_MS CONCURRENT_CALLS_MAX CONFIG CONSOLE_HOSTS
    DEAD_LETTERS_OLDER_THAN_S DEAD_LETTERS_SCHEDULE DEDUPE_CACHE_KEYS DEDUPE_WINDOW_S
    DELIVERY_BYTES_MAX DONE_SCHEDULE DRAIN_MS EVENTS_HOLD_S FENCED_EXIT_CODE HEARTBEAT_MS HOLD_MS
    HOST HTTP_PORT ID_BLOCK_SIZE INGEST_SHARDS INSECURE IN_FLIGHT_MAX KEDA_IDENTITY LANE_BYTES_MAX
    LOG_CACHE_BYTES LOG_FORMAT LOG_LEVEL MAX_MESSAGE_DELAY_MS OTLP_ENDPOINT OUTBOX_BYTES_MAX
    OUTBOX_ROWS_MAX OWNER_NAME PARENT_PID PAYLOAD_BYTES_MAX PAYLOAD_CACHE_BYTES PEER_ADDRESS
    PEER_PORT PORT PURGE_GRACE_S QUEUE_CHANGES_PER_S READY_FILE REDRIVES_KEPT REDRIVE_RETENTION_S
    REPLAY_WINDOW_S REPORTS_KEPT REPORT_SCHEDULE REQUEST_ID_WINDOW_S RETENTION_S RETENTION_SCHEDULE
    ROOT RUNS_KEPT RUN_RETENTION_S S3_EVENTS_TOKEN SCHEDULE_JITTER_S SERVICE_IDENTITY SESSION_S
    SHARD SLOW_STEP_MS SPARK_MASTER SPARK_MEMORY STORE_PRICES TAIL_STREAMS_MAX TLS_CA TLS_CERT
    TLS_CRL TLS_KEY TRACE_SAMPLE_PERCENT UNCOMMITTED_BYTES_MAX UNREFERENCED_SCHEDULE
    WAITING_CLAIMS_MAX
"""
"""The settings of ingest, router, broker, janitor, console and scaler."""

EVENT_QUEUES = """
    QUEUE_ACTIVEMQ_CONSUMER_GROUP QUEUE_ACTIVEMQ_EVENTS_ADDRESS QUEUE_ACTIVEMQ_GROUP_ADDRESS
    QUEUE_ACTIVEMQ_MAX_RETRIES QUEUE_ACTIVEMQ_PREFETCH_COUNT QUEUE_ACTIVEMQ_QUEUE_ADDRESS
    QUEUE_ACTIVEMQ_QUEUE_PREFIX QUEUE_ACTIVEMQ_RETRY_DELAY_MS QUEUE_ACTIVEMQ_URL QUEUE_BACKEND
    QUEUE_CONSISTENCY QUEUE_ENABLED QUEUE_KAFKA_ACKS QUEUE_KAFKA_BROKERS QUEUE_KAFKA_COMPACTED
    QUEUE_KAFKA_CONSUMER_GROUP QUEUE_KAFKA_MAX_RETRIES QUEUE_KAFKA_PARTITIONS
    QUEUE_KAFKA_REPLICATION_FACTOR QUEUE_KAFKA_RETRY_DELAY_MS QUEUE_KAFKA_TLS_CA
    QUEUE_KAFKA_TLS_CERT QUEUE_KAFKA_TLS_KEY QUEUE_KAFKA_TOPIC_PREFIX QUEUE_RABBITMQ_DURABLE
    QUEUE_RABBITMQ_EXCHANGE QUEUE_RABBITMQ_EXCHANGE_TYPE QUEUE_RABBITMQ_MAX_RETRIES
    QUEUE_RABBITMQ_PREFETCH_COUNT QUEUE_RABBITMQ_QUEUE_PREFIX QUEUE_RABBITMQ_RETRY_DELAY_MS
    QUEUE_RABBITMQ_URL QUEUE_REDIS_CONSUMER_GROUP QUEUE_REDIS_MAX_RETRIES QUEUE_REDIS_RETRY_DELAY_MS
    QUEUE_REDIS_STREAM_PREFIX QUEUE_REDIS_TASK_STRUCTURE QUEUE_REDIS_URL
    QUEUE_SLATEMQ_CONSUMER_GROUP QUEUE_SLATEMQ_ENDPOINT QUEUE_SLATEMQ_MAX_RETRIES
    QUEUE_SLATEMQ_QUEUE_PREFIX QUEUE_SLATEMQ_RETRY_DELAY_MS
"""
"""The settings of event queues; see libs/events/settings.py."""

OTHERS = """
    ACCESS_VOLUME ATTEMPTS BROKER_PORT CA CERT CONSOLE_ACCESS_VOLUME CONSOLE_HTTP_PORT CONSOLE_PORT
    ENCRYPTION_KEYS ENDPOINT GRAFANA_PORT HEADERS INGEST_PORT JANITOR_PORT KAFKA_PORT KEY MESSAGE_ID
    PROFILE PROFILES PROMETHEUS_PORT QUEUE RABBITMQ_PORT REDIS_PORT ROUTER_PORT SERVER_NAME TLS
    TOKEN TOKEN_FILE
"""
"""Of the command, of the programs that `slatemq consume --exec` runs, and of docker-compose.yml."""

KNOWN = frozenset(
    PREFIX + name for text in (SERVICES, EVENT_QUEUES, OTHERS) for name in text.split()
)

_SERVICE_NAME = re.compile(
    r"SLATEMQ(_\w+)?_(SERVICE_(HOST|PORT(_\w+)?)|PORT_\d+_(TCP|UDP|SCTP)(_(ADDR|PORT|PROTO))?)"
)
_SERVICE_LINK = re.compile(r"(tcp|udp|sctp)://")


def is_service_link(name: str, value: str) -> bool:
    """Whether Kubernetes sets it in every pod, for a Service called `slatemq` or `slatemq-…`."""
    if name.endswith("_PORT") and _SERVICE_LINK.match(value):
        return True
    return _SERVICE_NAME.fullmatch(name) is not None


def unknown_variables(environ: Mapping[str, str]) -> str:
    """A sentence about the variables with our prefix that nothing reads; empty without any."""
    named = ", ".join(_unknown(environ))
    return f"unknown environment variables are ignored: {named}" if named else ""


def _unknown(environ: Mapping[str, str]) -> Iterator[str]:
    names = [
        name
        for name, value in environ.items()
        if name.startswith(PREFIX) and name not in KNOWN and not is_service_link(name, value)
    ]
    if not names:
        return
    from difflib import get_close_matches

    words = sorted(name.removeprefix(PREFIX) for name in KNOWN)
    for name in sorted(names):
        close = get_close_matches(name.removeprefix(PREFIX), words, 1, LIKENESS)
        yield f"{name} (did you mean {PREFIX}{close[0]}?)" if close else name
