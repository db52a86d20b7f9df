"""The life of a service on its server: start, serve, drain, stop.

::

    bind ── start ──────────── serving ──────────── drain ─────── stop ── exit 0
     │      NOT_SERVING        SERVING,             NOT_SERVING:    │
     │      calls: STARTING    ready file written   calls, too      │
     └─ start fails, or a fatal cause at any time ──────────────────┴── exit 1, or 77 when fenced

A standby waits before its start until its shard's owner is silent. Meanwhile it says NOT_SERVING,
answers where the other processes are, and refuses all other calls with STANDBY.

The port is bound before the service starts (so its address is known, and health can say "not yet");
a fatal cause skips the drain, since what is in memory must not be answered any more.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

import grpc.aio
from grpc_health.v1 import health as grpc_health
from grpc_health.v1 import health_pb2_grpc

from libs.serving import limits
from libs.serving.access import measure_usage, protection_of
from libs.serving.access_servicer import AccessServicer
from libs.serving.grpc_port import GrpcPort, LateHandlers
from libs.serving.peers.elsewhere import Elsewhere
from libs.serving.peers.topology import TopologyServicer
from libs.serving.process.config import ServingConfig
from libs.serving.process.exits import EXIT_FAILED, EXIT_STORE_DOWN, ExitCause, FatalError
from libs.serving.process.health import (
    FAILED,
    STANDING_BY,
    STARTING,
    STOPPING,
    Health,
    owner_health,
)
from libs.serving.process.logs import AUDIT_LOGGER
from libs.serving.process.memory import collect_in_steps, keep_for_good, return_memory
from libs.serving.process.ownership import Ownership, Standstill
from libs.serving.process.process_measures import measure_serving
from libs.serving.process.ready_file import write_ready_file
from libs.serving.process.standby import Standby, measure_standby
from libs.serving.process.store_watch import StoreWatch
from libs.serving.process.watchdog import uncounted
from libs.serving.reflection import add_reflection
from libs.serving.requests.auditing import Auditor
from libs.serving.requests.doors import Door
from libs.serving.requests.gate import Gate
from libs.serving.requests.guard import CallGuard
from libs.serving.service import Service
from libs.serving.telemetry import Telemetry
from libs.serving.tls import ServerTls, measure_certificates
from libs.storage.errors import (
    Fenced,
    LostDatabase,
    LostInstance,
    LostWalStore,
    OtherFormat,
    OtherWalStore,
    StorageError,
    StoreUnavailable,
    UnsafeStore,
)
from libs.storage.objects.durability import full_disk
from libs.storage.objects.patience import patiently
from slatemq.v1 import topology_pb2_grpc
from slatemq.v1.access_check_pb2_grpc import add_AccessServiceServicer_to_server

if TYPE_CHECKING:
    from libs.serving.http.server import HttpServer

log = logging.getLogger(__name__)

FATAL_GRACE_SECONDS = 0.2
"""After a fatal cause: long enough for errors on their way to callers, and for nothing else."""

SENDING_GRACE_SECONDS = 1.0
"""After the last handler has returned while draining, for its answer to leave. What is still open
then is a watch on our health, which would go on for ever."""


class Signals:
    """SIGTERM and SIGINT as events, while the context lasts."""

    def __init__(self) -> None:
        self.first = asyncio.Event()
        self.second = asyncio.Event()
        self.name = ""

    def __enter__(self) -> Signals:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._received, number)
        return self

    def __exit__(self, *_: object) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)

    def _received(self, number: signal.Signals) -> None:
        (self.second if self.first.is_set() else self.first).set()
        self.name = self.name or number.name


class RunningService:
    """One service on one server.

    Attributes:
        gate: Whether calls are let in.
        address: The advertised `host:port`, once bound.
        peer_address: That of the port for services, once bound.
        http_address: `host:port` of the HTTP port, once bound; empty without one.
    """

    def __init__(
        self,
        service: Service[Any],
        config: ServingConfig,
        telemetry: Telemetry,
        render_metrics: Callable[[], bytes] | None = None,
    ) -> None:
        """`render_metrics` gives what `GET /metrics` answers."""
        self.gate = Gate(config.concurrent_calls_max)
        self._lookups = Gate(config.concurrent_calls_max)
        self.address = self.peer_address = self.http_address = ""
        self._render_metrics = render_metrics
        self._http: HttpServer | None = None
        self._service = service
        self._config = config
        self._telemetry = telemetry
        self._standby: Standby | None = None
        self._health = Health(self._health_names)
        measure_serving(telemetry.meter, lambda: self._health.is_serving)
        measure_standby(telemetry.meter, lambda: self._standby)
        service.measure_process()
        self._watches: list[asyncio.Task[None]] = []
        self._handlers = LateHandlers()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._handlers.registry)
        topology_pb2_grpc.add_TopologyServiceServicer_to_server(
            TopologyServicer(service.directory), self._handlers.registry
        )
        self._auditor = Auditor(service.name, service.publish_act)
        self._protection = protection_of(config, self._auditor)
        measure_certificates(telemetry.meter, config, config.service_identity)
        service.access_note = lambda: self._protection.note
        if self._protection.callers is not None:
            measure_usage(self._protection.callers.usage, telemetry)
        guard = CallGuard(
            self.gate,
            telemetry,
            limits.message_bytes_max(config.instance.payload_bytes_max),
            Elsewhere(service.directory, service.grpc_services),
            lambda: service.held_bytes,
            service.directed,
            self._lookups,
        )
        protection = self._protection
        self._port = self._port_of(
            guard, protection.client_door, protection.client_tls, limits.CONNECTION_IDLE_MS_MAX
        )
        self._peer_port = self._port_of(guard, protection.service_door, protection.service_tls)

    @property
    def _health_names(self) -> Sequence[str]:
        service = self._service
        if not service.owns_shard:
            return service.grpc_services
        return [*service.grpc_services, owner_health(service.database_name, service.owner_name)]

    def _port_of(
        self, guard: CallGuard, door: Door, tls: ServerTls | None, idle_ms_max: int = 0
    ) -> GrpcPort:
        return GrpcPort(partial(self._new_server, guard.of_door(door), idle_ms_max), tls)

    def _new_server(self, guard: CallGuard, idle_ms_max: int) -> grpc.aio.Server:
        """A server with the handlers of all services."""
        options = limits.server_options(self._config.instance.payload_bytes_max, idle_ms_max)
        server = grpc.aio.server(interceptors=[guard], options=options)
        server.add_generic_rpc_handlers((self._handlers,))
        add_reflection(server, [*self._service.grpc_services, grpc_health.SERVICE_NAME])
        return server

    async def run(self, signals: Signals) -> ExitCause:
        """Serve until a signal or a fatal cause; returns why it ended.

        A second signal while draining ends the calls in flight at once.
        """
        try:
            await self._bind()
        except OSError as error:
            await self._stop_servers(0)
            return self._ended(ExitCause.failed(f"cannot listen: {error}"))
        self._watch_files()
        cause = await self._serve(signals)
        for watch in self._watches:
            await _cancel(watch)
        await self._health.not_serving(STOPPING if cause.code == 0 else FAILED)
        if cause.code == 0:
            await self._drain(signals)
        else:
            self._close_gates(cause.event.upper())
            await self._stop_servers(FATAL_GRACE_SECONDS)
        cause = await self._stop_service(cause)
        if cause.code == 0 and self._standby is not None:
            await self._standby.give_free()
        if self._http is not None:
            await self._http.stop()
        return self._ended(cause)

    async def _bind(self) -> None:
        await self._health.not_serving(STARTING)
        config = self._config
        port = self._port.bind(config.address_host, config.port)
        peer_port = self._peer_port.bind(config.address_host, config.peer_port)
        self.address = config.advertised_address or f"{config.address_host}:{port}"
        host = self.address.rpartition(":")[0]
        self.peer_address = config.peer_address or f"{host}:{peer_port}"
        if config.http_port >= 0:
            await self._bind_http()
        await self._port.start()
        await self._peer_port.start()
        log.info("listening", extra=self._addresses)
        if self._protection.warning:
            logging.getLogger(AUDIT_LOGGER).warning("%s", self._protection.warning)

    async def _stop_servers(self, grace: float) -> None:
        await asyncio.gather(self._port.stop(grace), self._peer_port.stop(grace))

    async def _bind_http(self) -> None:
        # Loaded when asked for: few processes have an HTTP port.
        module = import_module("libs.serving.http.server")
        server: HttpServer = module.HttpServer(
            self._health,
            self._render_metrics,
            self._service.http_parts,
            self._protection.http_tls,
        )
        host, port = self._config.address_host, self._config.http_port
        try:
            self.http_address = await server.start(host, port)
        except OSError as error:
            raise OSError(f"HTTP on {host}:{port}: {error}") from error
        self._http = server

    @property
    def _addresses(self) -> dict[str, str]:
        addresses = {"address": self.address, "peer_address": self.peer_address}
        return addresses | self._http_fact

    @property
    def _http_fact(self) -> dict[str, str]:
        return {"http_address": self.http_address} if self.http_address else {}

    async def _serve(self, signals: Signals) -> ExitCause:
        asked = asyncio.ensure_future(signals.first.wait())
        try:
            started = asyncio.ensure_future(self._start())
            await _first(asked, started)
            if started.cancelled() or not started.done():
                await _cancel(started)
                return ExitCause.clean(f"{signals.name} while starting")
            failure = _failure_of(started)
            if failure is not None:
                return failure
            self._service.add_to(self._handlers.registry)
            access = AccessServicer(self._protection.callers)
            add_AccessServiceServicer_to_server(access, self._handlers.registry)
            fatal = asyncio.ensure_future(self._service.wait_fatal())
            await self._announce()
            await _first(asked, fatal)
            if fatal.done():
                return _failure_of(fatal) or fatal.result()
            await _cancel(fatal)
            return ExitCause.clean(signals.name)
        finally:
            await _cancel(asked)

    async def _start(self) -> None:
        with patiently():
            await self._service.probe_store()
        self._standby = self._service.standby(self.peer_address)
        if self._standby is not None:
            await self._health.not_serving(STANDING_BY)
            self.gate.close("STANDBY", STANDING_BY)
            self._lookups.open()
            await self._standby.wait()
            self.gate.close("STARTING", STARTING)
        if self._service.owns_shard:
            # Not while it stands by: two standbys without a claim would wait for each other.
            self._health.add(owner_health(self._service.database_name, ""))
            await self._health.not_serving(STARTING)
        with patiently():
            await self._service.start(self.address, self.peer_address)

    async def _announce(self) -> None:
        with uncounted():
            keep_for_good()
        self._keep_announced()
        self.gate.open()
        self._lookups.open()
        self._service.opened()
        await self._health.serving()
        write_ready_file(self._config.ready_file, self._addresses)
        log.info("serving", extra={"address": self.address})

    def _watch_files(self) -> None:
        """Follow the files of access from now on: a standby may wait for weeks."""
        protection, taken = self._protection, self._auditor.record_file
        if protection.callers is not None:
            self._watches.append(asyncio.create_task(protection.callers.watch_files(taken)))
        if protection.revoked is not None:
            self._watches.append(asyncio.create_task(protection.revoked.watch(taken)))
        if protection.callers is not None or protection.client_tls is not None:
            for door in (protection.client_door, protection.service_door):
                self._watches.append(asyncio.create_task(door.open_calls.watch()))

    def _keep_announced(self) -> None:
        works: list[Coroutine[Any, Any, None]] = [collect_in_steps(), return_memory()]
        announcement = self._service.announcement
        if announcement is not None:
            works.append(announcement.keep())
        if isinstance(announcement, Ownership):
            standstill = self.gate.standstill = Standstill(announcement.prove_serving)
            store = StoreWatch(
                self._health,
                announcement.waits_ms,
                self._telemetry.meter,
                announcement.serves_without_store,
            )
            works += [standstill.watch(), store.run()]
        self._watches += [asyncio.create_task(work) for work in works]

    def _close_gates(self, reason: str) -> None:
        for gate in (self.gate, self._lookups):
            gate.close(reason, STOPPING)

    async def _drain(self, signals: Signals) -> None:
        """End the calls in flight: by themselves within the grace, then by force."""
        log.info("draining", extra={"calls": self.gate.calls.count, "signal": signals.name})
        self._close_gates("NOT_SERVING")
        grace = self._config.drain_ms / 1000
        drained = asyncio.ensure_future(self._drain_calls(grace))
        impatient = asyncio.ensure_future(signals.second.wait())
        await _first(drained, impatient)
        await _cancel(impatient)
        if not drained.done():
            await _cancel(drained)
            await self._stop_servers(0)

    async def _drain_calls(self, grace: float) -> None:
        # The ports stay open meanwhile, and refuse new calls: gRPC may lose a call that comes at
        # the moment at which its server stops, whose caller then waits for as long as it drains.
        try:
            async with asyncio.timeout(grace):
                await self._drain_service()
                await self.gate.calls.idle()
        except TimeoutError:
            log.warning("the service did not drain in time", extra={"drain_ms": grace * 1000})
            await self._stop_servers(0)
        await self._stop_servers(SENDING_GRACE_SECONDS)

    async def _drain_service(self) -> None:
        try:
            await self._service.drain()
        except Exception:  # stopping goes on, even if a service fails here
            log.exception("drain failed")

    async def _stop_service(self, cause: ExitCause) -> ExitCause:
        try:
            await self._service.stop()
        except Exception as error:
            log.exception("stop failed")
            # What ended the service matters more than what closing it then ran into.
            return cause if cause.code else cause_of(error)
        return cause

    def _ended(self, cause: ExitCause) -> ExitCause:
        if cause.code in (EXIT_FAILED, EXIT_STORE_DOWN):
            for folder in self._service.folders:
                cause = replace(cause, message=cause.message + full_disk(folder, cause.message))
        cause.log(log)
        return cause


async def _first(*futures: asyncio.Future[Any]) -> None:
    await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)


async def _cancel(future: asyncio.Future[Any]) -> None:
    future.cancel()
    with suppress(asyncio.CancelledError):
        await asyncio.wait([future])


def _failure_of(done: asyncio.Future[Any]) -> ExitCause | None:
    """The cause that an exception stands for; None without one."""
    if done.cancelled():
        return ExitCause.failed("a part of the service was cancelled")
    error = done.exception()
    return None if error is None else cause_of(error)


def cause_of(error: BaseException) -> ExitCause:
    """The cause that an error stands for; logs the traceback of an unexpected one."""
    if isinstance(error, FatalError):
        return error.cause
    if isinstance(error, Fenced):
        return ExitCause.fenced(f"another process owns the shard now: {error}")
    if isinstance(error, UnsafeStore | OtherFormat | OtherWalStore):
        return ExitCause.usage(str(error))
    if isinstance(error, LostDatabase | LostInstance | LostWalStore):
        return ExitCause.lost(str(error))
    if isinstance(error, StoreUnavailable):
        return ExitCause.store_down(str(error))
    if isinstance(error, StorageError):
        return ExitCause.failed(str(error))
    log.error("the service failed", exc_info=error)
    return ExitCause.failed(f"{type(error).__name__}: {error}")
