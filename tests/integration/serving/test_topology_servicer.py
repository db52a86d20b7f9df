import grpc.aio

from libs.serving.peers.topology import Peer, TopologyDirectory, TopologyServicer
from libs.storage.database.roots import open_root
from slatemq.v1 import topology_pb2, topology_pb2_grpc


async def test_one_address_shows_all_others() -> None:
    # Given an instance of four processes, one of which serves the topology
    directory = TopologyDirectory(open_root("memory:///").objects)
    for service, shard in (("broker", 1), ("broker", 0), ("ingest", 0), ("router", 0)):
        await directory.announce(Peer(service, shard, f"{service}-{shard}:7420"))
    server = grpc.aio.server()
    topology_pb2_grpc.add_TopologyServiceServicer_to_server(TopologyServicer(directory), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()

    # When a client asks it
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub = topology_pb2_grpc.TopologyServiceStub(channel)
        answer = await stub.GetTopology(topology_pb2.GetTopologyRequest())
    await server.stop(0)

    # Then it learns where everybody is
    endpoint = topology_pb2.Endpoint
    assert list(answer.brokers) == [
        endpoint(shard=0, address="broker-0:7420"),
        endpoint(shard=1, address="broker-1:7420"),
    ]
    assert [one.address for one in answer.ingests] == ["ingest-0:7420"]
    assert [one.address for one in answer.routers] == ["router-0:7420"]
