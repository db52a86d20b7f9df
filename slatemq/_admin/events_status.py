"""How far the processes have published their events; a part of the client."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import grpc

from slatemq._admin.instance_status import STATUS_S
from slatemq._rpc.peers import Peers
from slatemq._rpc.rpc_status import from_rpc_error
from slatemq.v1 import events_pb2, events_pb2_grpc

ANSWER_S = 2 * STATUS_S
"""A process asks its backend, which may take some seconds to be found away."""


@dataclass(frozen=True, slots=True)
class EventsStatus:
    """Where the events of one process stand.

    Attributes:
        service: Its service: `ingest`, `broker` or `janitor`.
        shard: Its shard.
        enabled: Whether it publishes events.
        backend: The system that they go to.
        consistency: The setting `queue.consistency`.
        answering: Whether the backend answers now.
        cursor: Of an ingest the last message whose event is published, of a broker the number of
            its last event that is; of a janitor how many looks at runs are done since its start.
        durable_sequence: The last durable message, or the number of the newest event; of a janitor
            how many looks at runs there were since its start.
        lag_count: Events that are not published yet.
        lag_ms: How long ago the change was made whose event is being published.
        published_count: Events published since the process began.
        failed_count: Events in publishes that failed since then.
        dropped_count: Events given up since then, in `fire-and-forget`.
        lost_count: Messages that were purged before their events were published.
        last_error: What the last call of the backend that failed said.
        problem: Why the process did not answer; the others are empty then.
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


class EventsCalls:
    """Asking the processes that publish events; a part of the client."""

    _peers: Peers

    async def events_status(self) -> list[EventsStatus]:
        """Where the events of every ingest, broker and janitor stand.

        One that does not answer has a `problem`.
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
        stub: Any = events_pb2_grpc.EventsServiceStub(self._peers.at(address))
        try:
            found: events_pb2.GetEventsStatusResponse = await stub.GetEventsStatus(
                events_pb2.GetEventsStatusRequest(), timeout=ANSWER_S
            )
        except grpc.RpcError as error:
            return EventsStatus(service, shard, problem=from_rpc_error(error).message)
        return EventsStatus(
            service,
            shard,
            enabled=found.enabled,
            backend=found.backend,
            consistency=found.consistency,
            answering=found.answering,
            cursor=found.cursor,
            durable_sequence=found.durable_sequence,
            lag_count=found.lag_count,
            lag_ms=found.lag_ms,
            published_count=found.published_count,
            failed_count=found.failed_count,
            dropped_count=found.dropped_count,
            lost_count=found.lost_count,
            last_error=found.last_error,
        )
