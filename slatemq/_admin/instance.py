"""The processes of an instance: their status, their events, and the settings that all share."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

import grpc
import grpc.aio

from slatemq._admin.queue_calls import QueueCalls
from slatemq._admin.queue_models import Queue
from slatemq._checks import check_flag, check_kind
from slatemq._requests import fields_of, message_of
from slatemq._rpc.queue_locations import Calls
from slatemq._rpc.rpc_status import from_rpc_error
from slatemq.errors import (
    INCOMPLETE,
    SHARDS,
    InvalidArgument,
    PermissionDenied,
    SlateMQError,
)
from slatemq.models import RouteStatus, ServiceStatus, Topology
from slatemq.v1 import instance_pb2
from slatemq.v1.events_pb2 import GetEventsStatusRequest
from slatemq.v1.events_pb2_grpc import EventsServiceStub
from slatemq.v1.instance_pb2_grpc import InstanceServiceStub
from slatemq.v1.router_pb2 import GetRoutingStatusRequest, GetRoutingStatusResponse
from slatemq.v1.router_pb2_grpc import RouterServiceStub

SETTINGS: Final = tuple(instance_pb2.InstanceSettings.DESCRIPTOR.fields_by_name)
"""Their names."""


@dataclass(frozen=True, slots=True)
class Instance:
    """A record of the settings.

    Attributes:
        number: 1 for the first record, and one more with each change.
        written_at_ms: The time of the change, in ms since the Unix epoch.
        settings: The values by name, such as `replay_window_s`.
        wal_store: URL of the store that holds the write-ahead logs alone; empty: the root does, or
            the caller may not operate.
    """

    number: int
    written_at_ms: int
    settings: Mapping[str, int]
    wal_store: str = ""


HEALTH_METHOD = "/grpc.health.v1.Health/Check"
SERVING = b"\x08\x01"
"""An encoded HealthCheckResponse with status SERVING; decoding it would need another package."""

REASON_KEY = "slatemq-not-serving"
"""Trailing metadata of a health check: why the process does not serve, or what it waits for."""

STATUS_S = 3.0
"""How long `status` waits for a process."""


ANSWER_S = 2 * STATUS_S
"""A process asks its backend, and may need some seconds to notice that it is down."""


@dataclass(frozen=True, slots=True)
class Status:
    """The whole instance, as far as it answered.

    `unlisted_brokers`: the broker shards that did not answer, whose queues are missing.
    `instance_number`: the latest record of the instance's settings; a process with a smaller number
    has to be started again. 0 = no process said.
    `refusals`: why routes or queues are missing, where the caller may not see them.
    `settings_problem`: why no process that was asked said it.
    `store`: URL of the instance's root, without its options; empty: no process said, as to callers
    that may not operate.
    `wal_store`: the same of the store that holds the write-ahead logs alone; empty: the root does,
    or the caller may not operate.
    """

    services: list[ServiceStatus]
    routes: list[RouteStatus]
    queues: list[Queue]
    unlisted_brokers: list[int]
    instance_number: int = 0
    refusals: list[str] = field(default_factory=list)
    store: str = ""
    wal_store: str = ""
    settings_problem: str = ""


@dataclass(frozen=True, slots=True)
class EventsStatus:
    """The event publishing of one process.

    Attributes:
        service: `ingest`, `broker` or `janitor`.
        enabled: Whether it publishes events.
        backend: The system that they go to.
        consistency: The setting `queue.consistency`.
        answering: Whether the backend answers now, and takes what it is given.
        cursor: The last message (ingest) or event (broker) published; of a janitor the checks of
            runs finished since its start.
        durable_sequence: The last durable message or the newest event; of a janitor the checks of
            runs begun since its start.
        lag_count: Events not published yet.
        lag_ms: The age of the change whose event is being published.
        published_count: Events published since the process started.
        failed_count: Events in publishes that failed since then.
        dropped_count: Events given up since then: in `fire-and-forget`, or since the backend takes
            none as large.
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


class InstanceCalls(Calls):
    """Asking the processes of the instance, and changing its settings; a part of the client."""

    async def topology(self) -> Topology:
        """The addresses of the processes of the instance."""
        return await self._peers.topology()

    async def status(self, *, settings: bool = True, queues: bool = True) -> Status:
        """Every process, route and queue, as far as they answer within some seconds.

        Without `settings`, no process reads the store: `instance_number` of the status is 0, and
        its stores are empty. Without `queues`, none are listed.
        """
        check_flag("settings", settings)
        check_flag("queues", queues)
        asked = await self._processes()
        refusals: dict[str, None] = {}
        brokers = [shard for service, shard, _ in asked if service == "broker"] if queues else []
        processes, routes, (listed, unlisted) = await self._peers.unless_closed(
            asyncio.gather(
                asyncio.gather(*(self._process(*one, settings=settings) for one in asked)),
                self._routes(
                    [address for service, _, address in asked if service == "router"], refusals
                ),
                self._queues(brokers, refusals),
            )
        )
        services = [process for process, _, _ in processes]
        latest = max((found for _, found, _ in processes), key=_number_of, default=_UNKNOWN)
        problems = [] if _number_of(latest) else [problem for _, _, problem in processes if problem]
        return Status(
            services,
            routes,
            listed,
            unlisted,
            _number_of(latest),
            list(refusals),
            latest.store,
            latest.instance.wal_store,
            problems[0] if problems else "",
        )

    async def events_status(self) -> list[EventsStatus]:
        """The event publishing of every ingest, broker and janitor.

        A process that does not answer has a `problem`.
        """
        asked = [one for one in await self._processes() if one[0] != "router"]
        answers = asyncio.gather(*(self._events_of(*one) for one in asked))
        return await self._peers.unless_closed(answers)

    async def get_instance(self) -> Instance:
        """Reads the latest settings. Raises Unavailable, DataLoss."""
        response = await self._peers.ask(
            self._any_process,
            lambda channel: InstanceServiceStub(channel).GetInstance,
            instance_pb2.GetInstanceRequest(),
        )
        return instance_of(response.instance)

    async def update_instance(
        self, settings: Mapping[str, int], *, accept_loss: bool = False
    ) -> Instance:
        """Changes these settings; each process follows when it is restarted.

        `accept_loss` permits a shorter `replay_window_s` or `purge_grace_s`. Raises
        FailedPrecondition (CHANGE_LOSES, PAYLOADS_STORED, QUEUES_DELAY_LONGER), InvalidArgument,
        Unavailable, DataLoss.
        """
        check_kind("settings", settings, Mapping, "a mapping of names to whole numbers")
        for name in settings:
            if name not in SETTINGS:
                raise InvalidArgument(
                    "settings", f"{name!r} is not a setting of the instance: {', '.join(SETTINGS)}"
                )
        request = message_of(
            instance_pb2.UpdateInstanceRequest,
            settings=message_of(instance_pb2.InstanceSettings, **settings),
            accept_loss=accept_loss,
        )
        response = await self._peers.ask(
            self._any_with_events,
            lambda channel: InstanceServiceStub(channel).UpdateInstance,
            request,
        )
        return instance_of(response.instance)

    async def _processes(self) -> list[tuple[str, int, str]]:
        """The service, shard and address of every process, by a topology that is asked now."""
        self._peers.forget()
        return list((await self._peers.topology()).processes())

    async def _any_process(self) -> grpc.aio.Channel:
        return self._peers.at(await self._peers.any_address())

    async def _any_with_events(self) -> grpc.aio.Channel:
        """A process that changes the instance: routers do not, as they could not report it."""
        return self._peers.at(await self._peers.any_address(without="router"))

    async def _process(
        self, service: str, shard: int, address: str, *, settings: bool
    ) -> tuple[ServiceStatus, instance_pb2.GetInstanceResponse, str]:
        """One process, what it says of the instance, and else why it says nothing."""
        health, (own, _), (instance, problem) = await asyncio.gather(
            self._health(service, shard, address),
            self._instance_at(address, without_record=True),  # It comes whatever the store does.
            self._instance_at(address) if settings else _nothing(),
        )
        health = replace(
            health,
            detail=own.note if health.serving else health.detail,
            instance_number=own.running_number,
            open_without=tuple(own.open_without),
        )
        return health, instance, problem

    async def _instance_at(
        self, address: str, *, without_record: bool = False
    ) -> tuple[instance_pb2.GetInstanceResponse, str]:
        stub = InstanceServiceStub(self._peers.at(address))
        request = instance_pb2.GetInstanceRequest(without_record=without_record)
        try:
            return await stub.GetInstance(request, timeout=STATUS_S), ""
        except grpc.RpcError as error:
            return _UNKNOWN, from_rpc_error(error).message

    async def _queues(
        self, shards: list[int], refusals: dict[str, None]
    ) -> tuple[list[Queue], list[int]]:
        """The queues of these brokers, listed within `STATUS_S`; and the brokers that were not."""
        queues: list[Queue] = []
        if not shards:
            return queues, []
        try:
            async with asyncio.timeout(2 * STATUS_S):
                async for queue in QueueCalls(self._locations).list_answering(timeout=STATUS_S):
                    queues.append(queue)  # noqa: PERF401 - what came before an error counts
        except TimeoutError:
            return queues, shards
        except PermissionDenied as error:
            refusals[f"queues are not shown: {error.message}"] = None
            return queues, []
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
            return ServiceStatus(service, shard, address, True)
        reason = trailing.get(REASON_KEY)
        problem = f"NOT_SERVING: {reason}" if reason else "NOT_SERVING"
        return ServiceStatus(service, shard, address, False, problem)

    async def _routes(self, routers: list[str], refusals: dict[str, None]) -> list[RouteStatus]:
        """The routes of all routers that answer; where several have one, the furthest."""

        async def ask(address: str) -> GetRoutingStatusResponse:
            stub = RouterServiceStub(self._peers.at(address))
            try:
                return await stub.GetRoutingStatus(GetRoutingStatusRequest(), timeout=STATUS_S)
            except grpc.RpcError as error:
                found = from_rpc_error(error)
                if isinstance(found, PermissionDenied):
                    refusals[f"routes are not shown: {found.message}"] = None
                return GetRoutingStatusResponse()  # The list of services says if it is down.

        furthest: dict[tuple[int, int], RouteStatus] = {}
        for answer in await asyncio.gather(*map(ask, routers)):
            for wire in answer.routes:
                route = RouteStatus(**fields_of(wire, RouteStatus))
                key = route.ingest_shard, route.broker_shard
                if key not in furthest or _known(furthest[key]) < _known(route):
                    furthest[key] = route
        return [furthest[key] for key in sorted(furthest)]

    async def _events_of(self, service: str, shard: int, address: str) -> EventsStatus:
        stub = EventsServiceStub(self._peers.at(address))
        try:
            found = await stub.GetEventsStatus(GetEventsStatusRequest(), timeout=ANSWER_S)
        except grpc.RpcError as error:
            return EventsStatus(service, shard, problem=from_rpc_error(error).message)
        return EventsStatus(
            **{**fields_of(found, EventsStatus), "service": service, "shard": shard}
        )


def _known(route: RouteStatus) -> tuple[int, bool]:
    return route.cursor, route.is_current


_UNKNOWN: Final = instance_pb2.GetInstanceResponse()


async def _nothing() -> tuple[instance_pb2.GetInstanceResponse, str]:
    return _UNKNOWN, ""


def _number_of(found: instance_pb2.GetInstanceResponse) -> int:
    return found.instance.number


def instance_of(record: instance_pb2.Instance) -> Instance:
    settings = {field.name: value for field, value in record.settings.ListFields()}
    return Instance(record.number, record.written_at_ms, settings, record.wal_store)
