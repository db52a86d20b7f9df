"""The status of an instance: its processes, routes and queues, as far as they answer."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from typing import Any

import grpc

from slatemq._admin.queue_calls import QueueCalls
from slatemq._admin.queue_models import Queue
from slatemq._checks import fields_of
from slatemq._rpc.queue_locations import Calls
from slatemq._rpc.rpc_status import from_rpc_error
from slatemq.errors import INCOMPLETE, SHARDS, SlateMQError
from slatemq.models import RouteStatus, ServiceStatus, Topology
from slatemq.v1.instance_pb2 import GetInstanceRequest, GetInstanceResponse
from slatemq.v1.instance_pb2_grpc import InstanceServiceStub
from slatemq.v1.router_pb2 import GetRoutingStatusRequest, GetRoutingStatusResponse
from slatemq.v1.router_pb2_grpc import RouterServiceStub

HEALTH_METHOD = "/grpc.health.v1.Health/Check"
SERVING = b"\x08\x01"
"""An encoded HealthCheckResponse with status SERVING; decoding it would need another package."""

REASON_KEY = "slatemq-not-serving"
"""Trailing metadata of a health check: why the process does not serve, or what it waits for."""

NOTE_KEY = "slatemq-note"
"""The same of one that serves: what an operator should know."""

STATUS_S = 3.0
"""How long `status` waits for a process."""


@dataclass(frozen=True, slots=True)
class Status:
    """The whole instance, as far as it answered.

    `unlisted_brokers`: the broker shards that did not answer, whose queues are missing.
    `instance_number`: the latest record of the instance's settings; a process with a smaller number
    has to be started again. 0 = no process said.
    """

    services: list[ServiceStatus]
    routes: list[RouteStatus]
    queues: list[Queue]
    unlisted_brokers: list[int]
    instance_number: int = 0


class StatusCalls(Calls):
    """Asking every process of the instance; a part of the client."""

    async def topology(self) -> Topology:
        """The addresses of the processes of the instance."""
        return await self._peers.topology()

    async def status(self) -> Status:
        """Every process, route and queue, as far as they answer within some seconds."""
        self._peers.forget()
        topology = await self._peers.topology()
        asked = [
            (service, shard, address)
            for service, addresses in (
                ("ingest", topology.ingests),
                ("router", topology.routers),
                ("broker", topology.brokers),
                ("janitor", topology.janitors),
            )
            for shard, address in sorted(addresses.items())
        ]
        processes, routes, (queues, unlisted) = await asyncio.gather(
            asyncio.gather(*(self._process(*one) for one in asked)),
            self._routes(sorted(topology.routers.values())),
            self._queues(sorted(topology.brokers)),
        )
        services = [process for process, _ in processes]
        latest = max((number for _, number in processes), default=0)
        return Status(services, routes, queues, unlisted, latest)

    async def _process(self, service: str, shard: int, address: str) -> tuple[ServiceStatus, int]:
        """One process, and the number of the latest instance record that it sees; 0 = none."""
        health, instance = await asyncio.gather(
            self._health(service, shard, address), self._instance(address)
        )
        health = replace(health, instance_number=instance.running_number)
        return health, instance.instance.number

    async def _instance(self, address: str) -> GetInstanceResponse:
        stub = InstanceServiceStub(self._peers.at(address))
        try:
            return await stub.GetInstance(GetInstanceRequest(), timeout=STATUS_S)
        except grpc.RpcError:
            return GetInstanceResponse()  # Its health says why.

    async def _queues(self, shards: list[int]) -> tuple[list[Queue], list[int]]:
        """The queues that are listed within `STATUS_S`, and the brokers whose are not."""
        queues: list[Queue] = []
        try:
            async with asyncio.timeout(2 * STATUS_S):
                async for queue in QueueCalls(self._locations).list_answering(answer_s=STATUS_S):
                    queues.append(queue)  # noqa: PERF401 - what came before an error counts
        except TimeoutError:
            return queues, shards
        except SlateMQError as error:
            if error.reason != INCOMPLETE:
                return queues, shards
            return queues, [int(shard) for shard in error.metadata[SHARDS].split(",")]
        return queues, []

    async def _health(self, service: str, shard: int, address: str) -> ServiceStatus:
        check: Any = self._peers.at(address).unary_unary(HEALTH_METHOD)
        try:
            call = check(b"", timeout=STATUS_S)
            serving = await call == SERVING
            trailing = dict(await call.trailing_metadata() or ())
        except grpc.RpcError as error:
            return ServiceStatus(service, shard, address, False, from_rpc_error(error).message)
        if serving:
            return ServiceStatus(service, shard, address, True, trailing.get(NOTE_KEY, ""))
        reason = trailing.get(REASON_KEY)
        problem = f"NOT_SERVING: {reason}" if reason else "NOT_SERVING"
        return ServiceStatus(service, shard, address, False, problem)

    async def _routes(self, routers: list[str]) -> list[RouteStatus]:
        """The routes of all routers that answer; where several have one, the furthest."""

        async def ask(address: str) -> GetRoutingStatusResponse:
            stub = RouterServiceStub(self._peers.at(address))
            try:
                return await stub.GetRoutingStatus(GetRoutingStatusRequest(), timeout=STATUS_S)
            except grpc.RpcError:
                return GetRoutingStatusResponse()  # The list of services says that it is down.

        furthest: dict[tuple[int, int], RouteStatus] = {}
        for answer in await asyncio.gather(*map(ask, routers)):
            for wire in answer.routes:
                route = RouteStatus(**fields_of(wire, RouteStatus))
                key = route.ingest_shard, route.broker_shard
                if key not in furthest or furthest[key].cursor < route.cursor:
                    furthest[key] = route
        return [furthest[key] for key in sorted(furthest)]
