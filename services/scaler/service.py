"""The process: its port, TLS, start and end."""

from __future__ import annotations

import asyncio
import logging
import signal
import ssl
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Final

import grpc.aio
from grpc_health.v1 import health_pb2_grpc

from libs.serving import limits
from libs.serving.access import revoked_certificates
from libs.serving.grpc_port import GrpcPort, LateHandlers
from libs.serving.http.parts import HttpParts
from libs.serving.process.exits import EXIT_CLEAN, EXIT_FAILED, EXIT_USAGE
from libs.serving.process.health import Health
from libs.serving.process.process_measures import measure_process, measure_serving
from libs.serving.process.ready_file import write_ready_file
from libs.serving.process.settings import flag_of
from libs.serving.requests.auditing import Auditor
from libs.serving.requests.doors import ServiceDoor
from libs.serving.requests.gate import Gate
from libs.serving.requests.guard import CallGuard
from libs.serving.startup import begin, recorder_of
from libs.serving.tls import (
    ServerTls,
    certificate_files,
    https_context,
    measure_certificates,
    require_tls,
    setting_of,
)
from services.scaler.config import ScalerConfig
from services.scaler.readings import Readings
from services.scaler.servicer import SERVICE, Scaler
from services.scaler.stubs.externalscaler_pb2_grpc import add_ExternalScalerServicer_to_server
from slatemq._rpc.tls import CertificateFiles
from slatemq.client import Client, connect
from slatemq.credentials import Credentials
from slatemq.errors import InvalidArgument

if TYPE_CHECKING:
    from libs.serving.http.server import Exposition, HttpServer
    from libs.serving.revocations import Revocations

log = logging.getLogger(__name__)

CALLS_MAX: Final = 4_096
"""In flight at once: a stream for each trigger, and what KEDA polls."""

REQUEST_BYTES_MAX: Final = limits.MEBIBYTE
"""Of metadata, which Kubernetes bounds to some such size itself."""

CALL_S: Final = 5.0
"""How long an answer waits for services that are down."""

PAGE: Final = "docs/how-to/autoscale.md"


def run(config: ScalerConfig) -> int:
    """Serve until SIGTERM or SIGINT; returns the exit code."""
    return asyncio.run(_run(config, begin("scaler", config)))


async def _run(config: ScalerConfig, exposition: Exposition | None) -> int:
    try:
        files = certificate_files(config)
        tls = _server_tls(config, files)
        http_tls = https_context(files)
        revoked = revoked_certificates(config)
        client = _client(config, files)
    except InvalidArgument as error:
        log.error("%s: %s", flag_of(setting_of(error.field)), error.description)
        return EXIT_USAGE
    try:
        return await _serve(config, tls, http_tls, revoked, client, exposition)
    except OSError as error:
        log.error("cannot listen: %s", error)
        return EXIT_FAILED
    finally:
        await client.close()


def _server_tls(config: ScalerConfig, files: CertificateFiles | None) -> ServerTls | None:
    """Raises InvalidArgument for settings that do not go together, or would open the scaler."""
    require_tls(config, PAGE)
    if files is None:
        return None
    if not config.keda_identity:
        raise InvalidArgument("keda_identity", f"must be the name in KEDA's certificate ({PAGE})")
    return ServerTls(files, needs_client_certificate=True)


def _client(config: ScalerConfig, files: CertificateFiles | None) -> Client:
    """The client of the instance. Raises InvalidArgument."""
    own = files or CertificateFiles()
    token_file = Path(config.token_file) if config.token_file else None
    credentials = Credentials(ca=own.ca, cert=own.cert, key=own.key, token_file=token_file)
    return connect(config.endpoint, call_timeout=CALL_S, credentials=credentials, tracing=True)


async def _serve(
    config: ScalerConfig,
    tls: ServerTls | None,
    http_tls: ssl.SSLContext | None,
    revoked: Revocations | None,
    client: Client,
    exposition: Exposition | None,
) -> int:
    """Raises OSError where it cannot listen."""
    recorder = recorder_of("scaler", config, exposition)
    scaler = Scaler(Readings(client))
    health = Health([SERVICE])
    measure_process(recorder.meter)
    measure_serving(recorder.meter, lambda: health.is_serving)
    measure_certificates(recorder.meter, config)
    handlers = LateHandlers()
    health_pb2_grpc.add_HealthServicer_to_server(health, handlers.registry)
    add_ExternalScalerServicer_to_server(scaler, handlers.registry)
    gate = Gate(CALLS_MAX)
    # Its acts are lines of the log alone: it has no events.
    auditor = Auditor("scaler", lambda act: None)
    door = ServiceDoor(config.keda_identity if tls is not None else "", revoked, auditor)
    guard = CallGuard(gate, recorder, REQUEST_BYTES_MAX).of_door(door)
    port = GrpcPort(partial(_new_server, guard, handlers), tls)
    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopping.set)
    host = config.address_host
    facts = {"address": f"{host}:{port.bind(host, config.port)}"}
    http: HttpServer | None = None
    watches: list[asyncio.Task[None]] = []
    if revoked is not None:
        watches.append(asyncio.create_task(revoked.watch(auditor.record_file)))
        watches.append(asyncio.create_task(door.open_calls.watch()))
    try:
        if exposition is not None:
            module = import_module("libs.serving.http.server")
            render = partial(exposition.render, recorder.series)
            opened: HttpServer = module.HttpServer(health, render, HttpParts(), http_tls)
            facts["http_address"] = await opened.start(host, config.http_port)
            http = opened
        await port.start()
        gate.open()
        await health.serving()
        log.info("serving", extra=facts)
        write_ready_file(config.ready_file, facts)
        await stopping.wait()
        gate.close("NOT_SERVING", "the scaler is stopping")
        await health.not_serving("the scaler is stopping")
        scaler.stop_streams()
    finally:
        for watch in watches:
            watch.cancel()
        await port.stop(config.drain_ms / 1000)
        if http is not None:
            await http.stop()
    await asyncio.to_thread(recorder.shutdown)
    log.info("stopped")
    return EXIT_CLEAN


def _new_server(guard: CallGuard, handlers: LateHandlers) -> grpc.aio.Server:
    server = grpc.aio.server(interceptors=[guard], options=limits.server_options(0))
    server.add_generic_rpc_handlers((handlers,))
    return server
