"""A whole stack with TLS, tokens and a policy."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AsyncExitStack, suppress
from itertools import count
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

import slatemq
from libs.events.backends import open_backend
from libs.events.settings import SlatemqSettings
from libs.events.slatemq.backend import SlatemqBackend
from slatemq._file_status import LOOK_S
from slatemq._rpc.rpc_status import from_rpc_error
from slatemq._rpc.tls import CertificateFiles, ChannelTls
from slatemq._tokens import new_token
from slatemq.cli.access.dev_certificates import SERVICE_NAME
from slatemq.errors import (
    InvalidArgument,
    NotFound,
    PermissionDenied,
    ResourceExhausted,
    Unauthenticated,
)
from slatemq.v1 import (
    archived_pb2,
    assignment_pb2,
    assignment_pb2_grpc,
    consumer_pb2,
    queue_pb2,
)
from slatemq.v1.archived_pb2_grpc import ArchivedServiceStub
from slatemq.v1.consumer_pb2_grpc import ConsumerServiceStub
from slatemq.v1.queue_pb2_grpc import QueueServiceStub
from tests.acceptance.local_stack import REPOSITORY, LocalStack, peer_address, wait_until
from tests.acceptance.test_node_stubs import modules
from tests.integration.stack.secured import POLICY, Secured
from tests.integration.waiting import WAIT_SECONDS
from tests.unsent import UNSENT

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Secured, LocalStack]]:
    folder = tmp_path_factory.mktemp("secured")
    made = Secured(folder)
    with made.running() as stack:
        yield made, stack


async def test_each_caller_does_what_the_policy_permits(
    secured: tuple[Secured, LocalStack],
) -> None:
    made, stack = secured
    async with (
        slatemq.connect(stack.endpoint, credentials=made.credentials("ops")) as ops,
        slatemq.connect(stack.endpoint, credentials=made.credentials("shop")) as shop,
    ):
        for name in ("orders", "bills"):
            await ops.create_queue(name)

        # Publishing: the queue, and the condition on headers
        sent = await shop.publish(b"lamp", {"queue": "orders", "tenant": "acme"})
        for headers in ({"queue": "bills", "tenant": "acme"}, {"queue": "orders", "tenant": "b"}):
            with pytest.raises(PermissionDenied):
                await shop.publish(b"lamp", headers)

        # Consuming: one queue, and not the other
        async with shop.consume("orders") as messages:
            message = await anext(messages)
            assert (message.payload, message.message_id) == (b"lamp", sent.message_id)
            await message.ack()
        with pytest.raises(PermissionDenied):
            await shop.claim("bills")

        # Lists have what may be inspected
        assert [queue.queue_id async for queue in shop.list_queues()] == ["orders"]
        assert len([queue async for queue in ops.list_queues()]) == 2
        for client, patterns in ((shop, ("orders*",)), (ops, ("*",))):
            caller = await client.get_caller()
            assert caller.inspected_queues == patterns
            async with asyncio.timeout(WAIT_SECONDS):
                while not (callers := await client.get_callers()):
                    await asyncio.sleep(0.05)  # A broker that is busy may answer too late.
            assert callers == {0: caller}
        for forbidden in (shop.purge_queue("orders"), shop.get_queue("bills")):
            with pytest.raises(PermissionDenied):
                await forbidden


async def test_a_lease_of_another_queue_is_neither_finished_nor_extended(
    secured: tuple[Secured, LocalStack],
) -> None:
    """By one who has its token, and may consume from other queues."""
    made, stack = secured
    denied, fine = grpc.StatusCode.PERMISSION_DENIED.value[0], 0
    tls = ChannelTls(CertificateFiles(made.certificates / "ca.crt"))
    shop = {"metadata": (("authorization", f"Bearer {made.tokens['shop'].token}"),)}
    async with (
        asyncio.timeout(60),
        slatemq.connect(stack.endpoint, credentials=made.credentials("ops")) as ops,
        grpc.aio.secure_channel(stack.endpoints["broker"], tls.credentials) as channel,
    ):
        claimed = {}
        # Many leases of one claim are kept in another form than few.
        for queue_id, count_ in (("leased", 60), ("orders-leased", 60), ("leased-few", 2)):
            await ops.create_queue(queue_id)
            await ops.publish_batch([slatemq.OutgoingMessage(b"x", {"queue": queue_id})] * count_)
            claimed[queue_id] = await ops.claim(queue_id, count_, wait=30)
        foreign, own, few = [[one.lease_token for one in claimed[queue]] for queue in claimed]
        stub: Any = ConsumerServiceStub(channel)

        mixed = [foreign[0], own[0], foreign[1], own[1]]
        extended = await stub.ExtendLease(
            consumer_pb2.ExtendLeaseRequest(lease_tokens=mixed, lease_ms=60_000), **shop
        )
        assert [one.status.code for one in extended.results] == [denied, fine, denied, fine]
        assert [bool(one.lease_deadline_ms) for one in extended.results] == [False, True] * 2

        items = [consumer_pb2.NackItem(lease_token=token) for token in mixed]
        nacked = await stub.Nack(consumer_pb2.NackRequest(items=items), **shop)
        assert [one.code for one in nacked.results] == [denied, fine, denied, fine]

        runs = [consumer_pb2.LeaseRun(lease_token=tokens[2], count=3) for tokens in (foreign, own)]
        acked = await stub.Ack(
            consumer_pb2.AckRequest(lease_tokens=[own[5], few[0]], runs=runs), **shop
        )
        assert [one.code for one in acked.results] == [fine, denied, *[denied] * 3, *[fine] * 3]
        assert "'leased-few'" in acked.results[1].message

        complete = [
            consumer_pb2.Command(complete=consumer_pb2.CompleteCommand(lease_token=token))
            for token in (own[6], foreign[6])
        ]
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Execute(consumer_pb2.ExecuteRequest(commands=complete), **shop)
        refused = from_rpc_error(caught.value)
        assert isinstance(refused, PermissionDenied)
        assert (refused.metadata["queue"], refused.metadata["command"]) == ("leased", "1")

        # None of it was done: the leases are still those of the operator.
        await ops.ack([*foreign, *few, own[6]])


async def test_a_redrive_in_a_queue_that_one_may_not_see_is_as_if_it_were_not_there(
    secured: tuple[Secured, LocalStack],
) -> None:
    made, stack = secured
    async with (
        slatemq.connect(stack.endpoint, credentials=made.credentials("ops")) as ops,
        slatemq.connect(stack.endpoint, credentials=made.credentials("editor")) as editor,
    ):
        redrives = {}
        for queue_id in ("redriven", "orders-redriven"):
            await ops.create_queue(queue_id)
            redrives[queue_id] = await ops.start_redrive(queue_id)
        foreign, own = (one.redrive_id for one in redrives.values())
        absent = f"{foreign.partition('-')[0]}-ffff"

        for call in (editor.get_redrive, editor.cancel_redrive, editor.resume_redrive):
            outcomes = []
            for redrive_id in (foreign, absent):
                with pytest.raises(NotFound) as caught:
                    await call(redrive_id)
                outcomes.append((caught.value.reason, caught.value.message.replace(redrive_id, "")))
            assert outcomes[0] == outcomes[1]
        assert (await editor.get_redrive(own)).queue_id == "orders-redriven"


async def test_a_redrive_into_a_queue_that_one_may_not_edit_is_not_resumed(
    secured: tuple[Secured, LocalStack],
) -> None:
    made, stack = secured
    async with (
        slatemq.connect(stack.endpoint, credentials=made.credentials("ops")) as ops,
        slatemq.connect(stack.endpoint, credentials=made.credentials("editor")) as editor,
    ):
        for queue_id in ("elsewhere", "orders-moved"):
            await ops.create_queue(queue_id)
        moving = await ops.start_redrive("orders-moved", into="elsewhere")

        with pytest.raises(PermissionDenied) as caught:
            await editor.resume_redrive(moving.redrive_id)

        assert caught.value.metadata == {"verb": "edit", "queue": "elsewhere"}


async def test_an_editor_sends_no_headers_that_it_could_not_publish(
    secured: tuple[Secured, LocalStack],
) -> None:
    made, stack = secured
    forged, good = {"queue": "orders-wrong", "tenant": "other"}, {"tenant": "acme"}
    tls = ChannelTls(CertificateFiles(made.certificates / "ca.crt"))
    bearer = (("authorization", f"Bearer {made.tokens['editor'].token}"),)
    async with (
        asyncio.timeout(60),
        slatemq.connect(stack.endpoint, credentials=made.credentials("ops")) as ops,
        slatemq.connect(stack.endpoint, credentials=made.credentials("editor")) as editor,
        grpc.aio.secure_channel(stack.endpoints["broker"], tls.credentials) as channel,
    ):
        await ops.create_queue("orders-dated", default_delay=900)
        await ops.create_queue("orders-wrong", max_attempts=1, backoff=slatemq.Backoff.none())
        await ops.publish(b"x", {"queue": "orders-dated", "tenant": "acme"})
        await ops.publish(b"x", {"queue": "orders-wrong", "tenant": "acme"})
        (claimed,) = await ops.claim("orders-wrong", wait=30)
        await claimed.nack("broken")
        (failed,) = [one async for one in ops.list_entries("orders-wrong", "failed")]
        delayed: list[slatemq.Entry] = []
        while not delayed:
            delayed = [one async for one in ops.list_entries("orders-dated", "delayed")]
        (late,) = delayed
        archived = archived_pb2.RedriveArchivedRequest(queue_id="orders-wrong")
        archived.rows.add(message_id=1, failed_at_ms=1, bucket_order=1, run="run")

        with pytest.raises(PermissionDenied) as caught:
            await editor.edit_message(late.handle, headers=forged)
        assert caught.value.metadata == {"verb": "publish", "queue": "orders-wrong"}
        with pytest.raises(PermissionDenied):  # A rule for some queues covers none without one.
            await editor.edit_message(late.handle, headers=good)
        replacement = slatemq.ReplaceDeadLetter(failed.handle, b"y", forged)
        with pytest.raises(PermissionDenied) as caught:
            await editor.settle_dead_letters([replacement])
        assert caught.value.metadata["settlement"] == "0"
        archived.rows[0].headers.update(forged)
        stub: Any = ArchivedServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.RedriveArchived(archived, metadata=bearer)
        assert refused.value.code() is grpc.StatusCode.PERMISSION_DENIED

        await editor.edit_message(late.handle, headers={**good, "queue": "orders-dated"})
        await editor.edit_message(late.handle, payload=b"y")  # It changes no headers.
        await editor.settle_dead_letters([slatemq.ReplaceDeadLetter(failed.handle, b"y", good)])
        archived.rows[0].headers.clear()
        archived.rows[0].headers.update(good)
        answer = await stub.RedriveArchived(archived, metadata=bearer)
        assert answer.gone_count == 1
        (replaced,) = await ops.claim("orders-wrong", wait=30)
        assert (replaced.payload, replaced.headers["tenant"]) == (b"y", "acme")


async def test_a_limit_holds_one_caller_and_no_other(secured: tuple[Secured, LocalStack]) -> None:
    made, stack = secured
    async with (
        slatemq.connect(stack.endpoint, credentials=made.credentials("ops")) as ops,
        slatemq.connect(
            stack.endpoint, credentials=made.credentials("shop"), call_timeout=8
        ) as shop,
    ):
        headers = {"queue": "orders-x", "tenant": "acme"}
        batch = [slatemq.OutgoingMessage(b"x", headers) for _ in range(50)]
        with pytest.raises(ResourceExhausted) as caught:
            await asyncio.gather(*(shop.publish_batch(batch) for _ in range(3)))

        assert caught.value.reason == "PRINCIPAL_LIMIT"
        await ops.publish_batch([slatemq.OutgoingMessage(b"x", headers) for _ in range(500)])


@pytest.mark.parametrize(("name", "may_operate"), [("ops", True), ("stranger", False)])
async def test_where_the_stores_are_is_for_those_who_operate(
    secured: tuple[Secured, LocalStack], name: str, *, may_operate: bool
) -> None:
    made, stack = secured
    credentials = made.credentials(name)
    async with slatemq.connect(stack.endpoint, credentials=credentials) as client:
        assert (await client.get_instance()).settings["payload_bytes_max"] > 0
        async with asyncio.timeout(WAIT_SECONDS):
            while not (status := await client.status(queues=False)).instance_number:
                await asyncio.sleep(0.05)  # A process that is busy may answer too late.

    assert bool(status.store) is may_operate


@pytest.mark.parametrize("form", ["no token", "forged", "stranger"])
async def test_who_proves_nothing_gets_nothing(
    secured: tuple[Secured, LocalStack], form: str
) -> None:
    made, stack = secured
    ca = made.certificates / "ca.crt"
    credentials = {
        "no token": slatemq.Credentials(ca=ca),
        "forged": slatemq.Credentials(ca=ca, token=made.tokens["ops"].token[:-2] + "xx"),
        "stranger": made.credentials("stranger"),
    }[form]

    with pytest.raises(PermissionDenied if form == "stranger" else Unauthenticated):
        async with slatemq.connect(stack.endpoint, credentials=credentials) as client:
            await client.create_queue("mine")


@pytest.mark.parametrize(
    ("name", "ending", "key", "problem"),
    [
        ("ops", "xx", "endpoint", "the credentials, from SLATEMQ_… variables"),
        ("stranger", "", "queue_prefix", "events.tasks"),
    ],
)
async def test_credentials_of_event_queues_that_are_refused_are_named_by_the_key(
    secured: tuple[Secured, LocalStack],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    ending: str,
    key: str,
    problem: str,
) -> None:
    made, stack = secured
    token = made.tokens[name].token
    monkeypatch.setenv("SLATEMQ_CA", str(made.certificates / "ca.crt"))
    monkeypatch.setenv("SLATEMQ_TOKEN", token[: len(token) - len(ending)] + ending)

    backend = open_backend("slatemq")
    with pytest.raises(InvalidArgument, match=problem) as refused:
        await backend.connect(SlatemqSettings(endpoint=stack.endpoint, queue_prefix="events"))
    await backend.close()
    assert refused.value.field == f"queue.slatemq.{key}"


async def test_a_client_without_tls_does_not_get_in_and_its_error_says_why(
    secured: tuple[Secured, LocalStack],
) -> None:
    _, stack = secured

    with pytest.raises(InvalidArgument, match=r"speaks TLS, .*--ca FILE") as raised:
        async with slatemq.connect(stack.endpoint, call_timeout=10):
            pytest.fail("connected without TLS")
    assert raised.value.reason == "TLS_MISMATCH"


async def test_no_token_and_no_client_certificate_opens_a_call_of_services(
    secured: tuple[Secured, LocalStack],
) -> None:
    made, stack = secured
    peer_port = await peer_address(stack, "broker")
    ca = made.certificates / "ca.crt"
    client = CertificateFiles(
        ca, made.certificates / "client.crt", made.certificates / "client.key"
    )
    bearer = (("authorization", f"Bearer {made.tokens['ops'].token}"),)

    async def refused(address: str, files: CertificateFiles) -> str:
        tls = ChannelTls(files, SERVICE_NAME)
        async with grpc.aio.secure_channel(address, tls.credentials, tls.options) as channel:
            assign: Any = assignment_pb2_grpc.AssignmentServiceStub(channel).Assign
            try:
                await assign(assignment_pb2.AssignRequest(), metadata=bearer, timeout=60)
            except grpc.aio.AioRpcError as error:
                return from_rpc_error(error).reason
        return "not refused"

    assert await refused(stack.endpoints["broker"], CertificateFiles(ca)) == "FOR_SERVICES_ALONE"
    assert await refused(peer_port, client) == "FOR_SERVICES_ALONE"
    assert await refused(peer_port, CertificateFiles(ca)) == "UNAVAILABLE"


async def test_a_token_that_is_removed_ends_also_on_open_streams(
    secured: tuple[Secured, LocalStack],
) -> None:
    made, stack = secured
    lost = made.tokens["lost"] = new_token("ops")
    made.write_tokens(*made.tokens.values())

    async def create() -> None:
        async with slatemq.connect(stack.endpoint, credentials=made.credentials("lost")) as client:
            await client.create_queue("of-lost")

    async with asyncio.timeout(60):
        while True:
            try:
                await create()
            except Unauthenticated:
                await asyncio.sleep(0.2)  # The services have not read the file yet.
            else:
                break
        async with slatemq.connect(stack.endpoint, credentials=made.credentials("lost")) as client:
            made.write_tokens(*(token for token in made.tokens.values() if token is not lost))
            with pytest.raises(Unauthenticated):
                await publish_for_ever(client)


async def publish_for_ever(client: slatemq.Client) -> None:
    while True:
        await client.publish(b"x", {"queue": "of-lost"})
        await asyncio.sleep(0.1)


async def test_streams_go_on_with_the_next_token_of_a_file(
    secured: tuple[Secured, LocalStack], tmp_path: Path
) -> None:
    made, stack = secured
    first, following = [await asyncio.to_thread(new_token, "ops") for _ in range(2)]
    others = list(made.tokens.values())
    made.write_tokens(*others, first, following)
    file = tmp_path / "token"
    file.touch(0o600)
    file.write_text(first.token)
    ca = made.certificates / "ca.crt"
    in_file = slatemq.Credentials(ca=ca, token_file=file)
    fixed = slatemq.Credentials(ca=ca, token=first.token)
    async with asyncio.timeout(120), AsyncExitStack() as clients:
        await until_it_is_known(stack, slatemq.Credentials(ca=ca, token=following.token))
        client, refused = [
            await clients.enter_async_context(slatemq.connect(stack.endpoint, credentials=one))
            for one in (in_file, fixed)
        ]
        await client.create_queue("going-on")
        await client.create_queue("going-on-silent")
        await client.create_queue("going-on-later", default_delay=600)
        watch = client.watch_delayed("going-on-later")
        async with (
            client.consume("going-on") as messages,
            refused.consume("going-on-silent") as silent,
        ):

            async def passes() -> None:
                for queue in ("going-on", "going-on-later"):
                    await client.publish(b"x", {"queue": queue})
                await (await anext(messages)).ack()
                await anext(watch)

            await passes()
            await client.publish(b"x", {"queue": "going-on-silent"})
            await (await anext(silent)).ack()
            file.write_text(following.token)
            await asyncio.sleep(LOOK_S)
            made.write_tokens(*others, following)
            with suppress(Unauthenticated):
                while (await refused.get_queue("going-on")).queue_id:
                    await asyncio.sleep(0.1)
            with pytest.raises(Unauthenticated):
                await anext(silent)
            for _ in range(3):
                await passes()
                await asyncio.sleep(0.5)
        await watch.close()
        for queue in ("going-on", "going-on-silent", "going-on-later"):
            await client.delete_queue(queue)


async def until_it_is_known(stack: LocalStack, credentials: slatemq.Credentials) -> None:
    """Waits until all services have read the file that has this token."""
    while True:
        try:
            async with slatemq.connect(stack.endpoint, credentials=credentials) as client:
                await client.get_callers()
                await client.publish(b"x", {"queue": "none"})
                return
        except Unauthenticated:
            await asyncio.sleep(0.2)


def test_the_command_takes_files_and_the_environment(
    secured: tuple[Secured, LocalStack], tmp_path: Path
) -> None:
    made, stack = secured
    token = tmp_path / "token"
    token.write_text(made.tokens["ops"].token)
    command = [sys.executable, "-m", "slatemq.cli", "--endpoint", stack.endpoint]
    command += ["--ca", str(made.certificates / "ca.crt")]

    def run(*words: str, **environ: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*command, *words],
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
            env={"PATH": os.environ["PATH"], "HOME": str(tmp_path), **environ},
        )

    check = run("--token-file", str(token), "--json", "access", "check", "shop", "publish", "bills")
    assert check.returncode == 1, check.stderr
    (line,) = check.stdout.splitlines()
    found = json.loads(line)
    assert not found["permitted"]
    assert [(one["place"], one["line"] > 0, one["finding"]) for one in found["rules"]] == [
        ("roles.shop[0]", True, "other_queues")
    ]
    assert found["policy_file"] == str(made.folder / "policy.yaml")
    assert (found["policy_version"], found["address"] in stack.endpoints.values()) == (1, True)
    acme = ("publish", "orders", "--header", "tenant=acme", "--attribute", "tenant=acme")
    permitted = run("--token-file", str(token), "access", "check", "shop", *acme)
    assert permitted.returncode == 0, permitted.stderr
    assert "permitted by roles.shop[0]" in permitted.stdout
    forbidden = run("access", "check", "shop", *acme, SLATEMQ_TOKEN=made.tokens["shop"].token)
    assert (forbidden.returncode, forbidden.stdout) == (1, "")
    assert "no rule permits 'shop' to operate" in forbidden.stderr
    listed = run("--token-file", str(token), "--json", "status")
    assert listed.returncode == 0, listed.stderr
    assert run("queue", "ls", SLATEMQ_TOKEN=made.tokens["shop"].token).returncode == 0
    seen = ""

    # A router that is busy may answer too late to be in it.
    def is_refused() -> bool:
        nonlocal seen
        seen = run("status", SLATEMQ_TOKEN=made.tokens["shop"].token).stderr
        return "routes are not shown: no rule permits 'shop' to operate" in seen

    wait_until(is_refused, WAIT_SECONDS)
    assert "queues are not shown" not in seen
    other = run("publish", "--to", "bills", "x", SLATEMQ_TOKEN=made.tokens["shop"].token)
    assert (other.returncode, "no rule permits 'shop' to publish" in other.stderr) == (1, True)
    refused = run("queue", "ls")
    assert refused.returncode == 1
    assert "needs a token" in refused.stderr
    assert "--token-file" in refused.stderr
    sick = run("--json", "doctor", SLATEMQ_TOKEN=made.tokens["shop"].token)
    ones = {one["check"]: one for one in map(json.loads, sick.stdout.splitlines())}
    assert "'shop' may not operate" in ones["permissions"]["text"]
    assert "clocks" not in ones
    well = run("--token-file", str(token), "--json", "doctor")
    ones = {one["check"]: one for one in map(json.loads, well.stdout.splitlines())}
    assert ones["permissions"]["text"].startswith("'ops' may publish, consume,")
    assert ones["certificates"]["level"] == "ok"


async def test_a_stream_ends_when_the_policy_takes_its_queue_away(
    secured: tuple[Secured, LocalStack],
) -> None:
    made, stack = secured
    async with slatemq.connect(stack.endpoint, credentials=made.credentials("ops")) as ops:
        await ops.create_queue("orders-late")
    tls = ChannelTls(CertificateFiles(made.certificates / "ca.crt"))
    async with (
        asyncio.timeout(60),
        grpc.aio.secure_channel(stack.endpoints["broker"], tls.credentials) as channel,
    ):
        while (error := await end_by_policy(made, channel, "orders-late")).details() == UNSENT:
            pass

    assert error.code() is grpc.StatusCode.PERMISSION_DENIED
    assert "'orders-late'" in (error.details() or "")


async def end_by_policy(
    made: Secured, channel: grpc.aio.Channel, queue_id: str
) -> grpc.aio.AioRpcError:
    """What ends a stream that sends heartbeats, once the policy forbids its queue."""
    stream = await opened(made, channel, consumer_pb2.ConsumeStart(queue_id=queue_id))
    heartbeat = consumer_pb2.ConsumeRequest(heartbeat=consumer_pb2.ConsumeHeartbeat())
    elsewhere = {"verbs": ["consume"], "queues": ["elsewhere"]}
    made.write_policy({**POLICY, "roles": {**POLICY["roles"], "shop": [elsewhere]}})
    try:
        ended = asyncio.create_task(stream.read())
        while not ended.done():
            with suppress(asyncio.InvalidStateError, grpc.aio.AioRpcError):
                await stream.write(heartbeat)
            await asyncio.wait({ended}, timeout=0.2)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await ended
    finally:
        made.write_policy(POLICY)
    return caught.value


async def opened(made: Secured, channel: grpc.aio.Channel, start: consumer_pb2.ConsumeStart) -> Any:
    """A stream of `shop`, which begins once no policy of another test is in force."""
    bearer = (("authorization", f"Bearer {made.tokens['shop'].token}"),)
    while True:
        stream: Any = ConsumerServiceStub(channel).Consume(metadata=bearer)
        try:
            await stream.write(consumer_pb2.ConsumeRequest(start=start))
            await stream.read()
            return stream
        except (asyncio.InvalidStateError, grpc.aio.AioRpcError):
            await asyncio.sleep(0.2)


async def test_a_stream_of_a_silent_client_gives_no_message_once_the_policy_forbids_it(
    secured: tuple[Secured, LocalStack],
) -> None:
    """Its requests are judged as well: this one sends none but the first.

    The message that it would have got next goes back, and no attempt is counted.
    """
    made, stack = secured
    tls = ChannelTls(CertificateFiles(made.certificates / "ca.crt"))
    elsewhere = {"verbs": ["consume"], "queues": ["elsewhere"]}
    credit = consumer_pb2.ConsumeCredit(messages_count=1_000)
    start = consumer_pb2.ConsumeStart(queue_id="orders-silent", credit=credit)
    async with (
        asyncio.timeout(60),
        slatemq.connect(stack.endpoint, credentials=made.credentials("ops")) as ops,
        grpc.aio.secure_channel(stack.endpoints["broker"], tls.credentials) as channel,
    ):
        await ops.create_queue("orders-silent", lease=3600)
        stream = await opened(made, channel, start)

        published: list[int] = []

        async def read_on() -> None:
            while True:
                published.append(int(await ops.publish(b"x", {"queue": "orders-silent"})))
                while not (await stream.read()).runs:
                    pass

        made.write_policy({**POLICY, "roles": {**POLICY["roles"], "shop": [elsewhere]}})
        try:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await read_on()
            (withheld,) = await ops.claim("orders-silent", 10, wait=30)
            assert (withheld.message_id, withheld.attempts_count) == (published[-1], 1)
        finally:
            made.write_policy(POLICY)

    assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED
    assert "'orders-silent'" in (caught.value.details() or "")


async def test_a_claim_that_waits_gets_no_message_once_the_policy_forbids_it(
    secured: tuple[Secured, LocalStack],
) -> None:
    made, stack = secured
    elsewhere = {"verbs": ["consume"], "queues": ["elsewhere"]}
    async with (
        asyncio.timeout(60),
        slatemq.connect(stack.endpoint, credentials=made.credentials("ops")) as ops,
        slatemq.connect(stack.endpoint, credentials=made.credentials("shop")) as shop,
    ):
        await ops.create_queue("orders-awaited", lease=3600)
        while True:  # The policy of the test before may be in force.
            with suppress(PermissionDenied):
                await shop.claim("orders-awaited")
                break
            await asyncio.sleep(0.1)
        waiting = asyncio.create_task(shop.claim("orders-awaited", wait=50))
        await asyncio.sleep(0)
        # Behind it on the same connection: the one that waits is there when this is answered.
        assert not await shop.claim("orders-awaited")
        made.write_policy({**POLICY, "roles": {**POLICY["roles"], "shop": [elsewhere]}})
        try:
            with suppress(PermissionDenied):
                while not await shop.claim("orders-awaited"):
                    await asyncio.sleep(0.1)
            sent = await ops.publish(b"x", {"queue": "orders-awaited"})
            with pytest.raises(PermissionDenied, match="orders-awaited"):
                await waiting
            (withheld,) = await ops.claim("orders-awaited", wait=30)
            assert (withheld.message_id, withheld.attempts_count) == (sent.message_id, 1)
        finally:
            made.write_policy(POLICY)


async def test_a_watch_shows_nothing_more_once_its_token_is_removed(
    secured: tuple[Secured, LocalStack],
) -> None:
    made, stack = secured
    lost = made.tokens["watcher"] = new_token("ops")
    made.write_tokens(*made.tokens.values())
    tls = ChannelTls(CertificateFiles(made.certificates / "ca.crt"))
    bearer = (("authorization", f"Bearer {lost.token}"),)
    numbers = count()
    async with (
        asyncio.timeout(60),
        slatemq.connect(stack.endpoint, credentials=made.credentials("ops")) as ops,
        grpc.aio.secure_channel(stack.endpoints["broker"], tls.credentials) as channel,
    ):
        while True:
            watch: Any = QueueServiceStub(channel).WatchQueues(
                queue_pb2.WatchQueuesRequest(), metadata=bearer
            )
            try:
                await watch.read()
                break
            except grpc.aio.AioRpcError:
                await asyncio.sleep(0.2)  # The broker has not read the file yet.
        del made.tokens["watcher"]
        made.write_tokens(*made.tokens.values())

        async def watch_on() -> None:
            while True:
                await ops.create_queue(f"watched-{next(numbers)}")
                await watch.read()

        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await watch_on()

    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_events_go_to_a_secured_instance(
    secured: tuple[Secured, LocalStack], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, stack = secured
    monkeypatch.setenv("SLATEMQ_CA", str(made.certificates / "ca.crt"))
    monkeypatch.setenv("SLATEMQ_TOKEN", made.tokens["ops"].token)
    backend = SlatemqBackend()

    await backend.connect(SlatemqSettings(endpoint=stack.endpoint))
    try:
        await backend.ping()
    finally:
        await backend.disconnect()


@pytest.mark.parametrize("language", ["python", "js"])
def test_the_programs_on_the_pages_of_stubs_run_with_tls_and_a_token(
    secured: tuple[Secured, LocalStack], tmp_path: Path, language: str
) -> None:
    made, stack = secured
    shutil.copytree(made.certificates, tmp_path / "slatemq-access")
    (tmp_path / "slatemq-access/operator.token").write_text(f"{made.tokens['ops'].token}\n")
    page = {"python": "stubs.md", "js": "stubs-nodejs.md"}[language]
    text = (REPOSITORY / "docs/how-to" / page).read_text(encoding="utf-8")
    blocks = re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    (own,) = [block for block in blocks if "slatemq-access/ca.crt" in block]
    if language == "python":
        # Connecting, creating a queue, publishing
        connecting, *more = blocks[:3]
        plain = re.search(r"^def connect\(.*?(?=^\S)", connecting, re.MULTILINE | re.DOTALL)
        assert plain is not None
        connecting = connecting.replace(plain[0], f"{own}\nconnect = connect_secured\n")
        program, command = "\n".join([connecting, *more]), [sys.executable, "page"]
        environ = {"PYTHONPATH": str(REPOSITORY)}
    else:
        program = "\n".join(blocks).replace("grpc.credentials.createInsecure()", "secured()")
        command, environ = ["node", "page"], {"NODE_PATH": str(modules())}
        (tmp_path / "protos").symlink_to(REPOSITORY / "protos")
    (tmp_path / "page").write_text(program.replace("127.0.0.1:7420", stack.endpoint))

    ended = subprocess.run(
        command,
        cwd=tmp_path,
        env={"PATH": os.environ["PATH"], **environ},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )

    assert ended.returncode == 0, ended.stderr
    assert {"python": "shop-orders", "js": "received päivää"}[language] in ended.stdout


async def test_a_transfer_needs_a_rule_to_publish_whatever_the_headers(
    secured: tuple[Secured, LocalStack],
) -> None:
    made, stack = secured
    consumer = {"verbs": ["consume", "inspect"], "queues": ["orders*"]}
    tls = ChannelTls(CertificateFiles(made.certificates / "ca.crt"))
    token = made.tokens["mover"] = new_token("mover")
    made.write_tokens(*made.tokens.values())
    bearer = (("authorization", f"Bearer {token.token}"),)
    move = consumer_pb2.TransferCommand(
        lease_token="0-0000000000000001", target_queue_id="orders-next"
    )
    request = consumer_pb2.ExecuteRequest(commands=[consumer_pb2.Command(transfer=move)])
    binding = {"principals": ["mover"], "roles": ["mover"]}

    async def outcome(stub: Any) -> grpc.StatusCode:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Execute(request, metadata=bearer)
        code: grpc.StatusCode = caught.value.code()
        return code

    async with (
        asyncio.timeout(60),
        grpc.aio.secure_channel(stack.endpoints["broker"], tls.credentials) as channel,
    ):
        stub = ConsumerServiceStub(channel)
        anywhere = {"verbs": ["publish"], "queues": ["orders*"]}
        some = {**anywhere, "when": "headers.tenant == principal.tenant"}
        try:
            for rules, expected in (
                ([consumer, anywhere], grpc.StatusCode.NOT_FOUND),  # The lease, which is none.
                ([consumer], grpc.StatusCode.PERMISSION_DENIED),
                ([consumer, anywhere], grpc.StatusCode.NOT_FOUND),
                ([consumer, some], grpc.StatusCode.PERMISSION_DENIED),
            ):
                made.write_policy(
                    {
                        "roles": {**POLICY["roles"], "mover": rules},
                        "bindings": [*POLICY["bindings"], binding],
                    }
                )
                while await outcome(stub) is not expected:
                    await asyncio.sleep(0.2)
        finally:
            made.write_policy(POLICY)
            del made.tokens["mover"]
            made.write_tokens(*made.tokens.values())
