"""The stack that is attacked: its ports, plain or secured, and its processes."""

from __future__ import annotations

import asyncio
import json
import os
import ssl
import sys
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import grpc
import grpc.aio

from slatemq.cli.access.dev_certificates import SERVICE_NAME
from tests.acceptance.local_stack import LocalStack, peer_address
from tests.faults.hostile.generated import TOKENLESS
from tests.faults.hostile.http2 import Port
from tests.faults.hostile.rpcs import KINDS
from tests.integration.stack.secured import Secured

ODD_AUTHORIZATIONS: Final = (
    "",
    "Bearer",
    "Bearer  ",
    "Basic b3BzOm9wcw==",
    "Bearer " + "x" * 7_000,
    "Bearer eyJhbGciOiJub25lIn0.eyJzdWIiOiJvcHMifQ.",
    "bearer ~",
    "Bearer a.b.c",
)

START_S: Final = 60.0

OPTIONS: Final = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.absolute_max_metadata_size", 1 << 24),
    ("grpc.enable_retries", 0),
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 200),
)


@dataclass
class Target:
    """A running stack.

    Attributes:
        stack: Its processes.
        ports: By service and door.
        secured: Its certificates and tokens; None: it is plain.
        scaler_pid: Of the scaler beside it; 0: there is none.
    """

    stack: LocalStack
    ports: dict[tuple[str, str], Port]
    secured: Secured | None
    scaler_pid: int = 0
    _channels: dict[tuple[str, str], grpc.aio.Channel] = field(default_factory=dict)

    @property
    def proofs(self) -> tuple[str, ...]:
        """What callers may show; a plain stack looks at none of it."""
        if self.secured is None:
            return TOKENLESS
        return (*TOKENLESS, *self.secured.tokens, "ops", "ops")

    def authorization(self, proof: str, number: int) -> tuple[tuple[str, str], ...]:
        """The metadata that prove who calls."""
        if proof == "":
            return ()
        if proof == "odd":
            value = ODD_AUTHORIZATIONS[number % len(ODD_AUTHORIZATIONS)]
        elif self.secured is None or proof == "forged":
            value = f"Bearer smq_{number}_forged"
        else:
            value = f"Bearer {self.secured.tokens[proof].token}"
        return (("authorization", value),)

    def channel(self, kind: str, door: str) -> grpc.aio.Channel:
        if (kind, door) not in self._channels:
            self._channels[kind, door] = self._open(self.ports[kind, door])
        return self._channels[kind, door]

    def _open(self, port: Port) -> grpc.aio.Channel:
        if self.secured is None:
            return grpc.aio.insecure_channel(port.address, OPTIONS)
        # At the port for services, the certificate of a client.
        certificates = self.secured.certificates
        ca, cert, key = (
            (certificates / name).read_bytes() for name in ("ca.crt", "client.crt", "client.key")
        )
        credentials = grpc.ssl_channel_credentials(ca, key, cert)
        options = (*OPTIONS, ("grpc.ssl_target_name_override", SERVICE_NAME))
        return grpc.aio.secure_channel(port.address, credentials, options)

    async def close(self) -> None:
        for channel in self._channels.values():
            await channel.close()

    @property
    def pids(self) -> dict[str, int]:
        """Of all that is attacked."""
        pids = {kind: self.stack.pids[kind] for kind in (*KINDS, "console")}
        return pids | ({"scaler": self.scaler_pid} if self.scaler_pid else {})

    def memory_bytes(self) -> dict[str, int]:
        """The proportional set size of each service; 0 for one that is gone."""
        return {kind: _pss_bytes(pid) for kind, pid in self.pids.items()}


def _pss_bytes(pid: int) -> int:
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return next(int(line.split()[1]) << 10 for line in text.splitlines() if line[:4] == "Pss:")


@asynccontextmanager
async def running(folder: Path, *, secured: bool, ready: bool = False) -> AsyncIterator[Target]:
    """A stack of its own, on this folder; `ready` as LocalStack has it."""
    made = None
    if secured:
        made = Secured(folder)
    with _environment(made.environ if made else {}):
        stack = LocalStack(
            folder / "stack",
            *("--data", str(folder / "stack" / "data"), "--http-ports", "0"),
            ready=ready,
        )
    try:
        target = Target(stack, await _ports(stack, made), made)
        try:
            # With certificates it takes calls of KEDA alone.
            async with nullcontext() if secured else _beside(target, folder):
                yield target
        finally:
            await target.close()
    finally:
        stack.close()


@asynccontextmanager
async def _beside(target: Target, folder: Path) -> AsyncIterator[None]:
    """A scaler."""
    ready = folder / "scaler.ready"
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "services.scaler", "--endpoint", target.stack.endpoint),
        *("--port", "0", "--ready-file", str(ready), "--parent-pid", str(os.getpid())),
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        async with asyncio.timeout(START_S):
            while not ready.exists():
                assert process.returncode is None, "the scaler ended while starting"
                await asyncio.sleep(0.01)
        address = json.loads(ready.read_text())["address"]
        target.ports["scaler", "clients"] = Port("scaler", "clients", address)
        target.scaler_pid = process.pid
        yield
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


async def _ports(stack: LocalStack, secured: Secured | None) -> dict[tuple[str, str], Port]:
    tls = name = None
    if secured is not None:
        certificates = secured.certificates
        tls = ssl.create_default_context(cafile=str(certificates / "ca.crt"))
        tls.load_cert_chain(certificates / "client.crt", certificates / "client.key")
        tls.set_alpn_protocols(["h2"])
        name = SERVICE_NAME
    pages = None
    if secured is not None:
        pages = ssl.create_default_context(cafile=str(secured.certificates / "ca.crt"))
    ports = {}
    for kind in KINDS:
        address = await peer_address(stack, kind)
        for door, at in (("clients", stack.endpoints[kind]), ("services", address)):
            ports[kind, door] = Port(kind, door, at, tls, name or "")
        ports[kind, "http"] = Port(kind, "http", stack.http_endpoints[kind], pages, name or "")
    at = stack.console.rpartition("/")[2]
    ports["console", "pages"] = Port("console", "pages", at, pages, "127.0.0.1" if pages else "")
    return ports


@contextmanager
def _environment(more: Mapping[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(more)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
