import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.protobuf.wrappers_pb2 import StringValue
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2

from libs.serving.peers.channels import open_channel
from libs.serving.process.config import ServingConfig
from libs.serving.process.exits import ExitCause
from libs.serving.reflection import SERVICE_NAMES
from libs.serving.server import RunningService, Signals
from libs.serving.telemetry import Telemetry
from libs.storage.errors import Fenced
from slatemq._rpc.rpc_status import raising_slatemq_errors
from slatemq.credentials import TOKEN_LENGTH_MAX
from slatemq.errors import Unavailable
from tests.integration.serving.echo_service import METHODS, NAME, EchoService

ROOT = Path(__file__).resolve().parents[3]


class Stack:
    """One echo service being run, and a channel to it."""

    def __init__(
        self, service: EchoService, channel: grpc.aio.Channel, run: asyncio.Task[ExitCause]
    ):
        self.service, self.channel, self.run = service, channel, run
        self._health: Any = health_pb2_grpc.HealthStub(channel)

    async def echo(self, text: str) -> str:
        method: Any = self.channel.unary_unary(METHODS["uu"], StringValue.SerializeToString)
        with raising_slatemq_errors():
            return StringValue.FromString(await method(StringValue(value=text))).value

    async def health(self, name: str = NAME) -> str:
        answer = await self._health.Check(health_pb2.HealthCheckRequest(service=name))
        return health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)

    async def until_healthy(self) -> None:
        watch = self._health.Watch(health_pb2.HealthCheckRequest(service=NAME), timeout=60)
        async for answer in watch:
            if answer.status == health_pb2.HealthCheckResponse.SERVING:
                watch.cancel()
                return


@asynccontextmanager
async def running(service: EchoService, ready_file: Path | None = None) -> AsyncIterator[Stack]:
    config = ServingConfig(
        root="memory:///", ready_file=str(ready_file or ""), drain_ms=60_000, log_level="debug"
    )

    async def run_until_signalled() -> ExitCause:
        with Signals() as signals:
            return await RunningService(service, config, Telemetry()).run(signals)

    run = asyncio.create_task(run_until_signalled())
    async with asyncio.timeout(60):
        while not service.steps:
            await asyncio.sleep(0)
        address = service.steps[0].removeprefix("start ")
        async with open_channel(address) as channel:
            yield Stack(service, channel, run)
            if not run.done():
                os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.wait([run])


async def test_a_service_that_starts_is_not_serving_yet() -> None:
    # Given a service whose start takes its time
    service = EchoService()
    service.may_start.clear()

    async with running(service) as stack:
        # Then health says so, and calls are asked to come back
        assert await stack.health() == "NOT_SERVING"
        with pytest.raises(Unavailable) as caught:
            await stack.echo("hello")
        assert caught.value.reason == "STARTING"

        # When it has started, it serves
        service.may_start.set()
        await stack.until_healthy()
        assert await stack.health("") == "SERVING"
        assert await stack.echo("hello") == "hello"


async def test_the_longest_token_that_a_client_sends_is_taken() -> None:
    async with running(EchoService()) as stack:
        await stack.until_healthy()
        method: Any = stack.channel.unary_unary(METHODS["uu"], StringValue.SerializeToString)
        metadata = (
            ("authorization", f"Bearer {'x' * TOKEN_LENGTH_MAX}"),
            ("traceparent", f"00-{'a' * 32}-{'b' * 16}-01"),
        )
        for _ in range(30):
            answer = await method(StringValue(value="hello"), metadata=metadata, timeout=60)
            assert StringValue.FromString(answer).value == "hello"


async def test_sigterm_while_starting_ends_cleanly() -> None:
    service = EchoService()
    service.may_start.clear()

    async with running(service) as stack:
        os.kill(os.getpid(), signal.SIGTERM)

        assert (await stack.run).code == 0
    assert service.steps[-1] == "stop"


async def test_sigterm_lets_calls_in_flight_finish_and_new_ones_not_begin() -> None:
    service = EchoService()

    async with running(service) as stack:
        # Given a call in flight
        await stack.until_healthy()
        call = asyncio.create_task(stack.echo("wait"))
        await service.servicer.waiting.wait()

        # When the process is asked to stop
        os.kill(os.getpid(), signal.SIGTERM)
        while "drain" not in service.steps:
            await asyncio.sleep(0)

        # Then a new call is refused with the reason, the old one is answered, and the end is clean
        with pytest.raises(Unavailable) as caught:
            await stack.echo("hello")
        assert caught.value.reason == "NOT_SERVING"
        assert not stack.run.done()
        service.servicer.release.set()
        assert await call == "wait"
        assert await stack.run == ExitCause.clean("SIGTERM")
    assert service.steps[-2:] == ["drain", "stop"]


async def test_a_watch_on_the_health_does_not_hold_up_the_end() -> None:
    service = EchoService()
    service.may_start.clear()

    async with running(service) as stack:
        # Given someone who watches
        request = health_pb2.HealthCheckRequest(service=NAME)
        stub: Any = health_pb2_grpc.HealthStub(stack.channel)
        watch = stub.Watch(request)
        seen = [await watch.read()]
        service.may_start.set()
        seen.append(await watch.read())

        # When the process is asked to stop
        os.kill(os.getpid(), signal.SIGTERM)

        # Then the watcher learns of it, and the end comes long before the grace of 60 s
        seen.append(await watch.read())
        async with asyncio.timeout(60):
            assert (await stack.run).code == 0
    states = health_pb2.HealthCheckResponse
    assert [getattr(one, "status", None) for one in seen] == [
        states.NOT_SERVING,
        states.SERVING,
        states.NOT_SERVING,
    ]


async def test_a_second_signal_ends_calls_in_flight_at_once() -> None:
    service = EchoService()

    async with running(service) as stack:
        await stack.until_healthy()
        call = asyncio.create_task(stack.echo("wait"))
        await service.servicer.waiting.wait()
        os.kill(os.getpid(), signal.SIGTERM)
        while "drain" not in service.steps:
            await asyncio.sleep(0)

        os.kill(os.getpid(), signal.SIGTERM)

        assert (await stack.run).code == 0
        with pytest.raises(Unavailable):
            await call


async def test_a_fenced_service_stops_without_draining() -> None:
    service = EchoService()

    async with running(service) as stack:
        await stack.until_healthy()

        service.fatal.set_exception(Fenced("detected newer DB client"))

        assert (await stack.run).code == 77
    assert "drain" not in service.steps
    assert service.steps[-1] == "stop"


async def test_a_service_whose_part_was_cancelled_has_failed() -> None:
    service = EchoService()

    async with running(service) as stack:
        await stack.until_healthy()

        service.fatal.cancel()

        await asyncio.wait([stack.run])
        assert not stack.run.cancelled()
        assert stack.run.result().code == 1
    assert service.steps[-1] == "stop"


async def test_the_ready_file_holds_the_address_once_serving(tmp_path: Path) -> None:
    ready = tmp_path / "ready.json"
    service = EchoService()

    async with running(service, ready) as stack:
        await stack.until_healthy()
        while not ready.exists():
            await asyncio.sleep(0)
        address = json.loads(ready.read_text())["address"]

        assert f"start {address}" == service.steps[0]


@pytest.mark.parametrize("service", SERVICE_NAMES)
async def test_reflection_lists_the_services_and_knows_itself_and_error_details(
    service: str,
) -> None:
    request = reflection_pb2.ServerReflectionRequest
    requests = [
        request(list_services=""),
        request(file_containing_symbol=service),
        request(file_containing_symbol="google.rpc.ErrorInfo"),
        request(file_by_filename="google/rpc/error_details.proto"),
        request(file_containing_symbol="no.such.Thing"),
        request(file_containing_extension={"containing_type": "x", "extension_number": -1}),
    ]
    async with running(EchoService()) as stack:
        method: Any = stack.channel.stream_stream(
            f"/{service}/ServerReflectionInfo",
            request.SerializeToString,
            reflection_pb2.ServerReflectionResponse.FromString,
        )
        answers = [answer async for answer in method(iter(requests))]

    names = {service.name for service in answers[0].list_services_response.service}
    assert {NAME, "grpc.health.v1.Health", *SERVICE_NAMES} <= names
    kinds = [answer.WhichOneof("message_response") for answer in answers[1:]]
    assert kinds == ["file_descriptor_response"] * 3 + ["error_response"] * 2
    files = answers[1].file_descriptor_response.file_descriptor_proto
    packages = {FileDescriptorProto.FromString(file).package for file in files}
    assert service.removesuffix(".ServerReflection") in packages


async def process(*arguments: str, **environ: str) -> tuple[int, str]:
    """Run the echo service as a program to its end."""
    program = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.integration.serving.echo_service"),
        *("--root", "memory:///", *arguments),
        cwd=ROOT,
        env=os.environ | environ,
        stderr=asyncio.subprocess.PIPE,
    )
    _, said = await asyncio.wait_for(program.communicate(), 60)
    assert program.returncode is not None
    return program.returncode, said.decode()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("end", "code", "says"),
    [
        ("fenced", 77, "fenced: another broker owns shard 3"),
        ("failed", 77, "fenced: another process owns the shard now"),
        ("unavailable", 75, "store_down: no such bucket"),
        ("signalled", 0, "stopped: SIGTERM"),
        ("wrong", 2, "the shard is of another instance"),
    ],
)
async def test_the_exit_code_says_whether_to_start_again(end: str, code: int, says: str) -> None:
    ended, said = await process("--end", end)

    assert ended == code
    assert says in said
    assert "Traceback" not in said


@pytest.mark.slow
async def test_a_process_warns_once_about_variables_that_nothing_reads() -> None:
    forms = ("--end", "wrong", "--log-format", "json", "--slow-step-ms", "0")

    _, said = await process(*forms, SLATEMQ_LOG_LEVELS="debug", SLATEMQ_SERVICE_HOST="10.0.0.1")

    warnings = [one for one in map(json.loads, said.splitlines()) if one["level"] == "warning"]
    assert [one["message"] for one in warnings] == [
        "unknown environment variables are ignored: "
        "SLATEMQ_LOG_LEVELS (did you mean SLATEMQ_LOG_LEVEL?)"
    ]


@pytest.mark.slow
async def test_a_port_that_is_taken_is_a_failure_that_names_it() -> None:
    # Given a port with a listener
    server = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]

    code, said = await process("--port", str(port))

    assert code == 1
    assert f"cannot listen: 127.0.0.1:{port}" in said
    server.close()
    await server.wait_closed()


@pytest.mark.slow
async def test_a_process_drains_on_sigterm(tmp_path: Path) -> None:
    ready = tmp_path / "ready.json"
    program = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.integration.serving.echo_service"),
        *("--root", "memory:///", "--ready-file", str(ready), "--log-format", "json"),
        *("--slow-step-ms", "0"),
        cwd=ROOT,
        stderr=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(60):
        while not ready.exists():
            await asyncio.sleep(0.01)
        program.terminate()
        _, said = await program.communicate()

    assert program.returncode == 0
    events = [json.loads(line)["message"] for line in said.decode().splitlines()]
    assert events == ["made the instance", "listening", "serving", "draining", "stopped: SIGTERM"]
