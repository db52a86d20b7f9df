from pathlib import Path

import pytest

from slatemq._rpc.rpc_status import raising_slatemq_errors
from slatemq.errors import InvalidArgument
from slatemq.v1 import ingest_pb2
from tests.integration.ingest.server import Ingest, message, serving


@pytest.fixture
def root(tmp_path: Path) -> str:
    return (tmp_path / "data").as_uri()


async def position(ingest: Ingest, received_at_ms: int) -> int:
    request = ingest_pb2.FindLogPositionRequest(received_at_ms=received_at_ms)
    with raising_slatemq_errors():
        return int((await ingest.stub.FindLogPosition(request, timeout=30)).after_sequence)


async def raised(ingest: Ingest) -> int:
    request = ingest_pb2.RaisePurgeEpochRequest()
    with raising_slatemq_errors():
        return int((await ingest.stub.RaisePurgeEpoch(request, timeout=30)).purge_epoch)


async def test_the_log_can_be_tailed_from_a_time_on(root: str) -> None:
    async with serving(root, shard=2) as ingest:
        assert await position(ingest, 0) == await position(ingest, 1 << 60) == 0
        for n in range(20):
            await ingest.publish(*[message(b"%d" % n)] * (n % 3 + 1))
        logged = await ingest.log()
        end = (await ingest.status()).durable_sequence
    async with serving(root, shard=2) as ingest:
        for one in logged:
            at = await position(ingest, one.received_at_ms)
            expected = [m for m in logged if m.received_at_ms >= one.received_at_ms]
            found = [] if at == end else (await ingest.tail(at))[0].messages
            assert found[0].message_id == expected[0].message_id
        assert await position(ingest, 0) == await position(ingest, logged[0].received_at_ms) == 0
        assert await position(ingest, logged[-1].received_at_ms + 1) == end
        assert await position(ingest, (1 << 63) - 1) == end


async def test_a_position_before_all_times_is_refused() -> None:
    async with serving() as ingest:
        with pytest.raises(InvalidArgument) as refused:
            await position(ingest, -1)
        assert refused.value.field == "received_at_ms"


async def test_the_purge_epoch_is_higher_after_each_call_and_each_restart(root: str) -> None:
    found = []
    for _ in range(2):
        async with serving(root) as ingest:
            found += [await raised(ingest), await raised(ingest)]
    assert found == [1, 2, 3, 4]


async def test_a_publish_shows_the_time_of_receipt() -> None:
    async with serving() as ingest:
        request = ingest_pb2.PublishRequest(runs=[message(b"a")], request_id="r")
        first = await ingest.stub.Publish(request, timeout=30)
        (logged,) = await ingest.log()
        assert first.received_at_ms == logged.received_at_ms
        await ingest.send(b"b")
        assert await ingest.stub.Publish(request, timeout=30) == first
