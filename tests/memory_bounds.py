"""What each container may take by README's table of limits and operate.md, by default settings."""

from __future__ import annotations

import re
from typing import Final

from libs.serving.limits import (
    ARRIVING_AT_ONCE,
    PAYLOAD_BYTES_MAX,
    REQUESTS_BYTES_MAX,
    message_bytes_max,
)
from services.broker.config import BrokerConfig
from services.console import guard, payloads
from services.ingest.config import IngestConfig
from services.ingest.read.blob_reads import BYTES_MAX
from services.janitor.config import JanitorConfig
from services.router.config import RouterConfig
from services.scaler.service import CALLS_MAX

MIB: Final = 1 << 20
UNITS: Final = {"m": MIB, "Mi": MIB, "g": 1 << 30, "Gi": 1 << 30}

REQUESTS: Final = 1 << 30
"""Of clients that all send the largest payloads at the same time."""

DATABASE: Final = (64 + 2 * 16) * MIB
"""Data on its way to the store, and two caches."""

LEASE: Final = 480
PROCESS: Final = 96 * MIB
"""The interpreter with what a service loads, and serves nothing yet."""

CALL: Final = 20 << 10
"""What a call costs that waits."""

WORK_FACTOR: Final = 4
"""How many times its bytes a request takes in work."""

JOB_CORES: Final = 2
"""Of the janitor's jobs in a container, each with a Python process."""

JOB_DRIVER: Final = 117 * 1_000_000
JOB_PYTHON: Final = 120 * 1_000_000
JOB_CODE: Final = 240 * MIB
"""The most that Java keeps of compiled code. What else it takes beside its heap is known by no
measurement: the rest of the limit is for that."""


def _ingest() -> int:
    config = IngestConfig(root="memory:///")
    # Copies being sent are as much again as the answers; log entries take three times their bytes.
    own = 2 * config.answers_bytes_max + config.uncommitted_bytes_max
    own += BYTES_MAX + config.payload_cache_bytes + 3 * config.log_cache_bytes
    tasks = (128 + 64) * MIB
    return own + tasks + DATABASE


def _broker() -> int:
    config = BrokerConfig(root="memory:///")
    own = config.lane_bytes_max + config.delivery_bytes_max + config.uncommitted_bytes_max
    own += config.payload_cache_bytes + LEASE * config.in_flight_max
    return own + DATABASE


def _router() -> int:
    return RouterConfig(root="memory:///").buffers_bytes_max


def _janitor() -> int:
    """While a job runs: Java, the driver of the job, and a Python process for each core."""
    heap = bytes_of(JanitorConfig(root="memory:///").spark_memory)
    return heap + JOB_CODE + JOB_DRIVER + JOB_CORES * JOB_PYTHON


def _scaler() -> int:
    """Its requests have no payloads; each trigger may keep a stream."""
    arriving = ARRIVING_AT_ONCE * message_bytes_max(0)
    return arriving + WORK_FACTOR * REQUESTS_BYTES_MAX + CALL * CALLS_MAX


def _console() -> int:
    read = payloads.READS_MAX * payloads.READ_COPIES + payloads.DOWNLOADS_MAX
    # One character that is not Latin makes four bytes of each.
    return read * PAYLOAD_BYTES_MAX + guard.BODIES_MAX * 4 * guard.BODY_BYTES_MAX


def bytes_of(limit: str) -> int:
    """Of what a manifest writes, as `2Gi`, or a compose file or Spark, as `2g`."""
    number, unit = re.fullmatch(r"(\d+)(\w+)", limit).groups()  # type: ignore[union-attr]
    return int(number) * UNITS[unit]


STATED: Final = {
    "ingest": PROCESS + REQUESTS + _ingest(),
    "broker": PROCESS + REQUESTS + _broker(),
    "router": PROCESS + REQUESTS + _router(),
    "janitor": PROCESS + REQUESTS + _janitor(),
    "console": PROCESS + _console(),
    "scaler": PROCESS + _scaler(),
}
