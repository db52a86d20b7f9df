"""PublishStream on a real ingest: every request for itself, whatever becomes of the others."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from libs.serving import recording, telemetry
from libs.serving.peers.channels import open_channel
from services.ingest.config import IngestConfig
from services.ingest.rpc import ingest as servicer
from slatemq._rpc.rpc_status import from_status, raising_slatemq_errors
from slatemq.errors import InvalidArgument, ResourceExhausted, SlateMQError, Unavailable
from slatemq.v1 import ingest_pb2
from slatemq.v1.ingest_pb2 import PublishRequest, PublishRun, PublishStreamRequest
from tests.configs import config_of
from tests.integration.ingest.server import Ingest, Server, message, process, serving
from tests.integration.ingest.test_ingest import BAD_PUBLISHES, bad_publish
from tests.integration.waiting import eventually

METHOD = "/slatemq.v1.IngestService/PublishStream"


class Stream:
    """A client's end of a stream."""

    def __init__(self, ingest: Ingest) -> None:
        self._call: Any = ingest.stub.PublishStream()
        self._number = 0

    async def send(
        self, *messages: PublishRun, request_id: str = "", number: int | None = None
    ) -> int:
        return await self.ask(PublishRequest(runs=messages, request_id=request_id), number)

    async def ask(self, request: PublishRequest, number: int | None = None) -> int:
        self._number = self._number + 1 if number is None else number
        with raising_slatemq_errors():
            await self._call.write(PublishStreamRequest(number=self._number, publish=request))
        return self._number

    async def answers(self, count: int) -> dict[int, ingest_pb2.PublishResponse | SlateMQError]:
        """As many answers, by number."""
        publish_responses: dict[int, ingest_pb2.PublishResponse | SlateMQError] = {}
        while len(publish_responses) < count:
            with raising_slatemq_errors():
                response = await asyncio.wait_for(self._call.read(), 60)
            if response is grpc.aio.EOF:
                break
            assert response.answers
            for answer in response.answers:
                assert answer.number not in publish_responses
                failed = answer.HasField("error")
                publish_responses[answer.number] = (
                    from_status(answer.error) if failed else answer.published
                )
        return publish_responses

    async def ids(self, count: int) -> dict[int, list[int]]:
        answers = await self.answers(count)
        assert all(isinstance(one, ingest_pb2.PublishResponse) for one in answers.values()), answers
        return {at: list(one.message_ids) for at, one in answers.items()}  # type: ignore[union-attr]

    async def end(self) -> None:
        await self._call.done_writing()

    def cancel(self) -> None:
        self._call.cancel()


@asynccontextmanager
async def server(**settings: Any) -> AsyncIterator[tuple[Server, Ingest]]:
    made = Server(config_of(IngestConfig, root="memory:///", **settings), telemetry.Telemetry())
    await made.start()
    try:
        async with open_channel(made.address) as channel:
            yield made, Ingest(channel)
    finally:
        await made.stop()


async def test_requests_are_stored_in_their_order_and_answered_with_their_numbers() -> None:
    async with serving(shard=3) as ingest:
        stream = Stream(ingest)
        numbers = [
            await stream.send(*(message(b"%d-%d" % (n, m), n=str(n)) for m in range(n % 3 + 1)))
            for n in range(50)
        ]
        result = await stream.ids(50)

        ids = [one for number in numbers for one in result[number]]
        assert ids == sorted(ids)
        assert await ingest.payloads(*ids) == [
            b"%d-%d" % (n, m) for n in range(50) for m in range(n % 3 + 1)
        ]
        assert [one.message_id for one in await ingest.log()] == ids

        # And when the producer has no more, the stream ends well
        await stream.end()
        assert await stream.answers(1) == {}


async def test_what_is_sent_before_the_end_is_answered() -> None:
    async with serving(commit_interval_ms="100") as ingest:
        stream = Stream(ingest)
        for n in range(20):
            await stream.send(message(b"%d" % n))
        await stream.end()
        assert len(await stream.ids(20)) == 20


async def test_a_negative_time_for_an_answer_is_refused() -> None:
    async with serving() as ingest:
        publish = PublishRequest(runs=[message(b"x")])
        bad = PublishStreamRequest(number=1, publish=publish, timeout_ms=-1)
        good = PublishStreamRequest(number=2, publish=publish, timeout_ms=1)
        parts = [part async for part in ingest.stub.PublishStream(iter([bad, good]))]
        refused, stored = sorted(
            (answer for part in parts for answer in part.answers), key=lambda one: one.number
        )
        problem = from_status(refused.error)
        assert isinstance(problem, InvalidArgument)
        assert problem.field == "timeout_ms"
        assert list(stored.published.message_ids) == [one.message_id for one in await ingest.log()]


@pytest.mark.parametrize(("field", "request_"), BAD_PUBLISHES)
async def test_a_bad_request_names_its_field_and_harms_no_other(field: str, request_: Any) -> None:
    async with serving(payload_bytes_max=1000) as ingest:
        stream = Stream(ingest)
        good = await stream.send(message(b"before"))
        bad = await stream.ask(bad_publish(request_))
        later = await stream.send(message(b"after"))
        answers = await stream.answers(3)

        refused = answers[bad]
        assert isinstance(refused, InvalidArgument)
        assert refused.field == field
        stored = [answers[number] for number in (good, later)]
        ids = [one for answer in stored for one in answer.message_ids]  # type: ignore[union-attr]
        assert [one.message_id for one in await ingest.log()] == ids
        assert len(ids) == 2


@pytest.mark.parametrize(
    ("field", "data"),
    [
        pytest.param("", b"\xff\xff\xff", id="no message"),
        pytest.param(
            "publish.runs[0].dedupe_keys[0]",
            b"\x12\x06\x0a\x04\x3a\x02\xff\xfe",
            id="a text that is no UTF-8",
        ),
        pytest.param("", b"\x0a" + b"\x80" * 12, id="a length without an end"),
    ],
)
async def test_bytes_that_are_no_request_end_the_stream_and_what_came_before_is_answered(
    field: str, data: bytes
) -> None:
    async with serving() as ingest:
        call: Any = ingest.channel.stream_stream(
            METHOD, response_deserializer=ingest_pb2.PublishStreamResponse.FromString
        )()
        good = PublishStreamRequest(number=7, publish=PublishRequest(runs=[message(b"x")]))
        await call.write(good.SerializeToString())
        await call.write(data)
        (answer,) = (await call.read()).answers
        assert answer.number == 7
        with pytest.raises(InvalidArgument) as refused, raising_slatemq_errors():
            await call.read()
        assert (refused.value.reason, refused.value.field) == ("UNDECODABLE", field)
        assert len(await ingest.log()) == 1


async def test_a_request_without_a_batch_is_refused_alone() -> None:
    async with serving() as ingest:
        stream = Stream(ingest)
        number = await stream.ask(PublishRequest())
        answers = await stream.answers(1)
        assert isinstance(answers[number], InvalidArgument)
        await stream.send(message())
        assert len(await stream.ids(1)) == 1


async def test_a_repeat_is_stored_once_wherever_it_comes() -> None:
    async with serving() as ingest:
        first, second = Stream(ingest), Stream(ingest)
        # Given the same request on two streams and twice on one of them, before any is answered
        for stream in (first, first, second):
            await stream.send(message(b"x"), request_id="r")
        (here, again), (there,) = (await first.ids(2)).values(), (await second.ids(1)).values()

        # Then all get the same ID, and so does a call later, and a stream
        assert here == again == there == await ingest.send(b"x", request_id="r")
        number = await second.send(message(b"x"), request_id="r")
        assert (await second.ids(1))[number] == here
        assert len(await ingest.log()) == 1

        # And other content is refused
        number = await second.send(message(b"y"), request_id="r")
        refused = (await second.answers(1))[number]
        assert isinstance(refused, InvalidArgument)
        assert refused.reason == "REQUEST_ID_REUSED"


async def test_keys_and_large_payloads_go_beside_plain_messages(tmp_path: Path) -> None:
    large = os.urandom(100_000)
    async with serving((tmp_path / "data").as_uri()) as ingest:
        stream = Stream(ingest)
        plain = await stream.send(message(b"plain"))
        blob = await stream.send(message(large))
        key = await stream.send(PublishRun(payloads=[b"1"], dedupe_keys=["k"]))
        again = await stream.send(PublishRun(payloads=[b"2"], dedupe_keys=["k"]), message(b"new"))
        result = await stream.answers(4)
        answers = [result[at] for at in (plain, blob, key, again)]
        ids = [list(one.message_ids) for one in answers]  # type: ignore[union-attr]
        assert ids[3][0] == ids[2][0]
        assert list(answers[3].duplicates) == [0]  # type: ignore[union-attr]
        assert await ingest.payloads(ids[0][0], ids[1][0], ids[2][0], ids[3][1]) == [
            b"plain", large, b"1", b"new",
        ]  # fmt: skip


async def test_too_much_at_once_is_refused_request_by_request() -> None:
    # Given room for about two of them, and a commit that takes a while
    async with server(uncommitted_bytes_max=30_000) as (running, ingest):
        stream = Stream(ingest)
        await stream.send(message(b"first"))
        await stream.ids(1)
        async with running.commits.hold:
            for n in range(10):
                await stream.send(message(b"%d" % n * 10_000), request_id=f"r{n}")
            answers = await stream.answers(1)
        answers |= await stream.answers(9)
        refused = {at: one for at, one in answers.items() if isinstance(one, SlateMQError)}
        assert refused
        assert len(refused) < 10
        for error in refused.values():
            assert isinstance(error, ResourceExhausted)
            assert error.reason == "UNCOMMITTED_BYTES"
            assert (error.retry_after_ms or 0) > 0

        # Then those refused can be repeated under their IDs
        for at in refused:
            await stream.send(message(b"%d" % (at - 2) * 10_000), request_id=f"r{at - 2}")
            await stream.ids(1)
        assert len(await ingest.log()) == 11


async def test_so_many_requests_wait_for_answers_and_the_others_in_the_connection() -> None:
    async with server() as (running, ingest):
        stream = Stream(ingest)
        await stream.send(message(b"first"))
        await stream.ids(1)

        # When four times as many requests come, during a commit, as may be without an answer
        count = 4 * servicer.UNANSWERED_MAX
        async with running.commits.hold:
            sending = asyncio.create_task(send_many(stream, count))
            (served,) = running.servicer._streams
            await eventually(lambda: served._unanswered == servicer.UNANSWERED_MAX)
        seen = list[int]()

        async def watch() -> None:
            while True:
                seen.append(served._unanswered)
                await asyncio.sleep(0)

        watching = asyncio.create_task(watch())

        # Then all of them are answered in the end, and never more wait than may
        assert len(await stream.ids(count)) == count
        await sending
        watching.cancel()
        assert max(seen) == servicer.UNANSWERED_MAX


async def test_answers_that_are_not_read_have_a_bounded_number_of_messages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(servicer, "UNANSWERED_MESSAGES_MAX", 100)
    monkeypatch.setattr(servicer, "RESPONSE_MESSAGES_MAX", 30)
    async with server() as (running, ingest):
        stream = Stream(ingest)
        await stream.send(message(b"first"))
        await stream.ids(1)
        (served,) = running.servicer._streams
        unanswered, answered = list[int](), list[int]()
        take = servicer._Stream._take

        def noted_take(
            stream: servicer._Stream, number: int, request: PublishRequest, timeout_ms: int
        ) -> Awaitable[Exception | None]:
            unanswered.append(stream._unanswered)
            return take(stream, number, request, timeout_ms)

        monkeypatch.setattr(servicer._Stream, "_take", noted_take)

        # When requests of many small messages come, good and bad ones, stored in both ways
        async def send() -> None:
            for n in range(60):
                keys = [f"{n} {m}" for m in range(10)] if n % 3 == 0 else []
                run = PublishRun(payloads=[b""] * 10, dedupe_keys=keys)
                await stream.send(*([] if n % 10 == 9 else [run]))

        async with running.commits.hold:
            sending = asyncio.create_task(send())
            await eventually(lambda: served._room is not None or len(unanswered) == 60)

        # Then all are answered, in responses of few messages, and few were waiting at any time
        async with asyncio.timeout(60):
            while len(answered) < 60:
                response = await stream._call.read()
                counts = [len(one.published.message_ids) for one in response.answers]
                assert sum(counts) <= 30
                answered += counts
            await sending
        assert sum(answered) == 54 * 10
        assert max(unanswered) <= 11
        assert (served._unanswered, served._unanswered_messages) == (0, 0)


async def send_many(stream: Stream, count: int) -> None:
    for n in range(count):
        await stream.send(message(b"%d" % n))


async def test_a_drain_answers_what_it_has_read_and_ends_the_stream() -> None:
    async with server() as (running, ingest):
        stream = Stream(ingest)
        await stream.send(message(b"first"))
        await stream.ids(1)
        async with running.commits.hold:
            number = await stream.send(message(b"read"))
            (served,) = running.servicer._streams
            await eventually(lambda: served._unanswered == 1)

            # When it drains
            await running.service.drain()

        # Then what it has read is answered, the stream ends, and none begins
        assert list(await stream.ids(1)) == [number]
        for one in (stream, Stream(ingest)):
            with pytest.raises(Unavailable) as refused:
                await one.answers(1)
            assert refused.value.reason == "DRAINING"
        assert not running.servicer._streams


async def test_a_producer_that_goes_leaves_nothing_behind() -> None:
    async with server() as (running, ingest):
        stream = Stream(ingest)
        await stream.send(message(b"first"))
        await stream.ids(1)
        servicer_of = running.servicer
        (served,) = servicer_of._streams
        async with running.commits.hold:
            await stream.send(message(b"on its way"))
            await stream.send(PublishRun(payloads=[b"with a key"], dedupe_keys=["k"]))
            await eventually(lambda: served._unanswered == 2)

            stream.cancel()

        await eventually(lambda: not servicer_of._streams and running.gate.calls.count == 0)
        # What was on its way may be stored; its answer has no one to go to, and nothing breaks.
        later = await ingest.send(b"later")
        payloads = await ingest.payloads(*(one.message_id for one in await ingest.log()))
        assert payloads[:2] == [b"first", b"on its way"]
        assert (await ingest.payloads(*later)) == [b"later"]
        assert not served._tasks


async def test_spans_are_made_for_each_request_as_for_calls() -> None:
    spans = InMemorySpanExporter()
    result = recording.recording(
        "ingest", "ingest-0", SimpleSpanProcessor(spans), InMemoryMetricReader()
    )
    async with serving(telemetry=result) as ingest:
        stream = Stream(ingest)
        await stream.send(message(b"a"))
        await stream.send(message(b"b", traceparent="mine"))
        ids = [one for many in (await stream.ids(2)).values() for one in many]
        headers = [dict(one.headers) for one in (await ingest.read(*sorted(ids))).messages]
        published = [span for span in spans.get_finished_spans() if span.name == "publish"]
        assert len(published) == 2
        traces = {f"{span.context.trace_id:032x}" for span in published if span.context}
        assert any(trace in headers[0]["traceparent"] for trace in traces)
        assert headers[1] == {"traceparent": "mine"}
        await stream.end()
        await stream.answers(1)
    result.shutdown()


@pytest.mark.slow
async def test_a_kill_loses_nothing_answered_and_a_repeat_is_stored_once(tmp_path: Path) -> None:
    root, ready = (tmp_path / "data").as_uri(), tmp_path / "ready"
    sent: dict[str, bytes] = {}
    answered: dict[str, list[int]] = {}

    async def publish(ingest: Ingest, name: int) -> None:
        """Several at once, until the stream breaks."""
        stream, names = Stream(ingest), {}
        try:
            for n in range(1_000_000):
                for part in range(3):
                    request_id = f"{name}-{n}-{part}"
                    sent[request_id] = request_id.encode()
                    number = await stream.send(message(sent[request_id]), request_id=request_id)
                    names[number] = request_id
                answered.update({names[at]: ids for at, ids in (await stream.ids(3)).items()})
        except (SlateMQError, grpc.aio.AioRpcError, asyncio.InvalidStateError):
            return

    # Given ingest killed under eight streams
    async with process(root, ready) as (started, address), open_channel(address) as channel:
        publishing = [asyncio.create_task(publish(Ingest(channel), name)) for name in range(8)]
        await eventually(lambda: len(answered) > 100)
        started.kill()
        await asyncio.gather(*publishing)
    unanswered = sent.keys() - answered.keys()
    assert answered
    assert unanswered

    # When everything is repeated after the restart, answered or not
    async with process(root, ready) as (_, address), open_channel(address) as channel:
        ingest = Ingest(channel)
        stream = Stream(ingest)
        names = {
            await stream.send(message(payload), request_id=request_id): request_id
            for request_id, payload in list(sent.items())[-800:]
        }
        fields = {names[number]: ids for number, ids in (await stream.ids(len(names))).items()}

        # Then what was answered keeps its IDs, and each is stored once
        for request_id in fields.keys() & answered.keys():
            assert fields[request_id] == answered[request_id]
        log = [one.message_id for one in await ingest.log()]
        known = answered | fields
        assert {one for ids in known.values() for one in ids} <= set(log)
        assert len({ids[0] for ids in known.values()}) == len(known)
        assert unanswered <= fields.keys()
        assert len(log) == len(known)
