"""Examining the processes of the instance, and who the caller is: for `slatemq doctor`."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import grpc

from slatemq._admin.instance import ANSWER_S, STATUS_S, InstanceCalls
from slatemq._clocks import skew_of
from slatemq._requests import fields_of
from slatemq._rpc.peers import errors_translated
from slatemq._rpc.rpc_status import from_rpc_error
from slatemq.errors import DeadlineExceeded, ResourceExhausted, Unavailable
from slatemq.models import now_ms
from slatemq.v1 import access_check_pb2, access_pb2, instance_pb2
from slatemq.v1.access_check_pb2_grpc import AccessServiceStub
from slatemq.v1.instance_pb2_grpc import InstanceServiceStub


class CertificateExpiry(NamedTuple):
    """When the first certificate of a file expires, in ms since the Unix epoch."""

    file: str
    subject: str
    expires_at_ms: int


@dataclass(frozen=True, slots=True)
class Examination:
    """What one process has found; instance.proto has the fields.

    Attributes:
        asked: The service and the shard whose address the topology has.
        address: Where it was asked.
        skew_ms: By how much at least its clock is ahead of this machine's; negative: behind.
        problem: Why it did not answer, with the kind of the error; empty when it did.
    """

    asked: tuple[str, int]
    address: str
    service: str = ""
    shard: int = 0
    version: str = ""
    started_at_ms: int = 0
    skew_ms: int = 0
    store_problem: str = ""
    store_test_ms: int | None = None
    store_clock_ahead_ms: int | None = None
    disk_free_bytes: int | None = None
    disk_size_bytes: int | None = None
    uncompacted_tables: int | None = None
    uncompacted_tables_max: int | None = None
    durable_sequence: int | None = None
    certificates: tuple[CertificateExpiry, ...] = ()
    wal_store: str = ""
    wal_store_problem: str = ""
    wal_store_test_ms: int | None = None
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Caller:
    """Who this client is to the instance.

    Attributes:
        principal: The name; empty where there is no policy.
        verbs: What it may do on some queue, or at all.
        inspected_queues: The patterns of the queues that it may inspect, in which a `*` stands for
            any characters.
    """

    principal: str
    verbs: Sequence[str]
    inspected_queues: Sequence[str] = ()


class ExaminingCalls(InstanceCalls):
    """Examining an instance; a part of the client."""

    async def get_caller(self) -> Caller:
        """Who this client is, and what it may do. Raises Unauthenticated, Unavailable."""
        found = await self._peers.ask(
            self._any_process,
            lambda channel: AccessServiceStub(channel).GetCaller,
            access_check_pb2.GetCallerRequest(),
        )
        return _caller_of(found)

    async def get_callers(self) -> dict[int, Caller]:
        """Who this client is to each broker shard, which has loaded the policy by itself.

        Brokers that do not answer within some seconds are left out. Raises Unauthenticated,
        Unavailable (no process answers).
        """
        brokers = {
            shard: address
            for service, shard, address in await self._processes()
            if service == "broker"
        }
        answers = asyncio.gather(*map(self._caller_at, brokers.values()))
        found = await self._peers.unless_closed(answers)
        return {shard: one for shard, one in zip(brokers, found, strict=True) if one is not None}

    async def _caller_at(self, address: str) -> Caller | None:
        stub = AccessServiceStub(self._peers.at(address))
        try:
            with errors_translated():
                return _caller_of(
                    await stub.GetCaller(access_check_pb2.GetCallerRequest(), timeout=STATUS_S)
                )
        except (Unavailable, DeadlineExceeded, ResourceExhausted):
            return None

    async def examine(self) -> list[Examination]:
        """Have every process examine itself; takes the verb `operate`.

        A process that does not answer within some seconds has a `problem`.
        """
        answers = asyncio.gather(*(self._examine(*one) for one in await self._processes()))
        return await self._peers.unless_closed(answers)

    async def _examine(self, service: str, shard: int, address: str) -> Examination:
        asked = (service, shard)
        stub = InstanceServiceStub(self._peers.at(address))
        sent_ms = now_ms()
        try:
            found = await stub.ExamineProcess(
                instance_pb2.ExamineProcessRequest(), timeout=ANSWER_S
            )
        except grpc.RpcError as error:
            return Examination(asked, address, problem=from_rpc_error(error).message)
        skew_ms = skew_of(found.now_ms, sent_ms)
        certificates = tuple(
            CertificateExpiry(one.file, one.subject, one.expires_at_ms)
            for one in found.certificates
        )
        return Examination(
            asked,
            address,
            **fields_of(found, Examination),
            skew_ms=skew_ms,
            certificates=certificates,
        )


def _caller_of(found: access_check_pb2.GetCallerResponse) -> Caller:
    verbs = [access_pb2.Verb.Name(verb).removeprefix("VERB_").lower() for verb in found.verbs]
    return Caller(found.principal, verbs, tuple(found.inspected_queues))
