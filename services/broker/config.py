"""The settings of a broker process."""

from __future__ import annotations

from dataclasses import dataclass

from libs.serving.process.commit_config import CommitConfig
from libs.serving.process.settings import setting
from libs.storage.layout.ids import MAX_SHARD
from services.broker.core import redrives
from services.broker.core.lists import outbox
from services.broker.core.waiting import lane_budget
from services.broker.shard import change_pace


@dataclass(frozen=True, kw_only=True)
class BrokerConfig(CommitConfig):
    shard: int = setting(
        "Number of the broker shard that this process owns.",
        default=0,
        minimum=0,
        maximum=MAX_SHARD,
    )
    uncommitted_bytes_max: int = setting(
        "Bytes waiting to be stored above which calls get RESOURCE_EXHAUSTED.",
        default=64 << 20,
        minimum=1 << 20,
    )
    payload_cache_bytes: int = setting(
        "Bytes of payloads kept for messages about to be claimed.",
        default=32 << 20,
        minimum=0,
    )
    delivery_bytes_max: int = setting(
        "Bytes of messages fetched for claims and listings, and in responses being sent, of all "
        "queues together. Each takes at most a quarter of what is free; beyond it only responses "
        "of up to 64 KiB are sent.",
        default=128 << 20,
        minimum=1 << 20,
    )
    in_flight_max: int = setting(
        "Messages in flight of all queues together; claims beyond it wait, as for a queue that has "
        "its own max_in_flight. A principal has half of them at most. A lease takes 110 to 480 "
        "bytes of memory.",
        default=500_000,
        minimum=1,
    )
    lane_bytes_max: int = setting(
        "Bytes of memory for the index of waiting messages, of all queues together; what does not "
        "fit is read back from the store when it is claimed.",
        default=lane_budget.BYTES_MAX,
        minimum=1 << 20,
    )
    queue_changes_per_s: int = setting(
        "Queues that may be created, updated and deleted in a second, so that messages keep "
        "moving meanwhile; fewer while the broker is busy. The others wait for their turn, one "
        "principal after the other, up to 10 s; then their callers get RESOURCE_EXHAUSTED.",
        default=change_pace.PER_S,
        minimum=1,
        maximum=1_000_000,
    )
    outbox_rows_max: int = setting(
        "Pushed messages that may wait for an ingest; over it pushes get RESOURCE_EXHAUSTED.",
        default=outbox.ROWS_MAX,
        minimum=1,
    )
    outbox_bytes_max: int = setting(
        "Bytes of pushed messages that may wait in the store for an ingest, payloads over 65,535 "
        "bytes not counted; over it pushes get RESOURCE_EXHAUSTED.",
        default=outbox.BYTES_MAX,
        minimum=1 << 20,
    )
    redrives_kept: int = setting(
        "Redrives that are done, cancelled or cannot go on, and are still listed; the first to end "
        "are forgotten first.",
        default=redrives.KEPT,
        minimum=1,
        maximum=10_000,
    )
    redrive_retention_s: int = setting(
        "How long these redrives are listed, in seconds; 0: without end.",
        default=redrives.RETENTION_S,
        minimum=0,
    )
    waiting_claims_max: int = setting(
        "Claims and streams that may be open at the same time. A principal has half of them at "
        "most.",
        default=10_000,
        minimum=1,
    )
    concurrent_calls_max: int = setting(
        "Calls in flight at the same time; over it callers get RESOURCE_EXHAUSTED. A principal has "
        "half of them at most. Well above waiting_claims_max, or waiting claims keep out the calls "
        "that would end their waiting.",
        default=15_000,
        minimum=1,
    )
