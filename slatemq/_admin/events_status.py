"""The progress of the processes in publishing their events."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import grpc

from slatemq._admin.instance_status import STATUS_S
from slatemq._checks import fields_of
from slatemq._rpc.queue_locations import Calls
from slatemq._rpc.rpc_status import from_rpc_error
from slatemq.v1.events_pb2 import GetEventsStatusRequest
from slatemq.v1.events_pb2_grpc import EventsServiceStub

ANSWER_S = 2 * STATUS_S
"""A process asks its backend, and may need some seconds to notice that it is down."""


@dataclass(frozen=True, slots=True)
class EventsStatus:
    """The event publishing of one process.

    Attributes:
        service: `ingest`, `broker` or `janitor`.
        enabled: Whether it publishes events.
        backend: The system that they go to.
        consistency: The setting `queue.consistency`.
        answering: Whether the backend answers now.
        cursor: The last message (ingest) or event (broker) published; of a janitor the checks of
            runs finished since its start.
        durable_sequence: The last durable message or the newest event; of a janitor the checks of
            runs begun since its start.
        lag_count: Events not published yet.
        lag_ms: The age of the change whose event is being published.
        published_count: Events published since the process started.
        failed_count: Events in publishes that failed since then.
        dropped_count: Events given up since then, in `fire-and-forget`.
        lost_count: Messages purged before their events were published.
        last_error: The last error of the backend.
        problem: Why the process did not answer; the other fields are empty then.
    """

    service: str
    shard: int
    enabled: bool = False
    backend: str = ""
    consistency: str = ""
    answering: bool = False
    cursor: int = 0
    durable_sequence: int = 0
    lag_count: int = 0
    lag_ms: int = 0
    published_count: int = 0
    failed_count: int = 0
    dropped_count: int = 0
    lost_count: int = 0
    last_error: str = ""
    problem: str = ""


class EventsCalls(Calls):
    """Asking the processes that publish events; a part of the client."""

    async def events_status(self) -> list[EventsStatus]:
        """The event publishing of every ingest, broker and janitor.

        A process that does not answer has a `problem`.
        """
        self._peers.forget()
        topology = await self._peers.topology()
        asked = [
            self._events_of(service, shard, address)
            for service, addresses in (
                ("ingest", topology.ingests),
                ("broker", topology.brokers),
                ("janitor", topology.janitors),
            )
            for shard, address in sorted(addresses.items())
        ]
        return list(await asyncio.gather(*asked))

    async def _events_of(self, service: str, shard: int, address: str) -> EventsStatus:
        stub = EventsServiceStub(self._peers.at(address))
        try:
            found = await stub.GetEventsStatus(GetEventsStatusRequest(), timeout=ANSWER_S)
        except grpc.RpcError as error:
            return EventsStatus(service, shard, problem=from_rpc_error(error).message)
        return EventsStatus(
            **{**fields_of(found, EventsStatus), "service": service, "shard": shard}
        )
