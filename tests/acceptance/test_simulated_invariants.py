"""What `tests.simulation.invariants` holds of services, and between what is durable of them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from libs.storage.layout.own_keys import (
    EVENT_CURSOR_KEY,
    LOG_BOUNDS_KEY,
    outbox_counter_key,
    outbox_progress_key,
    routing_cursor_key,
)
from libs.storage.records.event_records import EventCursorRecord, encode_event_cursor
from libs.storage.records.execution_records import OutboxCounter, encode_outbox_counter
from libs.storage.records.log_bounds import LogBoundsRecord, encode_log_bounds
from libs.storage.records.queues import AvailableMessage
from libs.storage.records.states import encode_outbox_progress, encode_routing_cursor
from services.broker.core.queue import Choice, Queue
from services.broker.core.settings import QueueSettings
from services.broker.core.shard import Shard
from services.broker.service import BrokerService
from services.router.route import Route
from services.router.service import RouterProcess
from tests.simulation.invariants import Invariants, check_shard
from tests.simulation.judge import Violated
from tests.simulation.loop import Machine, WorldLoop
from tests.simulation.store import SimulatedStore
from tests.unit.broker.core.shards import Each


class Instance:
    """What is durable of a log, which ends with the message 7, and of a broker that judged to 5."""

    def __init__(self, events_landed: int = 7) -> None:
        loop = WorldLoop("1")
        self.machine = Machine(loop, "router-0.1")
        self.store = SimulatedStore(loop, "1")
        self.by_machine: dict[Machine, Any] = {}
        cluster: Any = self
        self.invariants = Invariants(cluster, lambda shard: events_landed)
        self.put("ingest/0", LOG_BOUNDS_KEY, encode_log_bounds(LogBoundsRecord(1, 7, 7)))
        self.judge(5)
        loop.close()

    def put(self, database: str, key: bytes, value: bytes) -> None:
        """A commit with this row lands."""
        self.store.log_of(database).rows[key] = (value, 0)
        self.store.on_landed(database)
        self.invariants.look(self.machine)

    def judge(self, cursor: int) -> None:
        self.put("broker/0", routing_cursor_key(0), encode_routing_cursor(cursor))

    def push(self, last_number: int, first_waiting: int, offset: int = 0) -> None:
        counter = OutboxCounter(last_number, first_waiting, 0, offset)
        self.put("broker/0", outbox_counter_key(0), encode_outbox_counter(counter))

    def store_pushes(self, last_number: int) -> None:
        self.put("ingest/0", outbox_progress_key(0), encode_outbox_progress(last_number))

    def route(self, cursor: int) -> None:
        """A router believes this cursor of the broker."""
        router = RouterProcess.__new__(RouterProcess)
        route = Route(cursor)
        link = SimpleNamespace(route=lambda ingest_shard: route)
        of_router: Any = SimpleNamespace(links={0: link}, logs={0: None})
        router.router = of_router
        self.by_machine[self.machine] = SimpleNamespace(service=router)
        self.invariants.look(self.machine)


def test_a_broker_must_not_judge_what_is_not_durable() -> None:
    instance = Instance()
    instance.judge(7)
    with pytest.raises(Violated, match="broker/0 has judged ingest/0 up to 8, beyond 7"):
        instance.judge(8)


def test_a_router_must_not_believe_a_cursor_that_is_not_durable() -> None:
    instance = Instance()
    instance.route(5)
    with pytest.raises(Violated, match="log 0 of broker 0 at 6, beyond 5"):
        instance.route(6)


def test_an_ingest_must_not_have_pushes_that_are_not_durable() -> None:
    instance = Instance()
    instance.push(last_number=2, first_waiting=1)
    instance.store_pushes(2)
    with pytest.raises(Violated, match="ingest/0 has pushes of broker/0 up to 3, beyond 2"):
        instance.store_pushes(3)


def test_a_broker_must_not_remove_pushes_that_no_ingest_has() -> None:
    instance = Instance()
    instance.push(last_number=12, first_waiting=1)
    instance.store_pushes(11)
    instance.push(last_number=2, first_waiting=2, offset=10)
    with pytest.raises(Violated, match="broker/0 removed pushes for ingest/0 up to 12, beyond 11"):
        instance.push(last_number=2, first_waiting=3, offset=10)


def test_a_cursor_of_events_must_not_pass_what_the_backend_has() -> None:
    instance = Instance(events_landed=6)
    instance.put("ingest/0", EVENT_CURSOR_KEY, encode_event_cursor(EventCursorRecord(1, 6)))
    with pytest.raises(Violated, match="the events of ingest/0 are published up to 7, beyond 6"):
        instance.put("ingest/0", EVENT_CURSOR_KEY, encode_event_cursor(EventCursorRecord(1, 7)))


# --- The state of brokers ---------------------------------------------------


def shard_with(*message_ids: int) -> tuple[Shard, Queue]:
    shard = Shard()
    queue = shard.create_queue("a", QueueSettings("true"))
    for message_id in message_ids:
        queue.waiting.enqueue(AvailableMessage(message_id, 128, 0, 0, 0), now_ms=1000)
    return shard, queue


def test_the_state_of_a_broker_is_looked_at_when_its_commit_has_landed() -> None:
    # Given a broker whose state contradicts itself
    instance = Instance()
    shard, queue = shard_with(1)
    queue.leases.count = 1
    service = BrokerService.__new__(BrokerService)
    broker: Any = SimpleNamespace(owner=SimpleNamespace(shard=shard))
    service.broker, service.database = broker, None
    process = SimpleNamespace(kind="broker", shard=0, service=service)
    instance.by_machine[instance.machine] = process

    # Then a commit of its shows it, and no other's
    instance.store_pushes(0)
    with pytest.raises(Violated, match="leases counted: 1, and there are 0"):
        instance.judge(6)


def test_a_state_that_agrees_with_itself_is_no_violation() -> None:
    shard, _ = shard_with(1, 2)
    check_shard("broker", shard)


def test_a_message_in_two_places_is_a_violation() -> None:
    shard, _ = shard_with(1, 2, 1)
    with pytest.raises(Violated, match=r"has messages twice: \[1\]"):
        check_shard("broker", shard)


def test_counts_that_differ_from_the_lists_are_violations() -> None:
    shard, queue = shard_with(1)
    queue.leases.count = 1
    with pytest.raises(Violated, match="leases counted: 1, and there are 0"):
        check_shard("broker", shard)
    queue.leases.count = 0
    [lane] = queue.waiting.by_name.values()
    lane.count = 2
    with pytest.raises(Violated, match="counts: 2, and there are 1"):
        check_shard("broker", shard)
    lane.count = 1
    queue.failed.count = 1
    with pytest.raises(Violated, match="failed counts 1"):
        check_shard("broker", shard)


def test_leases_that_nothing_ends_are_a_violation() -> None:
    shard, queue = shard_with(1)
    shard.leases.claim(queue, Each(lambda item: Choice.TAKE), 1000, "consumer", 1000)
    check_shard("broker", shard)
    [bucket] = queue.leases._buckets.values()
    bucket.watched_ms = bucket.earliest_ms() + 1
    with pytest.raises(Violated, match="nothing ends the leases of the bucket"):
        check_shard("broker", shard)
