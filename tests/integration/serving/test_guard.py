import asyncio
import gc
import weakref
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf.wrappers_pb2 import StringValue

from libs.access.principals import PLACE_RETRY_MS
from libs.serving.peers.channels import open_channel
from libs.serving.requests.gate import Gate
from libs.serving.requests.guard import CallGuard
from libs.serving.telemetry import Telemetry
from libs.storage.errors import CorruptRecord, StoreUnavailable
from slatemq import errors
from slatemq._rpc.rpc_status import raising_slatemq_errors
from tests.integration.serving.echo_service import METHODS, EchoServicer
from tests.logged import logged_besides

KINDS = list(METHODS)


async def call(channel: grpc.aio.Channel, kind: str, *requests: bytes) -> list[str]:
    """Call a method of one kind with raw request bytes; errors as the client sees them."""
    make = {
        "uu": channel.unary_unary,
        "us": channel.unary_stream,
        "ss": channel.stream_stream,
    }[kind]
    method: Any = make(METHODS[kind], response_deserializer=StringValue.FromString)
    with raising_slatemq_errors():
        made = method(iter(requests) if kind[0] == "s" else requests[0], timeout=60)
        if kind[1] == "s":
            return [answer.value async for answer in made]
        return [(await made).value]


def word(text: str) -> bytes:
    return StringValue(value=text).SerializeToString()


@pytest.mark.parametrize("kind", KINDS)
async def test_answers_pass_unchanged(channel: grpc.aio.Channel, kind: str) -> None:
    assert await call(channel, kind, word("hello")) == ["hello"]


@pytest.mark.parametrize("kind", KINDS)
async def test_an_error_reaches_the_caller_with_its_details(
    channel: grpc.aio.Channel, kind: str
) -> None:
    with pytest.raises(errors.FailedPrecondition) as caught:
        await call(channel, kind, word("refuse"))

    assert caught.value.reason == "LEASE_EXPIRED"
    assert caught.value.subject == "lease 1"


@pytest.mark.parametrize("kind", KINDS)
async def test_bytes_that_do_not_decode_are_the_callers_fault(
    channel: grpc.aio.Channel, kind: str
) -> None:
    with pytest.raises(errors.InvalidArgument) as caught:
        await call(channel, kind, b"\xff\xff\xff")

    assert caught.value.reason == "UNDECODABLE"
    # And the server lives on
    assert await call(channel, kind, word("still here")) != []


async def test_bad_bytes_in_the_middle_of_a_stream_end_it(channel: grpc.aio.Channel) -> None:
    with pytest.raises(errors.InvalidArgument):
        await call(channel, "ss", word("fine"), b"\xff\xff\xff", word("never"))


@pytest.mark.parametrize("kind", KINDS)
async def test_an_unexpected_error_is_logged_and_reveals_nothing(
    channel: grpc.aio.Channel,
    servicer: EchoServicer,
    kind: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    servicer.failure = lambda: RuntimeError("password=hunter2")

    with pytest.raises(errors.Internal) as caught:
        await call(channel, kind, word("fail"))

    assert "hunter2" not in caught.value.message
    assert "hunter2" in caplog.text
    assert "Traceback" in caplog.text


@pytest.mark.parametrize(
    ("failure", "kind", "reason"),
    [
        (lambda: StoreUnavailable("s3 is off"), errors.Unavailable, "STORE_UNAVAILABLE"),
        (lambda: CorruptRecord("active value", "short"), errors.DataLoss, "DAMAGED_DATA"),
        (lambda: asyncio.CancelledError(), errors.Unavailable, "STOPPING"),
    ],
)
async def test_what_a_service_stumbles_over_has_a_kind(
    channel: grpc.aio.Channel,
    servicer: EchoServicer,
    failure: Callable[[], BaseException],
    kind: type[errors.SlateMQError],
    reason: str,
) -> None:
    servicer.failure = failure

    with pytest.raises(kind) as caught:
        await call(channel, "uu", word("fail"))

    assert caught.value.reason == reason


async def test_a_peer_that_is_down_is_unavailable_not_internal(
    channel: grpc.aio.Channel, servicer: EchoServicer
) -> None:
    servicer.failure = lambda: grpc.aio.AioRpcError(
        grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata(), "10.0.0.7 refused"
    )

    with pytest.raises(errors.Unavailable) as caught:
        await call(channel, "uu", word("fail"))

    assert caught.value.reason == "PEER_UNAVAILABLE"
    assert "10.0.0.7" not in caught.value.message


@pytest.mark.parametrize("kind", KINDS)
async def test_an_error_that_others_met_too_leaves_them_alone(
    channel: grpc.aio.Channel, servicer: EchoServicer, kind: str
) -> None:
    # Given one error object for all who wait, and one of them still cleaning up after it
    error, go_on = StoreUnavailable("the commit failed"), asyncio.Event()

    async def meet() -> None:
        try:
            raise error
        finally:
            await go_on.wait()

    meeting = asyncio.create_task(meet())
    await asyncio.sleep(0)

    # When calls end with it
    servicer.failure = lambda: error
    calls = (call(channel, kind, word("fail")) for _ in range(3))
    answers = await asyncio.gather(*calls, return_exceptions=True)
    assert [type(answer) for answer in answers] == [errors.Unavailable] * 3

    # Then that one goes on
    go_on.set()
    async with asyncio.timeout(60):
        with pytest.raises(StoreUnavailable):
            await meeting


@pytest.mark.parametrize("kind", KINDS)
async def test_what_a_failed_call_held_is_free_at_once(
    channel: grpc.aio.Channel, servicer: EchoServicer, kind: str
) -> None:
    kept: list[weakref.ref[EchoServicer]] = []

    def fail() -> BaseException:
        held = EchoServicer()
        kept.append(weakref.ref(held))
        raise StoreUnavailable("no such bucket")

    servicer.failure = fail
    gc.disable()
    try:
        with pytest.raises(errors.Unavailable):
            await call(channel, kind, word("fail"))
        async with asyncio.timeout(60):
            while kept[0]() is not None:
                await asyncio.sleep(0.001)
    finally:
        gc.enable()


class Answer:
    """One to which there may be weak references, as there may be none to a message."""

    data = b"answer"


@pytest.mark.parametrize("kind", ["us", "ss"])
async def test_an_answer_that_is_sent_is_not_kept_until_the_next(gate: Gate, kind: str) -> None:
    sent: list[weakref.ref[Answer]] = []

    def made() -> Answer:
        answer = Answer()
        sent.append(weakref.ref(answer))
        return answer

    async def behavior(_: Any, context: Any) -> AsyncIterator[Answer]:
        yield made()
        await asyncio.get_running_loop().create_future()

    make: Any = (
        grpc.unary_stream_rpc_method_handler
        if kind == "us"
        else grpc.stream_stream_rpc_method_handler
    )
    handler = make(behavior, bytes, lambda answer: answer.data)
    server = grpc.aio.server(interceptors=[CallGuard(gate, Telemetry())])
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("Test", {"m": handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with open_channel(f"127.0.0.1:{port}") as channel, asyncio.timeout(60):
        method: Any = channel.unary_stream("/Test/m")
        calling = method(b"")
        assert await calling.read() == b"answer"
        while sent[0]() is not None:
            await asyncio.sleep(0.001)
        calling.cancel()
    await server.stop(0)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_cancelled_call_is_cancelled_in_the_handler(
    channel: grpc.aio.Channel,
    servicer: EchoServicer,
    gate: Gate,
    kind: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    # Given a call that waits in its handler
    calling = asyncio.create_task(call(channel, kind, word("wait")))
    async with asyncio.timeout(60):
        await servicer.waiting.wait()
        assert gate.calls.count == 1

        # When the client gives up
        calling.cancel()

        # Then the handler is cancelled, and no trace of the call is left
        await servicer.cancelled.wait()
        while gate.calls.count:
            await asyncio.sleep(0)
    assert logged_besides(caplog) == []


async def test_calls_over_the_bound_must_wait(
    channel: grpc.aio.Channel, servicer: EchoServicer, gate: Gate
) -> None:
    # Given as many calls in flight as there may be
    calling = [asyncio.create_task(call(channel, "uu", word("wait"))) for _ in range(3)]
    async with asyncio.timeout(60):
        while gate.calls.count < 3:
            await asyncio.sleep(0)

    # When one more comes
    with pytest.raises(errors.ResourceExhausted) as caught:
        await call(channel, "uu", word("hello"))

    # Then it is refused with a time to wait, and the others end well
    assert caught.value.reason == "TOO_MANY_CALLS"
    assert caught.value.retry_after_ms == PLACE_RETRY_MS
    servicer.release.set()
    assert await asyncio.gather(*calling) == [["wait"]] * 3


async def test_a_closed_gate_says_why(channel: grpc.aio.Channel, gate: Gate) -> None:
    gate.close("NOT_SERVING", "the service is stopping")

    with pytest.raises(errors.Unavailable) as caught:
        await call(channel, "uu", word("hello"))

    assert caught.value.reason == "NOT_SERVING"


async def test_the_largest_payload_passes(channel: grpc.aio.Channel) -> None:
    payload = "x" * (64 * 1024 * 1024)

    assert await call(channel, "uu", word(payload)) == [payload]


async def test_a_message_over_the_limit_is_refused_by_name(channel: grpc.aio.Channel) -> None:
    with pytest.raises(errors.ResourceExhausted) as caught:
        await call(channel, "uu", bytes(100 * 1024 * 1024))

    assert caught.value.reason == "MESSAGE_TOO_LARGE"


async def test_an_unknown_method_is_unimplemented(channel: grpc.aio.Channel) -> None:
    method: Any = channel.unary_unary("/test.Echo/none")

    with pytest.raises(errors.Unimplemented) as caught, raising_slatemq_errors():
        await method(b"", timeout=60)

    assert caught.value.reason == "UNIMPLEMENTED"


async def test_a_call_without_a_request_is_refused(channel: grpc.aio.Channel) -> None:
    method: Any = channel.stream_unary(METHODS["uu"])

    with pytest.raises(errors.InvalidArgument) as caught, raising_slatemq_errors():
        await method(iter(()), timeout=60)

    assert caught.value.reason == "NO_REQUEST"


async def test_a_request_over_the_limit_is_refused_with_the_limit(
    servicer: EchoServicer, gate: Gate, telemetry: Telemetry
) -> None:
    server = grpc.aio.server(interceptors=[CallGuard(gate, telemetry, message_bytes_max=100)])
    servicer.add_to(server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with open_channel(f"127.0.0.1:{port}") as channel:
        with pytest.raises(errors.InvalidArgument) as caught:
            await call(channel, "uu", word("x" * 200))
    await server.stop(0)

    assert caught.value.reason == "MESSAGE_TOO_LARGE"
    assert "the limit is 100" in caught.value.message
