"""Whatever bytes come to whichever method: an answer that says what is wrong; service goes on."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import grpc.aio
import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health, health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from libs.serving.peers.elsewhere import SERVED_BY
from libs.serving.reflection import SERVICE_NAMES
from slatemq._rpc.rpc_status import from_rpc_error
from tests.forms import seeds
from tests.integration.stack.processes import Service
from tests.services import service_of
from tests.unsent import UNSENT

FAULTS = frozenset({grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL, grpc.StatusCode.CANCELLED})
"""What no caller is answered, whatever was sent."""

TIMES = 12
"""Calls of each method."""

KINDS = ("ingest", "broker", "router", "janitor")

REFLECTION = reflection_pb2.DESCRIPTOR.services_by_name["ServerReflection"]


class Method(NamedTuple):
    """A method as callers know it."""

    path: str
    request: Descriptor
    takes_many: bool
    gives_many: bool


ELSEWHERE = {("router", "/slatemq.v1.InstanceService/UpdateInstance")}
"""Calls that a process refuses, though it serves others of their service: WRONG_SERVICE."""


def methods_of(service: Any, name: str = "") -> Iterator[Method]:
    for one in service.methods:
        path = f"/{name or service.full_name}/{one.name}"
        yield Method(path, one.input_type, one.client_streaming, one.server_streaming)


def methods_at(kind: str) -> list[Method]:
    found = list(methods_of(health_pb2.DESCRIPTOR.services_by_name["Health"]))
    for name in SERVICE_NAMES:
        found += methods_of(REFLECTION, name)
    for name, kinds in SERVED_BY.items():
        if kind in kinds:
            found += methods_of(service_of(name))
    return found


def garbage(chance: random.Random, request: Descriptor) -> bytes:
    """Bytes of one of many sorts, from none at all to a request that could be meant."""
    valid = some_message(chance, request, 3)
    sort = chance.randrange(9)
    if sort == 0:
        return b""
    if sort == 1:
        return chance.randbytes(chance.randrange(1, 200))
    if sort == 2:
        return valid[: chance.randrange(len(valid) + 1)]
    if sort == 3:
        return valid + bytes([chance.randrange(256)])
    if sort == 4:  # text that is none
        return b"".join(
            bytes([field.number << 3 | 2, 2, 0xC3, 0x28])
            for field in request.fields
            if field.number < 16
        )
    if sort == 5:  # messages in messages, deeper than any parser goes
        inner = b""
        for _ in range(200):
            if len(inner) > 120:
                break
            inner = bytes([chance.randrange(1, 16) << 3 | 2, len(inner)]) + inner
        return inner
    if sort == 6:  # groups, which no one has used for a decade
        return bytes([0x0B] * chance.randrange(1, 100))
    if sort == 7:  # numbers of too many bytes, and lengths beyond the end
        return bytes([chance.randrange(1, 16) << 3 | chance.choice((0, 2))]) + b"\xff" * 11
    return valid


def some_message(chance: random.Random, descriptor: Descriptor, depth: int) -> bytes:
    """A message of this type with fields of any value."""
    message: Any = GetMessageClass(descriptor)()
    for field in descriptor.fields:
        if chance.random() < 0.4:
            fill(chance, message, field, depth)
    data: bytes = message.SerializeToString()
    return data


def fill(chance: random.Random, message: Any, field: FieldDescriptor, depth: int) -> None:
    inner = field.message_type
    if inner is not None and inner.GetOptions().map_entry:
        value = inner.fields_by_name["value"].message_type
        for _ in range(chance.randrange(3)):
            key, target = some_text(chance), getattr(message, field.name)
            if value is None:
                target[key] = some_text(chance)
            else:
                target[key].MergeFromString(some_message(chance, value, 0))
    elif inner is not None:
        if depth:
            data = some_message(chance, inner, depth - 1)
            target = getattr(message, field.name)
            (target.add() if field.is_repeated else target).MergeFromString(data)
    elif field.is_repeated:
        values = [some_value(chance, field) for _ in range(chance.randrange(4))]
        getattr(message, field.name).extend(values)
    else:
        setattr(message, field.name, some_value(chance, field))


def some_value(chance: random.Random, field: FieldDescriptor) -> Any:
    match field.cpp_type:
        case FieldDescriptor.CPPTYPE_STRING:
            text = some_text(chance)
            return text.encode() if field.type == FieldDescriptor.TYPE_BYTES else text
        case FieldDescriptor.CPPTYPE_BOOL:
            return chance.random() < 0.5
        case FieldDescriptor.CPPTYPE_DOUBLE | FieldDescriptor.CPPTYPE_FLOAT:
            return chance.choice((0.0, -1.0, float("inf"), float("nan")))
        case FieldDescriptor.CPPTYPE_INT64:
            return chance.choice((0, 1, -1, (1 << 63) - 1, -(1 << 63), chance.getrandbits(40)))
        case FieldDescriptor.CPPTYPE_UINT64:
            return chance.choice((0, 1, (1 << 64) - 1))
        case FieldDescriptor.CPPTYPE_UINT32:
            return chance.choice((0, 1, (1 << 32) - 1))
        case _:
            return chance.choice((0, 1, -1, 7, (1 << 31) - 1, -(1 << 31)))


def some_text(chance: random.Random) -> str:
    texts = ("", "q", "orders", "\x00", "../..", "é" * 300, "q/1/f1", "google.rpc.Status", "1-2")
    return chance.choice(texts)


async def ending(
    channel: grpc.aio.Channel, method: Method, *requests: bytes, timeout_s: float = 0.5
) -> grpc.aio.AioRpcError:
    """The error of a call; its code is OK where the call went well."""

    async def sent() -> AsyncIterator[bytes]:
        for request in requests:
            yield request

    ends = ("stream" if many else "unary" for many in (method.takes_many, method.gives_many))
    call: Any = getattr(channel, "_".join(ends))(method.path)
    made: Any = call(sent() if method.takes_many else requests[0], timeout=timeout_s)
    try:
        if method.gives_many:
            async for _ in made:
                pass
        else:
            await made
    except grpc.aio.AioRpcError as error:
        return error
    return grpc.aio.AioRpcError(
        grpc.StatusCode.OK, grpc.aio.Metadata(), grpc.aio.Metadata(), details=""
    )


@pytest.mark.parametrize("seed", seeds(20))
@pytest.mark.parametrize("kind", KINDS)
async def test_no_request_is_answered_as_a_fault_of_ours(
    tmp_path: Path, kind: str, seed: int
) -> None:
    chance = random.Random(f"{kind} {seed}")
    services = [Service(tmp_path, one) for one in dict.fromkeys(("ingest", kind))]
    try:
        for one in services:
            await one.start()
        channel = services[-1].there
        seen: Counter[grpc.StatusCode] = Counter()
        for method in methods_at(kind):
            calls = [
                tuple(garbage(chance, method.request) for _ in range(1 + 2 * method.takes_many))
                for _ in range(TIMES)
            ]
            ended = await asyncio.gather(*(ending(channel, method, *one) for one in calls))
            for requests, error in zip(calls, ended, strict=True):
                is_lost = method.takes_many and error.details() == UNSENT
                assert error.code() not in FAULTS or is_lost, (method.path, requests, error)
                if method.path.startswith("/slatemq.") and (kind, method.path) not in ELSEWHERE:
                    assert error.code() is not grpc.StatusCode.UNIMPLEMENTED, method.path
                seen[error.code()] += 1
                if error.code() is grpc.StatusCode.INVALID_ARGUMENT:
                    assert from_rpc_error(error).reason, (method.path, requests, error)

        # Then it serves on
        assert seen[grpc.StatusCode.INVALID_ARGUMENT] > len(methods_at(kind))
        check: Any = channel.unary_unary(
            f"/{health.SERVICE_NAME}/Check",
            response_deserializer=health_pb2.HealthCheckResponse.FromString,
        )
        assert (await check(b"", timeout=60)).status == health_pb2.HealthCheckResponse.SERVING
    finally:
        for one in services:
            await one.close()
