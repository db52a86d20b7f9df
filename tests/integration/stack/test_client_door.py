"""A thief has the token of a client that may do everything, but on one queue alone.

It makes every call of every service through the ports for clients: none reaches what services do
among themselves, and none shows or changes anything of another queue.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final

import grpc.aio
import pytest
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

import slatemq
from libs.access.methods import access_of
from libs.events.slatemq.headers import BACKEND_HEADERS, TASKS_HEADER
from libs.serving.peers.elsewhere import SERVED_BY
from slatemq._rpc.rpc_status import from_rpc_error
from slatemq._rpc.tls import CertificateFiles, ChannelTls
from slatemq.errors import PermissionDenied
from slatemq.v1 import (
    access_pb2,
    consumer_pb2,
    entry_pb2,
    ingest_pb2,
    queue_pb2,
    router_pb2,
    task_pb2,
)
from slatemq.v1.janitor_pb2 import RunJobRequest
from slatemq.v1.outbox_pb2 import ResumeOutboxRequest
from tests.acceptance.local_stack import LocalStack
from tests.integration.stack.secured import Secured
from tests.integration.waiting import WAIT_SECONDS
from tests.unit.access.test_methods import rpcs

pytestmark = pytest.mark.slow

OWN, THEIRS = "own-7f3a", "theirs-9c1d"
SECRET: Final = b"what only readers of theirs may see"
REQUEST_ID: Final = "of-the-redrive-of-theirs"
VERBS: Final = ["publish", "consume", "inspect", "edit", "administer"]

POLICY: dict[str, Any] = {
    "roles": {
        "owner": [{"verbs": VERBS, "queues": [OWN]}],
        "operator": [{"verbs": ["operate"]}],
        "sharer": [
            {"verbs": ["inspect"], "queues": ["orders-*"]},
            {"verbs": ["inspect", "edit", "administer"], "queues": ["shared-*"]},
        ],
        "all": [{"verbs": [*VERBS, "operate"]}],
    },
    "bindings": [
        {"principals": ["thief"], "roles": ["owner"]},
        {"principals": ["operator"], "roles": ["operator"]},
        {"principals": ["sharer"], "roles": ["sharer"]},
        {"principals": ["ops"], "roles": ["all"]},
    ],
}

DENIED, INVALID, NOT_FOUND, OK = "PERMISSION_DENIED", "INVALID_ARGUMENT", "NOT_FOUND", "OK"
FOR_SERVICES: Final = "FOR_SERVICES_ALONE"


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Secured, LocalStack]]:
    made = Secured(tmp_path_factory.mktemp("door"), POLICY, ("thief", "operator", "sharer", "ops"))
    with made.running() as stack:
        yield made, stack


@dataclass
class Prey:
    """What is in the other queue, as its owner knows it."""

    message_id: int
    lease_token: str
    dead_letter: str
    redrive_id: str
    own_lease_token: str


class Caller:
    """Calls any method of any process with one token."""

    def __init__(self, made: Secured, stack: LocalStack, name: str) -> None:
        self._tls = ChannelTls(CertificateFiles(made.certificates / "ca.crt"))
        self._metadata = (("authorization", f"Bearer {made.tokens[name].token}"),)
        self._stack = stack

    async def call(self, rpc: MethodDescriptor, request: Message) -> list[tuple[str, str, bytes]]:
        """The code, its reason and the answers, of each kind of process that has the method."""
        return [
            await self._call(self._stack.endpoints[kind], rpc, request)
            for kind in SERVED_BY[rpc.containing_service.name]
        ]

    async def _call(
        self, address: str, rpc: MethodDescriptor, request: Message
    ) -> tuple[str, str, bytes]:
        path = f"/{rpc.containing_service.full_name}/{rpc.name}"
        data = request.SerializeToString()
        answers = b""
        async with grpc.aio.secure_channel(address, self._tls.credentials) as channel:
            try:
                if rpc.server_streaming:
                    kind: Any = (
                        channel.stream_stream if rpc.client_streaming else channel.unary_stream
                    )
                    given = iter([data]) if rpc.client_streaming else data
                    call = kind(path)(given, metadata=self._metadata)
                    async for answer in call:
                        answers += answer
                        if rpc.name in ENDLESS:
                            call.cancel()
                            break
                else:
                    unary: Any = channel.unary_unary(path)
                    answers = await unary(data, metadata=self._metadata, timeout=30)
            except grpc.aio.AioRpcError as error:
                return error.code().name, from_rpc_error(error).reason, answers
        return OK, "", answers


ENDLESS: Final = ("WatchQueues", "WatchDelayed", "Consume", "WatchRun")


async def fill(ops: slatemq.Client) -> Prey:
    """Puts secrets into the other queue, in every state, and a message into its own."""
    for queue in (OWN, THEIRS):
        await ops.create_queue(queue, max_attempts=1, backoff=slatemq.Backoff.none())
    await ops.publish(b"own", {"queue": OWN})
    (own,) = await ops.claim(OWN, wait=30, lease=3600)
    for _ in range(3):  # One of them stays available.
        sent = await ops.publish(SECRET, {"queue": THEIRS})
    (failed,) = await ops.claim(THEIRS, wait=30)
    await failed.nack("broken")
    (claimed,) = await ops.claim(THEIRS, wait=30, lease=3600)
    redrive = await ops.start_redrive(THEIRS, message_ids=[1], request_id=REQUEST_ID)
    async with asyncio.timeout(WAIT_SECONDS):
        while (await ops.get_redrive(redrive)).state is slatemq.RedriveState.RUNNING:
            await asyncio.sleep(0.05)
    async with asyncio.timeout(WAIT_SECONDS):
        while (await ops.get_queue(THEIRS)).counts.available_count != 1:
            await asyncio.sleep(0.05)
    (dead_letter,) = [one async for one in ops.list_entries(THEIRS, "failed")]
    return Prey(
        sent.message_id,
        claimed.lease_token,
        dead_letter.handle,
        redrive.redrive_id,
        own.lease_token,
    )


async def shown(ops: slatemq.Client) -> list[Any]:
    """All that is to see of the other queue."""
    queue = await ops.get_queue(THEIRS)
    entries = [
        (state, one.message_id, one.handle, one.message and one.message.payload)
        for state in ("available", "in_flight", "failed", "done")
        async for one in ops.list_entries(THEIRS, state, view="full")
    ]
    redrives = [one async for one in ops.list_redrives(THEIRS)]
    return [queue.etag, queue.revision, entries, redrives]


OF_ALL_QUEUES: Final = ("ListRedrives", "Explain", "FindMessage")
"""Where no queue is named, they are about all that the caller may inspect."""


def naming(rpc: MethodDescriptor, queue_id: str) -> Message:
    """A request that names a queue wherever the proto says that queues are named."""
    request: Any = GetMessageClass(rpc.input_type)()
    for path in rpc.GetOptions().Extensions[access_pb2.access].queues:
        *above, last = path.split(".")
        place = request
        for name in above:
            value = getattr(place, name)
            place = value.add() if hasattr(value, "add") else value
        text = f"{queue_id}/1/" if last == "handle" else queue_id
        if isinstance(getattr(place, last), str):
            setattr(place, last, text)
        else:
            getattr(place, last).append(text)
    return request  # type: ignore[no-any-return]


def attacks(prey: Prey) -> dict[str, list[tuple[Message, str]]]:
    """Requests that no field of the proto gives away, each with the code it must get."""
    return {**of_messages(prey), **of_queues(prey)}


def of_messages(prey: Prey) -> dict[str, list[tuple[Message, str]]]:
    """Requests about messages, whose queues no field names."""
    other = prey.lease_token[:-1] + ("1" if prey.lease_token[-1] != "1" else "2")
    Command = consumer_pb2.Command  # noqa: N806 - a type
    push = Command(push=consumer_pb2.PushCommand(queue_id=THEIRS, payload=b"x"))
    header = Command(push=consumer_pb2.PushCommand(queue_id=THEIRS, headers={"queue": OWN}))
    moved = Command(
        transfer=consumer_pb2.TransferCommand(
            lease_token=prey.own_lease_token, target_queue_id=THEIRS
        )
    )
    ended = Command(complete=consumer_pb2.CompleteCommand(lease_token=other))
    foreign = Command(complete=consumer_pb2.CompleteCommand(lease_token=prey.lease_token))
    tokens = (other, prey.lease_token)  # One guessed, and one that was passed on.

    def published(**headers: str) -> Any:
        run = ingest_pb2.PublishRun(payloads=[b"x"], headers=headers)
        return ingest_pb2.PublishRequest(runs=[run])

    # What consumers of event queues would take for an event, or for a task that publishes anything
    forged = [{"queue": OWN, name: "slatemq"} for name in BACKEND_HEADERS]
    pushed = [
        Command(push=consumer_pb2.PushCommand(queue_id=OWN, headers={name: "slatemq"}))
        for name in BACKEND_HEADERS
    ]
    streamed = [
        ingest_pb2.PublishStreamRequest(number=1, publish=published(**headers))
        for headers in ({"queue": THEIRS}, *forged)
    ]
    task = "task_01ARZ3NDEKTSV4RRFFQ69G5FAV"
    return {
        "Ack": [(consumer_pb2.AckRequest(lease_tokens=[one]), OK) for one in tokens],
        "Nack": [
            (consumer_pb2.NackRequest(items=[consumer_pb2.NackItem(lease_token=one)]), OK)
            for one in tokens
        ],
        "ExtendLease": [
            (consumer_pb2.ExtendLeaseRequest(lease_tokens=[one]), OK) for one in tokens
        ],
        "Execute": [
            (consumer_pb2.ExecuteRequest(commands=[push]), DENIED),
            (consumer_pb2.ExecuteRequest(commands=[header]), DENIED),
            *((consumer_pb2.ExecuteRequest(commands=[one]), DENIED) for one in pushed),
            (consumer_pb2.ExecuteRequest(commands=[moved]), DENIED),
            (consumer_pb2.ExecuteRequest(commands=[ended]), NOT_FOUND),
            (consumer_pb2.ExecuteRequest(commands=[foreign]), DENIED),
        ],
        "Publish": [
            (published(queue=THEIRS), DENIED),
            (published(), DENIED),
            *((published(**headers), DENIED) for headers in forged),
        ],
        "PublishStream": [(one, OK) for one in streamed],
        "BatchGetMessages": [
            (ingest_pb2.BatchGetMessagesRequest(message_ids=[prey.message_id]), DENIED)
        ],
        "GetTask": [(task_pb2.GetTaskRequest(task_id=task), "FAILED_PRECONDITION")],
        "WaitTask": [(task_pb2.WaitTaskRequest(task_id=task), "FAILED_PRECONDITION")],
    }


def of_queues(prey: Prey) -> dict[str, list[tuple[Message, str]]]:
    """Requests about queues, whose answers might show others."""
    Queue = queue_pb2.Queue  # noqa: N806 - a type

    def updated(source: str) -> Any:
        request = queue_pb2.UpdateQueueRequest(queue=Queue(queue_id=OWN, filter=source))
        request.update_mask.paths.append("filter")
        return request

    return {
        "GetRedrive": [(entry_pb2.GetRedriveRequest(redrive_id=prey.redrive_id), NOT_FOUND)],
        "CancelRedrive": [(entry_pb2.CancelRedriveRequest(redrive_id=prey.redrive_id), NOT_FOUND)],
        "ResumeRedrive": [(entry_pb2.ResumeRedriveRequest(redrive_id=prey.redrive_id), NOT_FOUND)],
        "ListQueues": [(queue_pb2.ListQueuesRequest(), OK)],
        "GetShardLoad": [(queue_pb2.GetShardLoadRequest(), OK)],
        "LocateQueue": [
            (queue_pb2.LocateQueueRequest(queue_id=one, fresh=fresh), DENIED)
            for one in (THEIRS, "no-such-queue")
            for fresh in (False, True)
        ],
        "WatchQueues": [(queue_pb2.WatchQueuesRequest(), OK)],
        "GetTopology": [],
        "GetInstance": [],
        "GetCaller": [],
        # Methods whose queues a field names, but whose answers might show more
        "FindMessage": [(entry_pb2.FindMessageRequest(message_id=prey.message_id), OK)],
        "ListRedrives": [(entry_pb2.ListRedrivesRequest(), OK)],
        "Explain": [(router_pb2.ExplainRequest(headers={"queue": THEIRS}), OK)],
        "GetEntry": [
            (
                entry_pb2.GetEntryRequest(
                    handle=f"{OWN}/{prey.message_id:x}/l{prey.lease_token}",
                    view=entry_pb2.ENTRY_VIEW_FULL,
                ),
                NOT_FOUND,
            ),
            (
                entry_pb2.GetEntryRequest(handle=prey.dead_letter.replace(THEIRS, OWN)),
                NOT_FOUND,
            ),
        ],
        "StartRedrive": [
            (entry_pb2.StartRedriveRequest(queue_id=OWN, target_queue_id=THEIRS), DENIED),
            (
                entry_pb2.StartRedriveRequest(queue_id=OWN, request_id=REQUEST_ID),
                INVALID,
            ),
            (entry_pb2.StartRedriveRequest(queue_id=OWN), OK),
        ],
        "CreateQueue": [
            (
                queue_pb2.CreateQueueRequest(queue=Queue(queue_id=OWN), with_queue_id=THEIRS),
                DENIED,
            ),
            (
                queue_pb2.CreateQueueRequest(
                    queue=Queue(queue_id=OWN, filter="true"), start_from_beginning=True
                ),
                DENIED,
            ),
        ],
        "UpdateQueue": [
            (updated("true"), DENIED),
            (updated(f'headers.queue == "{THEIRS}"'), DENIED),
            (updated(f'headers.queue in ["{OWN}", "{THEIRS}"]'), DENIED),
            (updated(f'headers.queue == "{OWN}" || size > 0'), DENIED),
            (updated(f'headers.queue == "{OWN}" && size > 0'), OK),
        ],
    }


@asynccontextmanager
async def prey_of(made: Secured, stack: LocalStack) -> AsyncIterator[tuple[Prey, slatemq.Client]]:
    async with slatemq.connect(stack.endpoint, credentials=made.credentials("ops")) as ops:
        try:
            yield await fill(ops), ops
        finally:
            for queue in (OWN, THEIRS):
                await ops.delete_queue(queue)


async def test_a_stolen_token_reaches_its_own_queue_and_nothing_else(
    secured: tuple[Secured, LocalStack],
) -> None:
    made, stack = secured
    thief = Caller(made, stack, "thief")
    async with asyncio.timeout(240), prey_of(made, stack) as (prey, ops):
        before = await shown(ops)
        of_no_field = attacks(prey)
        seen: set[str] = set()
        for rpc in rpcs():
            access = access_of(f"/{rpc.containing_service.full_name}/{rpc.name}")
            empty = GetMessageClass(rpc.input_type)()
            tries: list[tuple[Message, str]] = list(of_no_field.get(rpc.name, []))
            if access.caller in ("service", "operate"):
                tries.append((empty, DENIED))
            elif access.readers:
                tries.append((naming(rpc, THEIRS), DENIED))
            else:
                assert rpc.name in of_no_field, f"say what a thief might ask of {rpc.full_name}"
            for request, expected in tries:
                for code, reason, answers in await thief.call(rpc, request):
                    assert code == expected, (rpc.full_name, request, reason)
                    if expected == DENIED:
                        is_internal = access.caller == "service"
                        assert (reason == FOR_SERVICES) is is_internal, rpc.full_name
                    assert SECRET not in answers, rpc.full_name
                    if rpc.name in REFUSED_WITHIN:
                        assert REFUSED_WITHIN[rpc.name](answers) > 0, rpc.full_name
                    if rpc.name not in SAYS_WHAT_WAS_ASKED:
                        assert THEIRS.encode() not in answers, rpc.full_name
            # A request that names no queue where it could is refused, or answered for its own
            nameless = [empty, naming(rpc, "")] if access.readers else [empty]
            for request in nameless:
                for code, _, answers in await thief.call(rpc, request):
                    may = (INVALID, NOT_FOUND, OK) if rpc.name in OF_ALL_QUEUES else (INVALID,)
                    if access.readers and access.caller != "operate":  # Refused above, whole.
                        assert code in may, (rpc.full_name, request)
                    assert code not in ("INTERNAL", "UNKNOWN"), rpc.full_name
                    assert THEIRS.encode() not in answers, rpc.full_name
            seen.add(rpc.name)

        assert of_no_field.keys() <= seen
        assert await shown(ops) == before


REFUSED_WITHIN: Final[dict[str, Callable[[bytes], int]]] = {
    "Ack": lambda data: consumer_pb2.AckResponse.FromString(data).results[0].code,
    "Nack": lambda data: consumer_pb2.NackResponse.FromString(data).results[0].code,
    "ExtendLease": lambda data: (
        consumer_pb2.ExtendLeaseResponse.FromString(data).results[0].status.code
    ),
    "PublishStream": lambda data: (
        ingest_pb2.PublishStreamResponse.FromString(data).answers[0].error.code
    ),
}
"""The codes in the answers of calls that refuse each item by itself."""

SAYS_WHAT_WAS_ASKED: Final = ("PublishStream", "Ack", "Nack", "ExtendLease")
"""Their answers have the refusal of the request, with the name of the queue in it."""


def test_the_calls_among_services_are_those_that_no_client_may_make() -> None:
    internal = {
        rpc.name
        for rpc in rpcs()
        if access_of(f"/{rpc.containing_service.full_name}/{rpc.name}").caller == "service"
    }

    assert internal >= {
        *("Assign", "Backfill", "QuarantineQueue", "GetRoutingState", "ForgetMessage"),
        *("TailLog", "GetLogStatus", "FindLogPosition", "Push", "ReplaceMessage"),
        "GetMessageMetadata",
        *("RaisePurgeEpoch", "PurgeMessages", "RemoveEntries", "GetNameUse"),
        *("CreateSnapshot", "RenewSnapshot", "ReleaseSnapshot"),
    }


async def test_an_operator_reads_no_message_and_changes_no_queue(
    secured: tuple[Secured, LocalStack],
) -> None:
    made, stack = secured
    operator = Caller(made, stack, "operator")
    async with asyncio.timeout(240), prey_of(made, stack) as (prey, ops):
        before = await shown(ops)
        for rpc in rpcs():
            access = access_of(f"/{rpc.containing_service.full_name}/{rpc.name}")
            if access.caller in ("operate", "authenticated"):
                continue
            tries = [naming(rpc, THEIRS), *(one for one, _ in attacks(prey).get(rpc.name, []))]
            for request in tries:
                for code, _, answers in await operator.call(rpc, request):
                    assert code == DENIED, (rpc.full_name, request)
                    assert not answers
        methods = {rpc.name: rpc for rpc in rpcs()}
        for method, request in (
            ("RunJob", RunJobRequest(job="restore")),
            ("RunJob", RunJobRequest(job="restore", queue_ids=[THEIRS], target_queue_id=OWN)),
            ("ResumeOutbox", ResumeOutboxRequest()),
        ):
            ((code, _, _),) = await operator.call(methods[method], request)
            assert code == DENIED, request
        assert await shown(ops) == before


async def test_a_filter_of_ones_own_takes_no_message_of_others_to_be_edited(
    secured: tuple[Secured, LocalStack],
) -> None:
    made, stack = secured
    async with (
        asyncio.timeout(60),
        slatemq.connect(stack.endpoint, credentials=made.credentials("ops")) as ops,
        slatemq.connect(stack.endpoint, credentials=made.credentials("sharer")) as sharer,
    ):

        async def delayed_in(queue_id: str) -> slatemq.Entry:
            while True:
                async for entry in ops.list_entries(queue_id, "delayed"):
                    return entry

        # Given queues of its own, one of which takes what goes to another one
        await ops.create_queue("orders-taken", default_delay=900)
        await sharer.create_queue(
            "shared-copies", filter='headers.queue == "orders-taken"', default_delay=900
        )
        for name in ("shared-own", "shared-tasks", "shared-pushed"):
            await sharer.create_queue(name, default_delay=900)
        await ops.publish(b"true", {"queue": "orders-taken"})
        await ops.publish(b"own", {"queue": "shared-own"})
        await ops.publish(b"task", {"queue": "shared-tasks", TASKS_HEADER: "1"})
        await ops.execute([slatemq.Push("shared-pushed", b"pushed")])

        # Then it edits what is its own, and nothing that other queues have
        copy, task = await delayed_in("shared-copies"), await delayed_in("shared-tasks")
        for entry, right in (
            (copy, {"verb": "edit", "queue": "orders-taken"}),
            (task, {"verb": "publish", "queue": "shared-tasks"}),
        ):
            with pytest.raises(PermissionDenied) as caught:
                await sharer.edit_message(entry.handle, payload=b"forged")
            assert caught.value.metadata == right
        for name in ("shared-own", "shared-pushed"):
            entry = await delayed_in(name)
            await sharer.edit_message(entry.handle, payload=b"edited")
