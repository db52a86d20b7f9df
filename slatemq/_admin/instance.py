"""The settings that all processes of the instance have alike; a part of the client."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from slatemq._checks import message_of
from slatemq._rpc.peers import Peers
from slatemq.errors import InvalidArgument
from slatemq.v1 import instance_pb2, instance_pb2_grpc

SETTINGS: Final = tuple(instance_pb2.InstanceSettings.DESCRIPTOR.fields_by_name)
"""Their names."""


@dataclass(frozen=True, slots=True)
class Instance:
    """A record of the settings.

    Attributes:
        number: 1 for the first record, and one more with each change.
        written_at_ms: When it was written, in ms since the Unix epoch.
        settings: The values by name, such as `replay_window_s`.
    """

    number: int
    written_at_ms: int
    settings: Mapping[str, int]


class InstanceCalls:
    """Reading and changing the settings; a part of the client. Any process answers."""

    _peers: Peers

    async def get_instance(self) -> Instance:
        """The latest settings. Raises Unavailable, DataLoss."""
        request = instance_pb2.GetInstanceRequest()
        return instance_of((await self._ask_any("GetInstance", request)).instance)

    async def update_instance(
        self, settings: Mapping[str, int], *, accept_loss: bool = False
    ) -> Instance:
        """Changes these settings; each process follows once it is started again.

        `accept_loss` permits a shorter `replay_window_s` or `purge_grace_s`. Raises
        FailedPrecondition (CHANGE_LOSES, PAYLOADS_STORED, QUEUES_DELAY_LONGER), InvalidArgument,
        Unavailable, DataLoss.
        """
        for name in settings:
            if name not in SETTINGS:
                raise InvalidArgument(
                    "settings", f"{name!r} is not a setting of the instance: {', '.join(SETTINGS)}"
                )
        request = instance_pb2.UpdateInstanceRequest(
            settings=message_of(instance_pb2.InstanceSettings, **settings), accept_loss=accept_loss
        )
        return instance_of((await self._ask_any("UpdateInstance", request)).instance)

    async def _ask_any(self, method: str, request: Any) -> Any:
        async def attempt(timeout: float) -> Any:
            topology = await self._peers.topology()
            processes = (topology.ingests, topology.brokers, topology.routers, topology.janitors)
            addresses = [address for shards in processes for address in shards.values()]
            stub = instance_pb2_grpc.InstanceServiceStub(self._peers.at(random.choice(addresses)))
            return await getattr(stub, method)(request, timeout=timeout)

        return await self._peers.call(attempt)


def instance_of(record: instance_pb2.Instance) -> Instance:
    """The record as users see it."""
    settings = {field.name: value for field, value in record.settings.ListFields()}
    return Instance(record.number, record.written_at_ms, settings)
