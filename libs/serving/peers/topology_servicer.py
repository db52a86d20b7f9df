"""GetTopology, which every process serves, so that a client needs one address only."""

from __future__ import annotations

from typing import Any

from libs.serving.peers.topology import TopologyDirectory
from slatemq.v1 import topology_pb2, topology_pb2_grpc

SERVICE_NAME = topology_pb2.DESCRIPTOR.services_by_name["TopologyService"].full_name
"""For `Service.grpc_services`."""


class TopologyServicer(topology_pb2_grpc.TopologyServiceServicer):
    """Serves the directory, whose short cache bounds what many clients cost the store."""

    def __init__(self, directory: TopologyDirectory) -> None:
        self._directory = directory

    async def GetTopology(  # noqa: N802 - the RPC's name
        self, request: topology_pb2.GetTopologyRequest, context: Any
    ) -> topology_pb2.GetTopologyResponse:
        """The processes known now. Raises StoreUnavailable."""
        topology = await self._directory.read()

        def endpoints(service: str) -> list[topology_pb2.Endpoint]:
            return [
                topology_pb2.Endpoint(shard=shard, address=address)
                for shard, address in topology.advertised(service).items()
            ]

        return topology_pb2.GetTopologyResponse(
            ingests=endpoints("ingest"),
            brokers=endpoints("broker"),
            routers=endpoints("router"),
            janitors=endpoints("janitor"),
        )
