"""What must hold inside the services, and between what is durable of them.

What is durable is compared whenever a commit lands, and what a router believes after each of its
steps. The state of a broker is compared with itself, and with what is durable of it, when a commit
of its has landed, and after each 32nd step of brokers.

Nothing here runs in production: a simulated world has all services and the store in one process, so
that the memory of one can be compared with what is durable of another.

::

    ingest's log ≥ durable cursor of a broker ≥ cursor that a router believes
    pushes that a broker removed ≤ pushes that ingest has ≤ pushes that are durable at the broker
    events that the backend has ≥ durable cursor of ingest's events
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from libs.storage.layout.keys import log_range
from libs.storage.layout.own_keys import (
    EVENT_CURSOR_KEY,
    LOG_BOUNDS_KEY,
    outbox_counter_range,
    outbox_progress_range,
    parse_outbox_counter_key,
    parse_outbox_progress_key,
    parse_routing_cursor_key,
    replay_range,
    routing_cursor_range,
)
from libs.storage.layout.primitives import KeyRange
from libs.storage.records.event_records import decode_event_cursor
from libs.storage.records.execution_records import OutboxCounter, decode_outbox_counter
from libs.storage.records.log_bounds import decode_log_bounds
from libs.storage.records.metadata import decode_log_entry
from libs.storage.records.replay_records import decode_replay
from libs.storage.records.states import decode_outbox_progress, decode_routing_cursor
from services.broker.core.shard import Shard
from services.broker.core.waiting.bucket import Bucket
from services.broker.core.waiting.lane import Lane
from services.broker.service import BrokerService
from services.router.service import RouterProcess
from tests.simulation.cluster import Cluster, Process
from tests.simulation.judge import Violated
from tests.simulation.loop import Machine
from tests.simulation.store import Rows

CHECK_EVERY: Final = 32
"""After so many steps of brokers the state of one is looked at as a whole."""


@dataclass
class Durable:
    """What is durable of a database, as far as others go by it.

    Attributes:
        log_end: The last message of an ingest's log.
        progress: How far an ingest has the pushes of each broker.
        events: The last message of which the backend has the event, says an ingest.
        cursors: How far a broker has judged each log.
        replays: The farthest that a queue of a broker has caught up with each log.
        outboxes: Where a broker's pushes for each ingest stand.
    """

    log_end: int = 0
    progress: dict[int, int] = field(default_factory=dict)
    events: int = 0
    cursors: dict[int, int] = field(default_factory=dict)
    replays: dict[int, int] = field(default_factory=dict)
    outboxes: dict[int, OutboxCounter] = field(default_factory=dict)


class Invariants:
    """Attributes:
    checks: How often one of them was looked at.
    """

    def __init__(self, cluster: Cluster, landed: Callable[[int], int] | None = None) -> None:
        """`landed`: the last message of an ingest shard of which the backend has the event."""
        self.checks = 0
        self._cluster = cluster
        self._event_landed = landed
        self._durable: dict[str, Durable] = {}
        self._changed: list[str] = []
        self._broker_steps = 0
        cluster.store.on_landed = self._changed.append

    def look(self, machine: Machine) -> None:
        """After a step of a machine. Raises Violated."""
        while self._changed:
            name = self._changed.pop()
            self._check_durable(name)
            for its, owner in self._cluster.by_machine.items():
                if its.is_alive and f"{owner.kind}/{owner.shard}" == name:
                    self._check_broker(its, owner)
        process = self._cluster.by_machine.get(machine)
        if process is None:
            return
        service = process.service
        if isinstance(service, RouterProcess):
            self._check_router(machine.name, service)
        elif isinstance(service, BrokerService) and service.broker is not None:
            self._broker_steps += 1
            if self._broker_steps % CHECK_EVERY == 0:
                self._check_broker(machine, process)

    def _of(self, name: str) -> Durable:
        return self._durable.setdefault(name, Durable())

    # --- What is durable ----------------------------------------------------

    def _check_durable(self, name: str) -> None:
        self.checks += 1
        self._durable[name] = _read(self._cluster.store.log_of(name).rows)
        ingests = [one for one in self._durable if one.startswith("ingest/")]
        brokers = [one for one in self._durable if one.startswith("broker/")]
        for ingest in ingests:
            self._check_events(ingest)
            for broker in brokers:
                if name in (ingest, broker):
                    self._check_pair(ingest, broker)

    def _check_pair(self, ingest: str, broker: str) -> None:
        log, judged = self._of(ingest), self._of(broker)
        shard, broker_shard = _shard_of(ingest), _shard_of(broker)
        for what, cursors in (("has judged", judged.cursors), ("replays", judged.replays)):
            _at_most(f"{broker} {what} {ingest} up to", cursors.get(shard, 0), log.log_end)
        stored, outbox = log.progress.get(broker_shard, 0), judged.outboxes.get(shard)
        if outbox is None:
            _at_most(f"{ingest} has pushes of {broker} up to", stored, 0)
            return
        sent = outbox.first_waiting - 1 + outbox.offset
        _at_most(f"{broker} removed pushes for {ingest} up to", sent, stored)
        made = outbox.last_number + outbox.offset
        _at_most(f"{ingest} has pushes of {broker} up to", stored, made)

    def _check_events(self, ingest: str) -> None:
        if self._event_landed is not None:
            known = self._event_landed(_shard_of(ingest))
            _at_most(f"the events of {ingest} are published up to", self._of(ingest).events, known)

    # --- What is in memory --------------------------------------------------

    def _check_router(self, name: str, service: RouterProcess) -> None:
        for broker_shard, link in service.router.links.items():
            durable = self._of(f"broker/{broker_shard}").cursors
            for ingest_shard in service.router.logs:
                route = link.route(ingest_shard)
                if route is None:
                    continue
                where = f"{name} has the cursor of log {ingest_shard} of broker {broker_shard} at"
                _at_most(where, route.cursor, durable.get(ingest_shard, 0))
                at, held = route.cursor, (route.in_flight, route.judged)
                for piece in held:
                    if piece is not None:
                        _equal(f"{name}: a piece of log {ingest_shard} begins", piece.previous, at)
                        at = piece.last
                _at_most(f"{name}: the pieces of log {ingest_shard} end", at, route.position)

    def _check_broker(self, machine: Machine, process: Process) -> None:
        service = process.service
        if isinstance(service, BrokerService) and service.broker is not None:
            self.checks += 1
            shard = service.broker.owner.shard
            check_shard(machine.name, shard)
            self._check_owner(process, shard)

    def _check_owner(self, process: Process, shard: Shard) -> None:
        """A broker knows at least what is durable, unless another has its shard by now."""
        store, name = self._cluster.store, f"broker/{process.shard}"
        database = process.service.database
        if database is None or database._db._epoch != store.log_of(name).epoch:
            return
        durable = self._of(name)
        for log, cursor in durable.cursors.items():
            _at_most(f"{name}: the cursor of log {log} is durable at", cursor, shard.cursors[log])
        for ingest_shard, counter in durable.outboxes.items():
            now = shard.outbox.counter(ingest_shard)
            where = f"{name}: pushes for ingest {ingest_shard}"
            _at_most(f"{where} are durable up to", counter.last_number, now.last_number)
            _at_most(f"{where} wait from", now.first_waiting, now.last_number + 1)
            if now.waiting_bytes < 0:
                raise Violated(f"{where} that wait have {now.waiting_bytes} bytes")


def _shard_of(name: str) -> int:
    return int(name.rpartition("/")[2])


def _read(rows: Rows) -> Durable:
    found = Durable()
    last = next(_keys(rows, log_range(0), reverse=True), None)
    if last is not None:
        found.log_end = [one.message_id for one in decode_log_entry(rows[last][0])][-1]
    if LOG_BOUNDS_KEY in rows:
        bounds = decode_log_bounds(rows[LOG_BOUNDS_KEY][0])
        found.log_end = max(found.log_end, bounds.last_message_id)
    if EVENT_CURSOR_KEY in rows:
        found.events = decode_event_cursor(rows[EVENT_CURSOR_KEY][0]).message_id
    for key in _keys(rows, outbox_progress_range()):
        found.progress[parse_outbox_progress_key(key)] = decode_outbox_progress(rows[key][0])
    for key in _keys(rows, routing_cursor_range()):
        found.cursors[parse_routing_cursor_key(key)] = decode_routing_cursor(rows[key][0])
    for key in _keys(rows, outbox_counter_range()):
        found.outboxes[parse_outbox_counter_key(key)] = decode_outbox_counter(rows[key][0])
    for key in _keys(rows, replay_range()):
        for one in decode_replay(rows[key][0]):
            known = found.replays.get(one.ingest_shard, 0)
            found.replays[one.ingest_shard] = max(known, one.cursor)
    return found


def _keys(rows: Rows, span: KeyRange, *, reverse: bool = False) -> Iterator[bytes]:
    keys: Iterator[bytes] = rows.irange(span.start, span.end, (True, False), reverse)
    return keys


# --- One broker -------------------------------------------------------------


def check_shard(name: str, shard: Shard) -> None:
    """Raises Violated where the state of a broker contradicts itself."""
    in_flight = 0
    for queue in shard.queues.values():
        where = f"{name}: {queue.queue_id}"
        buckets = queue.leases._buckets.values()
        leased = [one for bucket in buckets for one in bucket.message_ids()]
        _equal(f"{where}: leases counted", queue.leases.count, len(leased))
        in_flight += len(leased)
        for bucket in buckets:
            watched_ms = bucket.watched_ms
            if bucket.count and (watched_ms is None or watched_ms > bucket.earliest_ms()):
                raise Violated(f"{where}: nothing ends the leases of the bucket {bucket.order}")
        waiting: list[int] = []
        for lane in queue.waiting.by_name.values():
            waiting += _messages(f"{where}: lane {lane.priority}", lane)
        both = waiting + leased
        if len(both) > len(set(both)):
            twice = sorted({one for one in both if both.count(one) > 1})
            raise Violated(f"{where} has messages twice: {twice}")
        for label, finished in (("done", queue.done), ("failed", queue.failed)):
            if finished.stored_count < 0 or bool(finished.stored_count) != bool(
                finished.oldest_order
            ):
                raise Violated(
                    f"{where}: {label} counts {finished.count}, {finished.stored_count} of them "
                    f"stored, the first row {finished.oldest_order}"
                )
    _equal(f"{name}: messages in flight", shard.leases.in_flight_count, in_flight)


def _messages(where: str, lane: Lane) -> list[int]:
    """The messages of a lane that are in memory: all that it counts, where nothing is left out."""
    found = [one for bucket in lane.in_memory() for one in _message_ids(bucket)]
    if lane.complete:
        _equal(f"{where} counts", lane.count, len(found))
    elif lane.count < len(found):
        raise Violated(f"{where} counts {lane.count}, and has {len(found)} in memory")
    return found


def _message_ids(bucket: Bucket) -> Sequence[int]:
    """Of a bucket, without making objects of what it has in columns."""
    if bucket._columns is not None:
        return bucket._columns.message_ids[bucket.start :]
    return [item.message_id for item in bucket._items[bucket.start :]]


def _at_most(what: str, found: int, limit: int) -> None:
    if found > limit:
        raise Violated(f"{what} {found}, beyond {limit}")


def _equal(what: str, counted: int, found: int) -> None:
    if counted != found:
        raise Violated(f"{what}: {counted}, and there are {found}")
