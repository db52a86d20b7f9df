"""What each process may take by README's table of limits and operate.md, with default settings."""

from __future__ import annotations

import re
from typing import Final

from libs.serving.limits import PAYLOAD_BYTES_MAX
from services.broker.config import BrokerConfig
from services.console import guard, payloads
from services.ingest.config import IngestConfig
from services.ingest.read.blob_reads import BYTES_MAX
from services.router.config import RouterConfig

MIB: Final = 1 << 20
UNITS: Final = {"m": MIB, "Mi": MIB, "g": 1 << 30, "Gi": 1 << 30}

REQUESTS: Final = 1 << 30
"""Of clients that all send the largest payloads at the same time."""

DATABASE: Final = (64 + 2 * 16) * MIB
"""Data on its way to the store, and two caches."""

LEASE: Final = 480
PROCESS: Final = 96 * MIB
"""The interpreter with what a service loads, and serves nothing yet."""


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


def _console() -> int:
    read = payloads.READS_MAX * payloads.READ_COPIES + payloads.DOWNLOADS_MAX
    # One character that is not Latin makes four bytes of each.
    return read * PAYLOAD_BYTES_MAX + guard.BODIES_MAX * 4 * guard.BODY_BYTES_MAX


STATED: Final = {
    name: PROCESS + REQUESTS + own()
    for name, own in (("ingest", _ingest), ("broker", _broker), ("router", _router))
} | {"console": PROCESS + _console()}


def bytes_of(limit: str) -> int:
    """Of what a manifest writes, as `2Gi`, or a compose file, as `2g`."""
    number, unit = re.fullmatch(r"(\d+)(\w+)", limit).groups()  # type: ignore[union-attr]
    return int(number) * UNITS[unit]
