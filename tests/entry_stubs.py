"""One stub for the calls of the three services that look at entries."""

from typing import Any

import grpc.aio

from slatemq.v1.entry_pb2_grpc import DeadLetterServiceStub, DelayedServiceStub, EntryServiceStub


class EntryStubs:
    """Has the methods of EntryService, DelayedService and DeadLetterService."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._stubs = [
            service(channel)
            for service in (EntryServiceStub, DelayedServiceStub, DeadLetterServiceStub)
        ]

    def __getattr__(self, method: str) -> Any:
        for stub in self._stubs:
            if hasattr(stub, method):
                return getattr(stub, method)
        raise AttributeError(method)
