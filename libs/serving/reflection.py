"""Server reflection, v1 and v1alpha: the same messages under two names.

The package that serves it has v1alpha alone. What differs is the package's name in the descriptors,
so v1 is made from v1alpha.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any, Final

import grpc
import grpc.aio
from google.protobuf import descriptor_pool, text_format
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.rpc import error_details_pb2, status_pb2
from grpc_reflection.v1alpha import reflection, reflection_pb2

_ALPHA: Final = "grpc.reflection.v1alpha"
_STABLE: Final = "grpc.reflection.v1"

SERVICE_NAMES: Final = tuple(f"{package}.ServerReflection" for package in (_STABLE, _ALPHA))

_RESOLVED_BY_NAME: Final = (error_details_pb2, status_pb2)
"""Loaded so that reflection knows them: what clients decode error details with."""


def add_reflection(server: grpc.aio.Server, services: Sequence[str]) -> None:
    """Serve descriptors of these services, of health and reflection, and of error details."""
    _add_stable_descriptors()
    servicer = _Reflection((*services, *SERVICE_NAMES))
    handler = grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo,
        reflection_pb2.ServerReflectionRequest.FromString,
        reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    for name in SERVICE_NAMES:
        methods = {"ServerReflectionInfo": handler}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(name, methods),))


class _Reflection:
    """Answers each request of a stream, an invalid one with an error of its own."""

    def __init__(self, services: Sequence[str]) -> None:
        self._servicer: Any = reflection.aio.ReflectionServicer(services)

    async def ServerReflectionInfo(  # noqa: N802 - the RPC's name
        self, requests: AsyncIterator[Any], context: Any
    ) -> AsyncIterator[Any]:
        async for request in requests:
            try:
                async for answer in self._servicer.ServerReflectionInfo(_only(request), context):
                    yield answer
            except (LookupError, ValueError, OverflowError) as error:
                # How the descriptor pool says that a name or a number is unknown.
                yield reflection_pb2.ServerReflectionResponse(
                    original_request=request,
                    error_response=reflection_pb2.ErrorResponse(
                        error_code=grpc.StatusCode.NOT_FOUND.value[0], error_message=str(error)
                    ),
                )


async def _only(request: Any) -> AsyncIterator[Any]:
    yield request


def _add_stable_descriptors() -> None:
    pool = descriptor_pool.Default()
    path = "grpc/reflection/v1/reflection.proto"
    try:
        pool.FindFileByName(path)
    except KeyError:
        file = FileDescriptorProto()
        reflection_pb2.DESCRIPTOR.CopyToProto(file)
        # Type names stand with the package's in front; nothing else in the file has it.
        text = text_format.MessageToString(file).replace(_ALPHA, _STABLE)
        stable = text_format.Parse(text, FileDescriptorProto())
        stable.name = path
        pool.Add(stable)
