"""Every RPC that a process serves, found in the descriptors, so that new ones are among them."""

from __future__ import annotations

import pkgutil
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any

from google.protobuf.descriptor import Descriptor
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from libs.access.methods import access_of
from libs.serving.peers.elsewhere import PACKAGE, SERVED_BY
from libs.serving.reflection import SERVICE_NAMES
from slatemq import v1

KINDS = ("ingest", "router", "broker", "janitor")


@dataclass(frozen=True)
class Rpc:
    """One RPC.

    Attributes:
        path: As in `/slatemq.v1.QueueService/GetQueue`.
        request: The type of its requests.
        takes_many, gives_many: Whether it has a stream of requests, of responses.
        caller: Who may call: see MethodAccess.
        kinds: The processes that serve it.
    """

    path: str
    request: Descriptor
    takes_many: bool
    gives_many: bool
    caller: str
    kinds: tuple[str, ...]


@cache
def all_rpcs() -> tuple[Rpc, ...]:
    """All RPCs, in the order of their paths."""
    found = list(_of_service(health_pb2.DESCRIPTOR.services_by_name["Health"], KINDS))
    reflection = reflection_pb2.DESCRIPTOR.services_by_name["ServerReflection"]
    for name in SERVICE_NAMES:
        found += _of_service(reflection, KINDS, name)
    for info in pkgutil.iter_modules(v1.__path__, f"{v1.__name__}."):
        if info.name.endswith("_pb2"):
            module: Any = import_module(info.name)
            for service in module.DESCRIPTOR.services_by_name.values():
                kinds = SERVED_BY[service.full_name.removeprefix(PACKAGE)]
                found += _of_service(service, kinds)
    return tuple(sorted(found, key=lambda rpc: rpc.path))


def _of_service(service: Any, kinds: tuple[str, ...], name: str = "") -> Iterator[Rpc]:
    for method in service.methods:
        path = f"/{name or service.full_name}/{method.name}"
        yield Rpc(
            path,
            method.input_type,
            method.client_streaming,
            method.server_streaming,
            access_of(path).caller,
            kinds,
        )
