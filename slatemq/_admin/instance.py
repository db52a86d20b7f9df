"""The settings that are the same in all processes of an instance."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import grpc.aio

from slatemq._checks import message_of
from slatemq._rpc.queue_locations import Calls
from slatemq.errors import InvalidArgument
from slatemq.v1 import instance_pb2
from slatemq.v1.instance_pb2_grpc import InstanceServiceStub

SETTINGS: Final = tuple(instance_pb2.InstanceSettings.DESCRIPTOR.fields_by_name)
"""Their names."""


@dataclass(frozen=True, slots=True)
class Instance:
    """A record of the settings.

    Attributes:
        number: 1 for the first record, and one more with each change.
        written_at_ms: The time of the change, in ms since the Unix epoch.
        settings: The values by name, such as `replay_window_s`.
    """

    number: int
    written_at_ms: int
    settings: Mapping[str, int]


class InstanceCalls(Calls):
    """Reading and changing the settings, on any process; a part of the client."""

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
        for name in settings:
            if name not in SETTINGS:
                raise InvalidArgument(
                    "settings", f"{name!r} is not a setting of the instance: {', '.join(SETTINGS)}"
                )
        request = instance_pb2.UpdateInstanceRequest(
            settings=message_of(instance_pb2.InstanceSettings, **settings), accept_loss=accept_loss
        )
        response = await self._peers.ask(
            self._any_process, lambda channel: InstanceServiceStub(channel).UpdateInstance, request
        )
        return instance_of(response.instance)

    async def _any_process(self) -> grpc.aio.Channel:
        topology = await self._peers.topology()
        processes = (topology.ingests, topology.brokers, topology.routers, topology.janitors)
        addresses = [address for shards in processes for address in shards.values()]
        return self._peers.at(random.choice(addresses))


def instance_of(record: instance_pb2.Instance) -> Instance:
    settings = {field.name: value for field, value in record.settings.ListFields()}
    return Instance(record.number, record.written_at_ms, settings)
