"""Messages as bytes, for brokers: in every form the same messages, also from an earlier ingest."""

from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from libs.serving.peers.channels import Channels
from libs.serving.peers.topology import TopologyDirectory
from libs.storage.database.roots import open_root
from services.broker.delivery.message_cache import FETCH_BYTES, GONE, CachedMessage, IngestClient
from slatemq._rpc.rpc_status import raising_slatemq_errors
from slatemq.errors import InvalidArgument
from slatemq.v1 import ingest_pb2, ingest_pb2_grpc
from slatemq.v1.message_pb2 import Message
from tests.integration.ingest.server import Ingest, message, serving


async def never_given_out(root: str) -> int:
    """An ID that a process has skipped: its successor goes on in a new block."""
    async with serving(root) as ingest:
        (message_id,) = await ingest.send(b"before")
    return message_id + 1


async def published(ingest: Ingest) -> list[int]:
    """Messages of which some neighbours are alike, and some are not."""
    ids = await ingest.send(*(b"%d" % n for n in range(30)), kind="a")
    ids += await ingest.send(b"", b"x" * 70_000, b"y", kind="b", more="ü")
    ids += await ingest.publish(
        *(ingest_pb2.PublishRun(payloads=[b"%d" % n], created_at_ms=n // 2) for n in range(7))
    )
    return ids + await ingest.publish(message(b"last"))


async def asked(ingest: Ingest, **fields: Any) -> ingest_pb2.BatchGetPayloadsResponse:
    request = ingest_pb2.BatchGetPayloadsRequest(**fields)
    with raising_slatemq_errors():
        answer: ingest_pb2.BatchGetPayloadsResponse = await ingest.stub.BatchGetPayloads(
            request, timeout=30
        )
    return answer


def in_runs(answer: ingest_pb2.BatchGetPayloadsResponse) -> list[Message]:
    messages = []
    for run in answer.runs:
        for message_id, payload in zip(run.message_ids, run.payloads, strict=True):
            messages.append(Message.FromString(run.common))
            messages[-1].message_id, messages[-1].payload = message_id, payload
    return messages


def held_as(messages: dict[int, CachedMessage]) -> list[Message]:
    given = []
    for message_id, (payload, common) in messages.items():
        given.append(Message.FromString(common))
        given[-1].message_id, given[-1].payload = message_id, payload
    return given


@pytest.mark.parametrize("fresh", [True, False])
async def test_all_forms_have_the_same_messages(tmp_path: Path, fresh: bool) -> None:
    root = (tmp_path / "data").as_uri()
    never = await never_given_out(root)
    async with serving(root) as ingest:
        ids = await published(ingest)
        plain = await asked(ingest, message_ids=ids)
        if fresh:
            await check_forms(ingest, ids, never, plain)
    if not fresh:
        async with serving(root) as ingest:
            await check_forms(ingest, ids, never, plain)


async def check_forms(
    ingest: Ingest, ids: list[int], never: int, plain: ingest_pb2.BatchGetPayloadsResponse
) -> None:
    for bound in (0, 20, 80_000):
        for some in (ids, ids[::-1], ids[::3], [ids[0], never, *ids[5:9]]):
            bounds: dict[str, Any] = {"message_ids": some, "max_bytes": bound}
            expected = (await asked(ingest, **bounds)).messages
            each = await asked(ingest, **bounds, encoded=True)
            runs = await asked(ingest, **bounds, runs=True)
            both = await asked(ingest, **bounds, runs=True, encoded=True)
            assert [Message.FromString(one) for one in each.encoded_messages] == expected
            assert in_runs(runs) == in_runs(both) == expected
            assert list(each.encoded_ids) == [one.message_id for one in expected]
            assert list(each.payload_bytes) == [len(one.payload) for one in expected]
            assert not each.runs
            assert not runs.encoded_messages
            assert not both.encoded_messages
            assert runs.missing_ids == each.missing_ids == both.missing_ids
    everything = await asked(ingest, message_ids=ids, runs=True)
    assert in_runs(everything) == plain.messages
    assert len(everything.runs) == 7


@pytest.mark.parametrize("field", ["encoded", "runs"])
async def test_messages_as_bytes_have_no_etags(field: str) -> None:
    async with serving() as ingest:
        with pytest.raises(InvalidArgument) as refused:
            await asked(ingest, message_ids=[1], with_etags=True, **{field: True})
        assert refused.value.field == field


@pytest.mark.parametrize("knows_runs", [True, False])
async def test_a_broker_reads_what_an_ingest_of_any_version_gives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, knows_runs: bool
) -> None:
    forms = []

    def stub(channel: grpc.aio.Channel) -> Any:
        there = ingest_pb2_grpc.IngestServiceStub(channel)

        class Stub:
            async def BatchGetPayloads(self, request: Any, timeout: float) -> Any:  # noqa: N802
                request.runs = request.runs and knows_runs
                answer = await there.BatchGetPayloads(request, timeout=timeout)
                forms.append((bool(answer.runs), bool(answer.encoded_messages)))
                return answer

        return Stub()

    monkeypatch.setattr("services.broker.delivery.message_cache.IngestServiceStub", stub)
    root = (tmp_path / "data").as_uri()
    never = await never_given_out(root)
    async with serving(root) as ingest:
        ids = await published(ingest)
        expected = (await asked(ingest, message_ids=ids)).messages
        channels = Channels(TopologyDirectory(open_root(root).objects))
        held, size_bytes, gone, _ = await IngestClient(channels).fetch(
            0, [*ids, never], FETCH_BYTES
        )
        await channels.close()

    assert forms == [(knows_runs, not knows_runs)]
    assert held_as(held) == expected
    assert size_bytes == sum(len(payload) + len(common) for payload, common in held.values())
    assert gone == {never: GONE}
