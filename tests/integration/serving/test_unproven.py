"""A caller that proves nothing: refused before it has sent its request, on a real server."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
import yaml

from libs.access.callers import Callers
from libs.access.policy import Policy
from libs.access.reloading import ReloadedFile
from libs.access.token_file import TokenEntry, TokenFile
from libs.serving import limits
from libs.serving.peers.channels import open_channel
from libs.serving.requests import reading
from libs.serving.requests.auditing import Auditor
from libs.serving.requests.doors import ClientDoor
from libs.serving.requests.gate import Gate
from libs.serving.requests.guard import CallGuard
from libs.serving.telemetry import Telemetry
from slatemq._tokens import NewToken, new_token
from slatemq.v1 import ingest_pb2, ingest_pb2_grpc

pytestmark = pytest.mark.usefixtures("cheap_hashes")

SERVICE = "/slatemq.v1.IngestService/"
FORMS = {"Publish": "stream_unary", "PublishStream": "stream_stream"}
"""Each as a stream of bytes: so a call can begin without its request."""

SOME = """
roles: {publisher: [{verbs: [publish], queues: [orders]}]}
bindings: [{principals: [anonymous], roles: [publisher]}]
"""
NONE = SOME.replace("anonymous", "shop")


class Servicer(ingest_pb2_grpc.IngestServiceServicer):
    """Of an ingest, as far as these tests call it."""

    async def Publish(self, request: ingest_pb2.PublishRequest, context: Any) -> Any:  # noqa: N802
        return ingest_pb2.PublishResponse(message_ids=[1])

    async def BatchGetMessages(self, request: Any, context: Any) -> Any:  # noqa: N802
        return ingest_pb2.BatchGetMessagesResponse()

    async def PublishStream(self, requests: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802
        async for request in requests:
            answer = ingest_pb2.PublishStreamAnswer(number=request.number)
            yield ingest_pb2.PublishStreamResponse(answers=[answer])


@asynccontextmanager
async def served(
    folder: Path, policy: str, *, calls_max: int = 100, tokens: Sequence[NewToken] = ()
) -> AsyncIterator[grpc.aio.Channel]:
    file, token_file = folder / "policy.yaml", folder / "tokens.yaml"
    file.write_text(policy)
    token_file.write_text(yaml.safe_dump({"tokens": [one.entry for one in tokens]}))
    callers = Callers(
        ReloadedFile.of_document(file, Policy), ReloadedFile.of_document(token_file, TokenFile)
    )
    door = ClientDoor(callers, Auditor("broker-0", lambda act: None))
    gate = Gate(calls_max)
    gate.open()
    guard = CallGuard(gate, Telemetry()).of_door(door)
    server = grpc.aio.server(interceptors=[guard], options=limits.server_options())
    servicer: Any = Servicer  # Not all of it: so it is abstract.
    ingest_pb2_grpc.add_IngestServiceServicer_to_server(servicer(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with open_channel(f"127.0.0.1:{port}") as opened:
        yield opened
    await server.stop(0)


@pytest.mark.parametrize("authorization", ["", "Bearer forged"])
@pytest.mark.parametrize("method", FORMS)
async def test_a_caller_without_a_proof_is_refused_before_it_has_sent_its_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, authorization: str
) -> None:
    monkeypatch.setattr(reading, "PASS_OVER_S", 0.05)
    metadata = [("authorization", authorization)] if authorization else []
    async with served(tmp_path, NONE) as opened:
        call: Any = getattr(opened, FORMS[method])(SERVICE + method)(metadata=metadata, timeout=60)

        # Nothing of it is sent.
        assert await call.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_calls_whose_token_waits_for_its_check_take_no_place_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = ingest_pb2.PublishRequest(runs=[ingest_pb2.PublishRun(payloads=[b"x"])])
    made, other = new_token("shop"), new_token("shop")
    checking, released = threading.Event(), threading.Event()
    matches = TokenEntry.matches

    def slow(entry: TokenEntry, token: str) -> bool:
        if token == other.token:
            checking.set()
            released.wait()
        return matches(entry, token)

    monkeypatch.setattr(TokenEntry, "matches", slow)
    async with served(tmp_path, NONE, calls_max=1, tokens=[made, other]) as opened:
        stub: Any = ingest_pb2_grpc.IngestServiceStub(opened)
        first, second = ([("authorization", f"Bearer {one.token}")] for one in (other, made))
        waiting = stub.Publish(batch, timeout=3_600, metadata=first)
        await asyncio.to_thread(checking.wait)

        # Of one place in all
        assert (await stub.Publish(batch, timeout=60, metadata=second)).message_ids == [1]
        assert not waiting.done()
        released.set()
        assert (await waiting).message_ids == [1]


async def test_what_the_policy_permits_to_anonymous_is_served(tmp_path: Path) -> None:
    batch = ingest_pb2.PublishRequest(runs=[ingest_pb2.PublishRun(payloads=[b"x"])])
    async with served(tmp_path, SOME) as opened:
        stub: Any = ingest_pb2_grpc.IngestServiceStub(opened)
        assert (await stub.Publish(batch, timeout=60)).message_ids == [1]
        stream = stub.PublishStream(timeout=60)
        await stream.write(ingest_pb2.PublishStreamRequest(number=7, publish=batch))
        assert (await stream.read()).answers[0].number == 7
        stream.cancel()

        # And no call of another verb
        call: Any = opened.stream_unary(SERVICE + "BatchGetMessages")(timeout=60)
        assert await call.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_streams_that_are_passed_over_take_no_place_of_other_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "PASS_OVER_S", 3_600.0)
    begun: list[Any] = []
    pass_over = reading.RequestReader.pass_over

    async def counted(self: reading.RequestReader, *arguments: Any) -> None:
        begun.append(self)
        await pass_over(self, *arguments)

    monkeypatch.setattr(reading.RequestReader, "pass_over", counted)
    async with served(tmp_path, NONE) as opened:
        forged = (("authorization", "Bearer forged"),)
        streams: list[Any] = [
            opened.stream_stream(path)(metadata=forged, timeout=3_600)
            for path in [SERVICE + "PublishStream", "/absent.Service/Method"] * 8
        ]
        while len(begun) < len(streams):
            await asyncio.sleep(0.01)

        (reader,) = set(begun)
        assert not reader._with_payloads._arriving
        assert not reader._others._arriving
        assert reader._passed_over._arriving
        for stream in streams:
            stream.cancel()
